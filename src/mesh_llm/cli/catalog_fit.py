"""`mesh-llm models --fits`: the catalog by what this machine, or its mesh, can run; the best first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from mesh_llm import __version__
from mesh_llm.cli.inventory import FreeMemory, members
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.tables import rate, size
from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_SLOTS, ENGINE_VERSION, USEFUL_CONTEXT
from mesh_llm.engine import machine
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home
from mesh_llm.local import hardware
from mesh_llm.models.catalog import Catalog, CatalogEntry
from mesh_llm.models.catalog_facts import facts_of, rough_facts
from mesh_llm.models.header_cache import NO_FINGERPRINT
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.planning.would_fit import outlook, supposed, whole_plan
from mesh_llm.types import Mode, NodeFacts, NodeId, Plan, Prediction, Role

READABLE_TOK_S = 5.0
"""As fast as people read: a model that is slower comes behind those that are not."""

_THIS_MACHINE = NodeId("0" * 64)
_HEADERS = ("name", "size", "quant", "context", "speed", "where", "good for")


@frozen
class Fitting:
    """An entry, and the plan that there would be for it."""

    entry: CatalogEntry
    plan: Plan | None
    """None where nothing is known of its size."""
    exact: bool
    """By the model's shape; else by its size and number of layers."""
    over_mesh: bool

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.mode is not Mode.WAITING

    @property
    def missing_bytes(self) -> int:
        return 0 if self.plan is None or self.fits else max(0, self.plan.need_bytes - self.plan.have_bytes)

    @property
    def predicted(self) -> Prediction | None:
        """None where nobody knows: without its shape, nobody can tell how much of it a token reads."""
        return self.plan.predicted if self.plan is not None and self.fits and self.exact else None

    @property
    def rank(self) -> tuple[int, int, int]:
        """The best first: with room for a conversation, as fast as one reads, large."""
        if self.plan is None or not self.fits:
            return 2, 0, self.missing_bytes
        short = self.plan.context < min(USEFUL_CONTEXT, self.entry.context or USEFUL_CONTEXT)
        speed = 1 if self.predicted is None else 0 if self.predicted.tok_s >= READABLE_TOK_S else 2
        return int(short), speed, -self.entry.size_bytes

    def cells(self) -> tuple[str, ...]:
        entry, plan = self.entry, self.plan
        about = "" if self.exact else "about "
        return (
            entry.name,
            size(entry.size_bytes) if entry.size_bytes else "-",
            entry.quantisation or "-",
            f"{about}{plan.context}" if plan is not None and self.fits else "-",
            rate(self.predicted.tok_s) if self.predicted is not None else "-",
            self._where(about),
            ", ".join(entry.good_for) or "-",
        )

    def _where(self, about: str) -> str:
        if self.plan is None:
            return "size not known"
        if not self.fits:
            return f"lacks {about}{size(self.missing_bytes)}" if self.missing_bytes else "in no whole layers"
        if not self.over_mesh:
            return "this machine"
        nodes = len({stage.node for stage in self.plan.stages} | {self.plan.host})
        return f"{nodes} nodes of the mesh" if nodes > 1 else "a node of the mesh"

    def document(self) -> dict[str, Any]:
        entry, plan = self.entry, self.plan
        predicted = self.predicted
        low, high = predicted.tok_s_range if predicted is not None else (None, None)
        return {
            "name": entry.name,
            "quantisation": entry.quantisation,
            "size_bytes": entry.size_bytes,
            "good_for": list(entry.good_for),
            "about": entry.about,
            "fits": self.fits,
            "over": "mesh" if self.over_mesh else "machine",
            "nodes": len({stage.node for stage in plan.stages}) if plan is not None else 0,
            "context": plan.context if plan is not None and self.fits else None,
            "slots": plan.slots if plan is not None and self.fits else None,
            "predicted_tok_s": predicted.tok_s if predicted is not None else None,
            "predicted_tok_s_low": low,
            "predicted_tok_s_high": high,
            "need_bytes": plan.need_bytes if plan is not None else None,
            "have_bytes": plan.have_bytes if plan is not None else None,
            "missing_bytes": self.missing_bytes,
            "exact": self.exact,
            "checked": entry.checked,
            "reason": plan.reason if plan is not None else "its size is not known",
        }


