"""What `mesh-llm plan` shows: who would compute what, how fast and why. Nothing is started."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home
from mesh_llm.local import hardware, model_names
from mesh_llm.local.absent_model import look_up
from mesh_llm.local.draft_model import DraftModels
from mesh_llm.local.model_files import ModelFiles, file_stem
from mesh_llm.local.own_settings import own_settings
from mesh_llm.membership.fact_documents import facts_to_document
from mesh_llm.membership.settings_documents import options_from_document
from mesh_llm.mesh_settings import MeshSettings, ModelSettings, as_one, with_changes
from mesh_llm.models.names import Here
from mesh_llm.planning.alternative import Alternative, alternative
from mesh_llm.planning.decide import decide
from mesh_llm.planning.experience import Experience, plan_key
from mesh_llm.planning.fit import gigabytes
from mesh_llm.planning.making_room import make_room
from mesh_llm.planning.other_models import without
from mesh_llm.planning.snapshot import Candidate, Snapshot, listing
from mesh_llm.planning.speculation import draft_off, made_by, model_draft_depth
from mesh_llm.planning.supposed_machines import SupposedMachine, joined, less_certain
from mesh_llm.planning.would_fit import supposed
from mesh_llm.report import status
from mesh_llm.report.experience_file import ExperienceFile
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import to_document
from mesh_llm.types import (
    Address,
    Event,
    Fingerprint,
    HeldModel,
    Mode,
    ModelFacts,
    NodeFacts,
    NodeId,
    Plan,
    Role,
)

THIS_MACHINE = NodeId("0" * 64)
"""Stands for a node that does not run."""

Beside = Mapping[Fingerprint, Sequence[Plan]]
"""Plans of other models that have memory."""

_OF_DRAFTS = ("draft", "draft_max", "no_draft")


@frozen
class Forecast:
    snapshot: Snapshot
    model: ModelFacts
    settings: ModelSettings
    plan: Plan
    other: Alternative | None
    assumed: tuple[NodeId, ...] = ()
    """Nodes that were taken to have the model's file, and have not."""
    notes: tuple[str, ...] = ()
    seen: Callable[[Plan], Experience] = field(default=lambda _: Experience(), compare=False, repr=False)
    """What a plan has shown here before."""

    def document(self) -> dict[str, Any]:
        plan, model = self.plan, self.model
        ids = listing(plan.host, (node.id for node in self.snapshot.nodes))
        return {
            "model": {
                "name": self.settings.alias,
                "fingerprint": model.fingerprint,
                "quantisation": model.quantisation,
                "size_bytes": model.size_bytes,
                "layers": len(model.layers),
                "context": plan.context,
                "slots": plan.slots,
                "draft": self._draft(),
            },
            "nodes": [_node(self.snapshot, id) for id in ids],
            "assumed": [id for id in ids if id in self.assumed],
            "notes": list(self.notes),
            "plan": self._plan(plan),
            "alternative": None if self.other is None else self._other(self.other),
        }

    def _draft(self) -> dict[str, Any] | None:
        draft = self.settings.draft
        if draft is None or not model_draft_depth(self.settings):
            return None
        fits = made_by(self.plan, self.model, self.settings).draft is not None
        off = draft_off(self.plan, self.settings)
        return {"name": draft.name, "weight_bytes": draft.weight_bytes, "fits": fits, "off": off}

    def _plan(self, plan: Plan) -> dict[str, Any]:
        document: dict[str, Any] = to_document(status.plan_status(plan, epoch=None, seen=self.seen(plan)))
        for stage in document["stages"]:
            stage["link"] = _link(self.snapshot, plan.host, stage["node"])
        return document

    def _other(self, other: Alternative) -> dict[str, Any]:
        plan = self._plan(other.plan) if other.plan is not None else None
        return {"mode": other.mode, "reason": other.reason, "plan": plan}


def _node(snapshot: Snapshot, id: NodeId) -> dict[str, Any]:
    found = snapshot.node(id)
    assert found is not None
    return {"id": id, "name": found.facts.name or id[:8], "memory_bytes": found.facts.memory_bytes}


