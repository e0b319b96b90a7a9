"""How far an engine guesses ahead, and how a mesh's settings ask it to run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mesh_llm.defaults import GUESS_TEXT_MAX, MTP_DRAFT_MAX
from mesh_llm.mesh_settings import Draft, ModelSettings
from mesh_llm.planning.batch_sizes import LARGEST, micro_batch
from mesh_llm.planning.fit import CacheSettings, compute_bytes, stage_need
from mesh_llm.types import ModelFacts, Plan

_KEPT_STATES = 512
"""Of each slot, for an MTP or EAGLE3 head: `KEPT` in native/hooks/mtp_head.h."""
_F16_BYTES, _F32_BYTES = 2, 4


def text_draft_depth(settings: ModelSettings) -> int:
    """Tokens guessed at once by what stood in the text before; 0 where nothing is guessed."""
    return GUESS_TEXT_MAX if settings.guess else 0


def model_draft_depth(settings: ModelSettings) -> int:
    """The same by the draft model."""
    return settings.draft_max if settings.draft is not None and settings.guess else 0


def mtp_draft_depth(model: ModelFacts, settings: ModelSettings) -> int:
    """The same by the model's own layer for further tokens (MTP); a draft model comes before it."""
    return MTP_DRAFT_MAX if model.mtp_cache is not None and settings.draft is None and settings.guess else 0


def needs_states(model: ModelFacts) -> bool:
    """Whether a wrong guess is taken back by a state saved before it: such a state cannot be cut."""
    return any(layer.cache.state_bytes for layer in model.layers)


def draft_off(plan: Plan, settings: ModelSettings) -> str | None:
    """Why the mesh's draft is not used with this plan: what an EAGLE3 head reads is to cross no link."""
    draft = settings.draft
    if draft is None or not draft.layers or not plan.workers:
        return None
    if plan.head_on_worker:
        return f"{draft.name} is off: the output head is on another node"
    # What a layer reads is where the layer before it is.
    own = max((stage.last for stage in plan.stages if stage.node == plan.host), default=0)
    if far := [str(layer) for layer in draft.layers if layer > own]:
        return f"{draft.name} is off: what it reads of layers {', '.join(far)} is on other nodes"
    return None


def kept_input_bytes(head: ModelFacts, slots: int) -> int:
    """Of the model's layers, for an EAGLE3 head: a batch at the engine, and the last tokens of each slot."""
    return _F32_BYTES * len(head.read_layers) * head.read_width * (LARGEST + _KEPT_STATES * slots)


def leaner(model: ModelFacts, settings: ModelSettings) -> Iterator[ModelSettings]:
    """The same settings with less to guess with, where that is what does not fit."""
    if settings.draft is not None:
        yield replace(settings, draft=None)
    if model.mtp_cache is not None and settings.guess:
        yield replace(settings, draft=None, guess=False)


def made_by(plan: Plan, model: ModelFacts, settings: ModelSettings) -> ModelSettings:
    """The settings that a plan was made by: with less to guess with where only so it fits."""
    stage = next((stage for stage in plan.stages if stage.node == plan.host), None)
    wishes = [settings, *leaner(model, settings)]
    if stage is None:
        return settings
    head = not plan.head_on_worker or stage is plan.stages[-1]

    def fits(wish: ModelSettings) -> bool:
        cache = replace(cache_settings(model, wish, plan.context), lanes=plan.lanes)
        need = stage_need(model, cache, (stage.first, stage.last), host=True, head=head)
        return stage.need_bytes >= need.total_bytes

    return next((wish for wish in wishes[:-1] if fits(wish)), wishes[-1])


def cache_settings(model: ModelFacts, settings: ModelSettings, context: int) -> CacheSettings:
    """What the mesh's settings ask for, at so many tokens per slot."""
    guesses = max(text_draft_depth(settings), model_draft_depth(settings))
    by_head = mtp_draft_depth(model, settings)
    cache = CacheSettings(
        context=context,
        slots=settings.slots,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        micro_batch=micro_batch(model),
        guesses=guesses,
        draft=settings.draft if guesses else None,
        adapter_bytes=sum(adapter.file.size_bytes for adapter in settings.adapters),
        snapshots=by_head if model.keeps_snapshots else 0,
    )
    return replace(cache, draft=_own_draft(model, cache)) if by_head else cache


def _own_draft(model: ModelFacts, settings: CacheSettings) -> Draft:
    """What the MTP head takes on the host, as if it were a draft model.

    Its weights are counted with the last layers, too: too much memory asked for is an annoyance.
    """
    assert model.mtp_cache is not None
    states = _F32_BYTES * model.hidden * _KEPT_STATES * settings.slots
    return Draft(
        name=model.name,
        fingerprint=model.fingerprint,
        weight_bytes=model.layers[-1].weight_bytes,
        cache_bytes=_F16_BYTES * (model.mtp_cache.k_width + model.mtp_cache.v_width),
        compute_bytes=compute_bytes(model, replace(settings, guesses=0)) + states,
    )