def fitting(catalog: Iterable[CatalogEntry], rooms: FreeMemory) -> list[Fitting]:
    """The best first. A model that fits this machine is planned for it, any other for the mesh."""
    found = [_fitting(entry, rooms) for entry in catalog]
    return sorted(found, key=lambda each: (*each.rank, each.entry.name))


def _fitting(entry: CatalogEntry, rooms: FreeMemory) -> Fitting:
    exact = facts_of(entry)
    facts = exact or rough_facts(entry)
    if facts is None:
        return Fitting(entry=entry, plan=None, exact=False, over_mesh=False)
    plan = whole_plan(rooms.here, facts, slots=DEFAULT_SLOTS)
    over_mesh = plan.mode is Mode.WAITING and rooms.mesh is not None
    if over_mesh and rooms.mesh is not None:
        plan = whole_plan(rooms.mesh, facts, slots=DEFAULT_SLOTS)
    return Fitting(entry=entry, plan=plan, exact=exact is not None, over_mesh=over_mesh)


def holds(entry: CatalogEntry, rooms: FreeMemory) -> tuple[bool | None, bool | None]:
    """Whether this machine holds it, and its mesh; None where nobody knows, or there is no mesh."""
    facts = facts_of(entry) or rough_facts(entry)
    if facts is None:
        return None, None
    here = outlook(rooms.here, facts, slots=DEFAULT_SLOTS).fits
    if rooms.mesh is None or here:
        return here, here if rooms.runs else None
    return here, outlook(rooms.mesh, facts, slots=DEFAULT_SLOTS).fits


async def free_memory(home: Home) -> FreeMemory:
    """This machine with what is known of its speed, and the mesh of the node that runs here."""
    me, nodes = await members(home)
    own = next((node for node in nodes if node.id == me and node.facts.memory_bytes), None)
    own = own or Candidate(id=_THIS_MACHINE, facts=await _this_machine(home))
    mesh = supposed(nodes, NO_FINGERPRINT)
    return FreeMemory(
        here=supposed([own], NO_FINGERPRINT), mesh=mesh if len(mesh.nodes) > 1 else None, runs=bool(nodes)
    )


async def _this_machine(home: Home) -> NodeFacts:
    try:
        known = (await hardware.at_hand(NodeConfig(home=home.path))).facts()
    except MeshError:
        # The engine does not run here; its memory is known all the same.
        free = machine.available_memory()
        known = {"engine": ENGINE_VERSION, "memory_bytes": free, "machine_memory_bytes": free}
    return NodeFacts(name="this machine", role=Role.NODE, version=__version__, **known)


async def show_fitting(catalog: Catalog, home: Home, *, as_json: bool) -> None:
    rooms = await free_memory(home)
    rows = fitting(catalog, rooms)
    if as_json:
        print_json({"models": [row.document() for row in rows]})
        return
    print_table([row.cells() for row in rows], headers=_HEADERS)
    for note in _notes(rows, rooms):
        click.echo(note, err=True)


def _notes(rows: Sequence[Fitting], rooms: FreeMemory) -> Iterable[str]:
    if not any(row.predicted is not None for row in rows):
        yield "A speed is predicted once every node has measured its own, at its first start"
    if rooms.mesh is None and not rooms.runs:
        yield "For this machine alone: no node runs on this home"
    if rooms.runs:
        yield "This takes the mesh for empty; mesh-llm plan counts the models that it serves"
    yield "mesh-llm plan --model NAME shows the whole calculation, mesh-llm download NAME gets a model"
