"""From a plan to what the children are told."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from mesh_llm.config import ALL_LAYERS, NodeConfig
from mesh_llm.engine import machine
from mesh_llm.engine.spec import (
    AdapterSpec,
    DraftSpec,
    EngineSpec,
    LinkSpec,
    PaceSpec,
    StatesSpec,
)
from mesh_llm.errors import ModelError
from mesh_llm.frozen import frozen
from mesh_llm.local.hardware import Hardware
from mesh_llm.local.modalities import modalities
from mesh_llm.mesh_settings import ENGINE_OPTIONS, Adapter, ModelSettings, given_options
from mesh_llm.planning.batch_sizes import Batches, batches
from mesh_llm.planning.fit import (
    CHECKPOINTS,
    CacheSettings,
    advice,
    checkpoint_bytes,
    layer_cache_bytes,
    smallest_context,
)
from mesh_llm.planning.layer_costs import load_of
from mesh_llm.planning.memory_budget import most_bytes, usable_bytes
from mesh_llm.planning.memory_layout import free_of, lodge
from mesh_llm.planning.shared_machines import threads_of
from mesh_llm.planning.solo_fit import Fit, fit_solo
from mesh_llm.planning.speculation import (
    cache_settings,
    draft_off,
    made_by,
    model_draft_depth,
    mtp_draft_depth,
    needs_states,
    text_draft_depth,
)
from mesh_llm.types import ModelFacts, NodeId, Plan

log = logging.getLogger(__name__)

PROMPT_CACHE_LIMIT_BYTES = 8 << 30
"""What the engine keeps of finished prompts in main memory, when there is as much to spare."""
_TEXTS = 8
"""Times what all slots hold: so much of other texts is kept where workers have room for them, too."""
_POSITION_BYTES = 24
"""For each token of a saved text, where layers attend to everything and to windows."""


def threads(config: NodeConfig, nodes_here: int) -> int:
    """Cores are shared with the other nodes of this machine."""
    return config.threads or threads_of(machine.threads(), nodes_here)


@frozen
class Launch:
    """What the engine child needs to know, beside the plan."""

    me: NodeId
    config: NodeConfig
    hardware: Hardware
    model: ModelFacts
    settings: ModelSettings
    draft: Path | None = None
    """The draft model's file, where it is here."""
    projector: Path | None = None
    """The mesh's, where it is here."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Files of LoRA adapters that are here, by digest."""
    stamps: Mapping[str, str] = field(default_factory=dict)
    """Of all these files as they were when they were checked."""

    def engine(self, plan: Plan, links: tuple[LinkSpec, ...], *, nodes_here: int) -> EngineSpec:
        settings = made_by(plan, self.model, self.settings)
        if settings != self.settings:
            return replace(self, settings=settings).engine(plan, links, nodes_here=nodes_here)
        config, facts = self.config, self.model
        fit = self._fit_alone(plan) if not links else None
        devices, gpu_layers = (fit.devices, fit.gpu_layers) if fit else self._beside_workers(plan)
        can = modalities(config, facts, self.projector)
        sizes = batches(plan, facts, whole=can.embeddings or can.rerank, images=can.projector is not None)
        # A person's own micro-batch is not to be cut by our step.
        batch = max(sizes.step, int(config.settings.get("n_ubatch", 0)))
        guesses = not can.embeddings and not can.rerank and config.bin_dir is None
        return EngineSpec(
            model=str(facts.files[0]),
            alias=self.settings.alias,
            context=plan.context * plan.slots,
            slots=plan.slots,
            threads=threads(config, nodes_here),
            key=secrets.token_urlsafe(32),
            devices=devices,
            gpu_layers=gpu_layers,
            overrides=self._overrides(plan, gpu_layers) if devices and gpu_layers else (),
            batch=batch,
            micro_batch=sizes.micro,
            pace=_pace(sizes, plan.slots),
            embeddings=can.embeddings,
            rerank=can.rerank,
            mmproj=str(can.projector) if can.projector else None,
            adapters=tuple(map(self._adapter, self.settings.adapters)),
            prompt_cache_mib=min(PROMPT_CACHE_LIMIT_BYTES, max(0, fit.spare_bytes) // 2) >> 20 if fit else 0,
            libraries=self.hardware.library_paths(),
            settings=config.settings,
            bin_dir=str(config.bin_dir) if config.bin_dir else None,
            draft=self._draft(batch, plan) if guesses else DraftSpec(),
            states=self._states(plan) if links and guesses else None,
            trace=str(config.trace) if config.trace else None,
            files=tuple(str(file) for file in facts.files),
            fingerprint=facts.fingerprint,
            head_tied=facts.head_bytes == 0,
            head_on_worker=plan.head_on_worker,
            stamps=dict(self.stamps),
            links=tuple(self._with_room(plan, links)),
            **given_options(self.settings, ENGINE_OPTIONS),
        )

    def _adapter(self, adapter: Adapter) -> AdapterSpec:
        path = self.adapters.get(adapter.file.digest)
        if path is None:
            raise ModelError(f"the LoRA adapter {adapter.file.name} is no longer on this machine")
        return AdapterSpec(path=str(path), scale=adapter.scale, digest=adapter.file.digest)

    def _states(self, plan: Plan) -> StatesSpec:
        """What a split engine saves; the host keeps its own part in main memory."""
        own = next((stage for stage in plan.stages if stage.node == self.me), None)
        layers = self.model.layers[own.first : own.last] if own else ()
        wish = self.wish(plan.context)
        cells = sum(layer_cache_bytes(layer, wish) for layer in layers)
        positions = _POSITION_BYTES * plan.context * plan.slots
        spare = usable_bytes(self.hardware) - (own.need_bytes if own else 0)
        most = min(PROMPT_CACHE_LIMIT_BYTES, _TEXTS * (cells + positions), max(0, spare) // 2 // plan.lanes)
        return StatesSpec(checkpoints=CHECKPOINTS, prompt_cache_mib=-(-most >> 20))

    def _with_room(self, plan: Plan, links: tuple[LinkSpec, ...]) -> Iterator[LinkSpec]:
        wish = self.wish(plan.context)
        for stage, link in zip(plan.workers, links, strict=True):
            layers = self.model.layers[stage.first : stage.last]
            yield replace(link, state_bytes=checkpoint_bytes(layers, wish))

    def _draft(self, batch: int, plan: Plan) -> DraftSpec:
        """How far to guess ahead. A host without the draft's file does it by the text alone.

        The engine aborts where the guesses of all slots, and a token of each, are more than a batch.
        """
        most = max(0, int(self.config.settings.get("n_batch", batch)) // plan.slots - 1)
        off = draft_off(plan, self.settings)
        if off is not None:
            log.info("draft not used: %s", off)
        here = self.draft is not None and off is None
        depth = min(most, model_draft_depth(self.settings)) if here else 0
        return DraftSpec(
            text_depth=min(most, text_draft_depth(self.settings)),
            model=str(self.draft) if depth else None,
            model_depth=depth,
            reads_layers=depth > 0 and self.settings.draft is not None and bool(self.settings.draft.layers),
            # It reads what the output head does: beside it, or not at all.
            head_depth=0 if plan.head_on_worker else min(most, mtp_draft_depth(self.model, self.settings)),
            head_layer=len(self.model.layers) - 1,
            needs_states=needs_states(self.model),
        )

    def wish(self, context: int) -> CacheSettings:
        """What the mesh's settings ask for, at so many tokens per slot."""
        return cache_settings(self.model, self.settings, context)

    def advice(self, have_bytes: int) -> str:
        """What would make the model fit here."""
        return advice(
            self.model, self.wish(self.settings.context or smallest_context(self.model)), have_bytes
        )

    def _fit_alone(self, plan: Plan) -> Fit:
        wish = self.wish(plan.context)
        return fit_solo(
            self.model,
            wish,
            wish,
            memory_bytes=self.hardware.memory_bytes,
            gpus=self.hardware.gpus,
            gpu_layers=self.config.gpu_layers,
            cpu_moe=self.hardware.cpu_moe,
            max_memory_bytes=most_bytes(self.hardware),
        )

    def _beside_workers(self, plan: Plan) -> tuple[tuple[str, ...], int]:
        """The devices of a host that has workers, and how many of its own layers lie there, as planned."""
        own = next((stage for stage in plan.stages if stage.node == self.me), None)
        first, last = (own.first, own.last) if own else (0, 0)
        load = load_of(self.model, replace(self.wish(plan.context), lanes=plan.lanes))
        free, head = free_of(self.hardware), not plan.head_on_worker
        place = lodge(free, load, first, last, host=True, head=head)
        if place is None or not place.gpu_bytes:
            return (), 0
        return tuple(gpu.name for gpu in self.hardware.gpus), place.on_gpu

    def _overrides(self, plan: Plan, gpu_layers: int) -> tuple[str, ...]:
        """Weights of its own layers on GPUs that are to lie in main memory, by their names."""
        if not self.config.in_main_memory:
            return ()
        own = next(stage for stage in plan.stages if stage.node == self.me)
        first = max(own.first, own.last - gpu_layers)
        # All layers, where other patterns than that of experts do not count them.
        bound = self.config.expert_layers or ALL_LAYERS
        numbers = "|".join(map(str, range(first, min(own.last, first + bound))))
        # Not of other layers. The engine reads a pattern up to its first "=", so it cannot say (?=...).
        return (rf"^(?!(?!blk\.({numbers})\.)).*({self.config.in_main_memory})",)


def _pace(sizes: Batches, slots: int) -> PaceSpec | None:
    """Everybody's next token comes first."""
    if (beside := sizes.beside) is None:
        return None
    return PaceSpec(usual=beside.usual + slots, fewest=beside.fewest + slots)