def _link(snapshot: Snapshot, host: NodeId | None, node: NodeId) -> dict[str, Any]:
    if host is None or host == node:
        return {"kind": "self", "rtt_ms": 0.0}
    link = snapshot.link(host, node)
    if link is None:
        return {"kind": None, "rtt_ms": None}
    return {"kind": link.kind, "rtt_ms": round(1e3 * link.rtt_s, 3)}


# -- over a mesh ----------------------------------------------------------------------------------


async def over_mesh(view: NodeView, wishes: Mapping[str, Any]) -> dict[str, Any]:
    """As the mesh is now, beside the models that it serves; with `wishes` for another model or other options,
    as if they were its own."""
    agreed = view.settings()
    if agreed is None:
        raise MeshError("this node is not in its mesh yet", hint="try again in a moment")
    asked = _served_as(agreed, wishes.get("model"))
    looked_at = await _model(view, asked, wishes.get("model"))
    if looked_at is None:
        return await _as_told(view, asked)
    model, notes = looked_at.facts, looked_at.notes
    served = agreed.of(model.fingerprint)
    whole = view.mesh.snapshot()
    whole, assumed = (whole, ()) if served is not None else _supposed(whole, model)
    settings, told = await _wished(view, served, looked_at, wishes)
    beside = _beside(view, agreed, model.fingerprint)
    barred = view.mesh.unready()

    def plan_without(gone: Collection[Fingerprint]) -> Plan:
        left = _left(whole, beside, gone)
        return decide(left, model, settings, current=None, barred=barred)

    plan = _running(view, served) if settings == served else None
    plan = plan or plan_without(())
    loaded = view.others_loaded(settings) if plan.mode is Mode.WAITING else ()
    room = make_room(loaded, plan_without) if loaded else None
    if room is not None and room.is_enough:
        settled = view.settled(room, model.fingerprint)
        told = (*told, settled.reason(view.mesh.name_of))
    if room is not None and room.goes:
        plan, gone = room.plan, {each.fingerprint for each in room.goes}
        beside = {fingerprint: plans for fingerprint, plans in beside.items() if fingerprint not in gone}
    snapshot = _left(whole, beside, ())
    other = alternative(snapshot, model, settings, plan, barred=barred)
    if beside:
        alone = decide(whole, model, settings, current=None, barred=barred)
        frees = plan.mode is Mode.WAITING and alone.mode is not Mode.WAITING
        names = [each.alias for each in agreed.models if each.fingerprint in beside]
        told = (*told, _beside_text(names, beside, frees=frees))
    return Forecast(
        snapshot=snapshot,
        model=model,
        settings=settings,
        plan=plan,
        other=other,
        assumed=assumed,
        notes=(*notes, *told),
        seen=view.experience,
    ).document()


async def _wished(
    view: NodeView, served: ModelSettings | None, model: LookedAt, wishes: Mapping[str, Any]
) -> tuple[ModelSettings, tuple[str, ...]]:
    """The settings of a model: its own, or those that `mesh-llm load` would give it; with what is wished."""
    changes = options_from_document(wishes)
    if served is not None and all(wishes.get(name) is None for name in _OF_DRAFTS):
        return with_changes(served, changes), ()
    draft, draft_max = wishes.get("draft"), wishes.get("draft_max")
    # What guesses nothing goes on so, unless it is asked otherwise.
    off = view.config.no_draft if served is None else not served.guess
    config = NodeConfig(
        home=view.config.home,
        bin_dir=view.config.bin_dir,
        slots=changes.get("slots", served.slots if served is not None else None),
        draft=draft,
        draft_max=draft_max,
        no_draft=bool(wishes.get("no_draft")) or (off and not (draft or draft_max)),
    )
    own, told = await _settings(view.model_files, config, model)
    guessing = {name: getattr(own, name) for name in ("guess", "draft", "draft_max")}
    return with_changes(served or as_one(own), changes | guessing), told


def _served_as(agreed: MeshSettings, name: str | None) -> ModelSettings | None:
    """The default model where none is named."""
    return next((each for each in agreed.models if name in (None, each.model, each.alias)), None)


