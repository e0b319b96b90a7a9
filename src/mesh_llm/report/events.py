"""What has changed in the mesh since it was last looked at, in plain words."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_llm.membership.member import Member, Standing
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import Event, Mode, NodeId, Plan, Role


class News:
    def __init__(self) -> None:
        self._present: dict[NodeId, str] = {}
        """By the names they had: those who are gone may be forgotten by then."""
        self._epoch: int | None = None

    def read(self, mesh: Mesh) -> Iterator[Event]:
        yield from self._members(mesh)
        yield from self._plan(mesh)

    def _members(self, mesh: Mesh) -> Iterator[Event]:
        # One that only the home remembers has no name yet.
        present = {m.id: m for m in mesh.alive() if m.id != mesh.me and m.facts.name}
        for node, member in present.items():
            if node not in self._present:
                yield _arrival(member)
        for node, name in self._present.items():
            if node not in present:
                yield _departure(mesh, node, name)
        self._present = {node: member.facts.name for node, member in present.items()}

    def _plan(self, mesh: Mesh) -> Iterator[Event]:
        published = mesh.serving()
        if published is None:
            if self._epoch is not None:
                yield Event(kind="plan", text="Nothing is serving: the next plan is being made")
            self._epoch = None
            return
        host, serving = published
        if serving.epoch != self._epoch:
            self._epoch = serving.epoch
            yield Event(kind="plan", text=f"Plan {serving.epoch}: {_described(mesh, host, serving.plan)}")


def _arrival(member: Member) -> Event:
    who = f"{member.facts.name}, a lite client," if member.facts.role is Role.CLIENT else member.facts.name
    return Event(kind="arrived", text=f"{who} is in the mesh")


def _departure(mesh: Mesh, node: NodeId, name: str) -> Event:
    if node in mesh.expelled:
        return Event(kind="expelled", text=f"{name} was expelled: its invite was revoked")
    member = mesh.member(node)
    # Of a lite client nothing is remembered but its goodbye.
    if mesh.met.get(node) or (member is not None and member.standing is Standing.LEFT):
        return Event(kind="left", text=f"{name} left the mesh")
    return Event(kind="lost", text=f"{name} was lost: it no longer answers")


def _described(mesh: Mesh, host: NodeId, plan: Plan) -> str:
    reason = f" ({plan.reason})" if plan.reason else ""
    if plan.mode is Mode.SOLO:
        return f"{mesh.name_of(host)} serves alone{reason}"
    names = [mesh.name_of(node) for node in dict.fromkeys(stage.node for stage in plan.workers)]
    return f"{mesh.name_of(host)} hosts, {_listed(names)} compute{_s(names)} with it{reason}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _s(names: list[str]) -> str:
    return "s" if len(names) == 1 else ""
