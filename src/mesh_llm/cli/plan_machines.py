"""`--with` and `--link` of `mesh-llm plan`: machines that are not there, as people write them."""

from __future__ import annotations

import re

from mesh_llm.config import parse_memory, parse_size
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.planning.supposed_machines import KINDS, SupposedMachine

HERE = "here"
"""Among them: this machine, or the mesh of the node that runs on it."""
MACHINES_LIMIT = 64

_MACHINE = re.compile(
    r"(?P<name>[^\s=,]+)=(?P<size>[\w.]+)(?::(?P<kind>\w+)(?:\+(?P<main>[\w.]+))?)?(?:@(?P<speed>[\w.]+)/s)?"
)
_LINK = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_S = 10.0


@frozen
class PlannedMachines:
    machines: tuple[SupposedMachine, ...]
    here: bool
    rtt_s: float


def wanted(machines: str | None, link: str | None) -> PlannedMachines | None:
    """None where the plan is for what is there."""
    if machines is None:
        if link is not None:
            raise UsageError("--link needs --with", hint="--with desk=24GB:cuda,mini=32GB --link 1ms")
        return None
    named = [text.strip() for text in machines.split(",") if text.strip()]
    found = tuple(_machine(text) for text in named if text != HERE)
    names = [machine.name for machine in found]
    if not found or len(found) > MACHINES_LIMIT:
        raise UsageError(
            f"--with takes 1 to {MACHINES_LIMIT} machines", hint="--with desk=24GB:cuda,mini=32GB"
        )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--with names {name} twice")
    return PlannedMachines(machines=found, here=HERE in named, rtt_s=_rtt_s(link or "1ms"))


def _machine(text: str) -> SupposedMachine:
    parts = _MACHINE.fullmatch(text)
    kind = (parts["kind"] or "cpu").lower() if parts is not None else ""
    if parts is None or kind not in KINDS:
        raise UsageError(
            f"--with {text} is not a machine",
            hint=f"write NAME=MEMORY[:KIND], such as desk=24GB:cuda; kinds: {', '.join(KINDS)}",
        )
    return SupposedMachine(
        name=parts["name"],
        bytes=parse_memory(parts["size"], given=f"--with {parts['name']}={parts['size']}"),
        kind=kind,
        main_bytes=parse_memory(parts["main"], given=f"--with {text}: {parts['main']}")
        if parts["main"]
        else 0,
        read_bytes_per_s=max(1e6, parse_size(parts["speed"])) if parts["speed"] else None,
    )


def _rtt_s(text: str) -> float:
    found = _LINK.fullmatch(text.strip())
    if found is None or float(found[1]) * _SECONDS[found[2]] > _LONGEST_S:
        raise UsageError(f"--link {text} is not a round trip", hint="for example 1ms or 0.2ms")
    return float(found[1]) * _SECONDS[found[2]]