def _running(view: NodeView, served: ModelSettings | None) -> Plan | None:
    own = (model for model in view.models() if model.settings() == served)
    return next((model.hosting.plan for model in own), None)


def _beside(view: NodeView, agreed: MeshSettings, fingerprint: Fingerprint) -> Beside:
    """Plans of other models that have memory now."""
    starting = [each for member in view.mesh.alive() for each in member.facts.starting]
    found = {}
    for model in agreed.models:
        if model.fingerprint != fingerprint:
            plans = {each.replica: each.plan for each in starting if each.fingerprint == model.fingerprint}
            plans |= {
                number: each.plan for number, (_, each) in view.mesh.replicas(model.fingerprint).items()
            }
            found[model.fingerprint] = [plan for plan in plans.values() if plan.mode is not Mode.WAITING]
    return {fingerprint: plans for fingerprint, plans in found.items() if plans}


def _left(snapshot: Snapshot, beside: Beside, gone: Collection[Fingerprint]) -> Snapshot:
    """What those leave that are not `gone`."""
    plans = [plan for fingerprint, each in beside.items() if fingerprint not in gone for plan in each]
    return without(snapshot, plans, before=plans)


def _beside_text(names: Sequence[str], beside: Beside, *, frees: bool) -> str:
    held = gigabytes(sum(plan.need_bytes for plans in beside.values() for plan in plans))
    hold, them = ("holds", "it") if len(names) == 1 else ("hold", "them")
    without_them = f"; without {them}, this model would fit" if frees else ""
    return f"planned beside {' and '.join(names)}, which {hold} {held}{without_them}"


async def _settings(
    model_files: ModelFiles, config: NodeConfig, model: LookedAt
) -> tuple[MeshSettings, tuple[str, ...]]:
    """Those of a mesh that `config` would start, and what it would say."""
    if not model.here:
        # Whether a draft goes with it, its vocabulary would have to say.
        note = ("--draft is not counted: the model's file is not here",) if config.draft else ()
        return own_settings(config, model.facts, None), note
    told: list[Event] = []
    draft = await DraftModels(config=config, model_files=model_files, tell=told.append).choose(model.facts)
    return own_settings(config, model.facts, draft), tuple(event.text for event in told)


_NOT_LOOKED_AT: dict[str, Any] = {"address": Address(), "serving": None, "also_serving": (), "starting": ()}


def snapshot_document(view: NodeView) -> dict[str, Any]:
    """All that decisions look at, without what they do not: where nodes are, and what they serve."""
    return {
        "me": view.mesh.me,
        "nodes": [
            {
                "id": each.id,
                "alive": each.alive,
                "reachable": each.reachable,
                "facts": facts_to_document(replace(each.facts, **_NOT_LOOKED_AT)),
            }
            for each in view.mesh.snapshot().nodes
        ],
    }


async def _model(view: NodeView, served: ModelSettings | None, name: str | None) -> LookedAt | None:
    """The named one; None where it is served, and its file is not here."""
    if served is None:
        return await named_model(view.model_files, str(name), Home(view.config.home))
    known = view.model_files.facts(served.fingerprint)
    return None if known is None else LookedAt(facts=known)


async def _as_told(view: NodeView, served: ModelSettings | None) -> dict[str, Any]:
    """Of a node that lacks the model's file: what the host says."""
    models = view.models()
    model_view = next((each for each in models if each.settings() == served), models[0])
    about = await model_view.remote_engine.about()
    if about is None or about.plan is None:
        raise MeshError(
            "this node does not have the model's file, and no other one serves it",
            hint="ask a node that has it, or try again in a moment",
        )
    model, plan = to_document(about.model), to_document(about.plan)
    draft = about.model.draft if about.model is not None else None
    named = draft is not None and draft.name is not None
    loaded = (
        {"name": draft.name, "weight_bytes": None, "fits": True, "off": None}
        if draft is not None and named
        else None
    )
    return {
        "model": {**model, "draft": loaded} if model else model,
        "nodes": [{"id": m.id, "name": view.mesh.name_of(m.id)} for m in status.ordered(view)],
        "assumed": [],
        "notes": [],
        "plan": plan,
        "alternative": None,
    }


def _supposed(snapshot: Snapshot, model: ModelFacts) -> tuple[Snapshot, tuple[NodeId, ...]]:
    """The mesh, as if every node of it had the file."""
    held = HeldModel(fingerprint=model.fingerprint, name=file_stem(model), size_bytes=model.size_bytes)
    nodes, without = [], []
    for node in snapshot.nodes:
        has = any(own.fingerprint == model.fingerprint for own in node.facts.models)
        if not has and node.alive and node.facts.role is not Role.CLIENT:
            without.append(node.id)
            node = replace(node, facts=replace(node.facts, models=(*node.facts.models, held)))
        nodes.append(node)
    return Snapshot(nodes=tuple(nodes)), tuple(without)


# -- on this machine ------------------------------------------------------------------------------


async def alone(config: NodeConfig) -> dict[str, Any]:
    """For a node that would be started with `config`, and for nobody else."""
    model_files = ModelFiles(any_architecture=config.bin_dir is not None)
    model = await named_model(model_files, config.model or DEFAULT_MODEL, Home(config.home))
    return await _forecast(config, model_files, model, [await _this_machine(config, model.facts)])


async def supposing(
    config: NodeConfig,
    machines: Sequence[SupposedMachine],
    *,
    rtt_s: float,
    here: bool = False,
    members: Sequence[Candidate] = (),
) -> dict[str, Any]:
    """For machines that are not there: alone, or with those that are `here`, which are the `members` of a
    mesh, or this machine."""
    model_files = ModelFiles(any_architecture=config.bin_dir is not None)
    model = await named_model(model_files, config.model or DEFAULT_MODEL, Home(config.home))
    there = members or ([await _this_machine(config, model.facts)] if here else ())
    return await _forecast(config, model_files, model, joined(machines, there, rtt_s=rtt_s), machines)


async def _forecast(
    config: NodeConfig,
    model_files: ModelFiles,
    model: LookedAt,
    nodes: Sequence[Candidate],
    machines: Sequence[SupposedMachine] = (),
) -> dict[str, Any]:
    facts = model.facts
    settings, told = await _settings(model_files, config, model)
    snapshot = supposed(nodes, facts.fingerprint)
    plan = decide(snapshot, facts, settings, current=None)
    other = alternative(snapshot, facts, settings, plan, barred={})
    if machines:
        plan = less_certain(plan)
        other = None if other is None else replace(other, plan=other.plan and less_certain(other.plan))
        told = (*told, f"Speeds of memory that nobody measured: {'; '.join(map(str, machines))}")
    known = ExperienceFile(Home(config.home).experience_file)
    return Forecast(
        snapshot=snapshot,
        model=facts,
        settings=settings,
        plan=plan,
        other=other,
        notes=(*model.notes, *told),
        seen=lambda plan: known.of(plan_key(plan, snapshot, facts.fingerprint)),
    ).document()


async def _this_machine(config: NodeConfig, model: ModelFacts) -> Candidate:
    own = await hardware.at_hand(config, model)
    facts = NodeFacts(
        name=config.name or socket.gethostname(),
        role=Role.NODE,
        version=__version__,
        hosting=config.hosting,
        **own.facts(),
    )
    return Candidate(id=THIS_MACHINE, facts=facts)


@frozen
class LookedAt:
    """A model, by its file or by what is known of it before it is downloaded."""

    facts: ModelFacts
    here: bool = True
    notes: tuple[str, ...] = ()


async def named_model(model_files: ModelFiles, name: str, home: Home) -> LookedAt:
    """What the file of that name holds; of one that could be downloaded, what is known of it."""
    found = await model_names.resolve(name, home)
    if isinstance(found, Here):
        return LookedAt(facts=await model_files.look(found.path))
    absent = await look_up(found)
    return LookedAt(facts=absent.facts, here=False, notes=(absent.note,))
