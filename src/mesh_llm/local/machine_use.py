"""Whether somebody uses this machine: input, power, heat, and programs on its GPU.

What a system does not tell is None, or nothing: a server has no keyboard, and a desktop no battery.
On Linux it is read from files below `root`, and from what `loginctl`, `nvidia-smi` and `gamemoded` say.
On macOS `ioreg` and `pmset` are asked; that has never run on one.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mesh_llm.engine.process import run
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.sanitise import clean

TOOL_S = 5.0
"""For a program that tells one fact."""
HOT_C = 95.0
"""Where a machine does not say at which temperature it slows down."""
BELOW_CRITICAL_C = 10.0
"""So far below the temperature at which it switches itself off."""
GPU_BUSY_PERCENT = 20
"""Of a GPU, by one program: a desktop draws with less, a game does not."""
_PLAUSIBLE_MILLIDEGREES = range(40_000, 130_001)
_FILE_BYTES = 4096
_DIGITS = 10
"""Of temperatures, shares and process numbers."""
_PROGRAM_CHARS = 40
_GRAPHICAL = ("x11", "wayland", "mir")

Ask = Callable[[Sequence[str]], Awaitable[str]]
"""A program's output; empty where it is missing, fails or takes too long."""


@frozen
class MachineUse:
    idle_s: float | None = None
    """Since somebody used it; None: that cannot be told here."""
    on_battery: bool = False
    heat: str = ""
    """What is too hot; empty: nothing."""
    gpu_user: str = ""
    """A game, or another program that keeps the GPU busy; empty: none."""


async def ask(command: Sequence[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        finished = await run([program, *command[1:]], timeout_s=TOOL_S)
    except MeshError:
        return ""
    return "\n".join(finished.output) if finished.status == 0 else ""


async def look(root: Path = Path("/"), ask: Ask = ask, *, now: float | None = None) -> MachineUse:
    """What this machine tells at this moment."""
    if sys.platform == "darwin":
        return of_macos(
            await ask(["ioreg", "-c", "IOHIDSystem", "-d", "4"]),
            await ask(_PMSET_POWER),
            await ask(_PMSET_HEAT),
        )
    typed_s = await asyncio.to_thread(typed_ago_s, root, time.time() if now is None else now)
    desktop = desktop_in_use(await ask(_sessions(root))) if _session_ids(root) else False
    return MachineUse(
        idle_s=0.0 if desktop else typed_s,
        on_battery=await asyncio.to_thread(is_on_battery, root),
        heat=await asyncio.to_thread(heat, root),
        gpu_user=game(await ask(["gamemoded", "-s"]))
        or gpu_user(await ask(_GPU_PROCESSES), _own_processes()),
    )


# -- Linux: input ----------------------------------------------------------------------------------


def typed_ago_s(root: Path, now: float) -> float | None:
    """Since a key reached any terminal: the kernel notes it as the time of access, to eight seconds."""
    terminals = [*_found(root / "dev/pts", "[0-9]*"), *_found(root / "dev", "tty[0-9]*")]
    times = []
    for terminal in terminals:
        with suppress(OSError):
            times.append(terminal.stat().st_atime)
    return max(0.0, now - max(times)) if times else None


def _session_ids(root: Path) -> list[str]:
    """Of those who are logged in; other files beside them have dots in their names."""
    try:
        names = [path.name for path in (root / "run/systemd/sessions").iterdir()]
    except OSError:
        return []
    return sorted(name for name in names if name.isalnum())


def _sessions(root: Path) -> list[str]:
    fields = ("Type", "Class", "State", "IdleHint", "LockedHint")
    return ["loginctl", "show-session", *_session_ids(root), *(f"--property={field}" for field in fields)]


def desktop_in_use(told: str) -> bool:
    """Whether logind knows a desktop that is neither idle nor locked: one block of lines for each session."""
    for block in told.split("\n\n"):
        session = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if (
            session.get("Type") in _GRAPHICAL
            and session.get("Class") == "user"
            and session.get("State") == "active"
            and session.get("LockedHint") != "yes"
            and session.get("IdleHint") == "no"
        ):
            return True
    return False


# -- Linux: power and heat -------------------------------------------------------------------------


def is_on_battery(root: Path) -> bool:
    """Whether a battery of the machine itself is being emptied, and no supply is plugged in."""
    supplies = list(_found(root / "sys/class/power_supply"))
    if any(_word(each / "type") != "Battery" and _word(each / "online") == "1" for each in supplies):
        return False
    # A mouse has a battery, too.
    own = (each for each in supplies if _word(each / "scope") != "Device")
    return any(_word(each / "type") == "Battery" and _word(each / "status") == "Discharging" for each in own)


def heat(root: Path) -> str:
    """The first part of the machine that is as hot as where it slows itself down."""
    for zone in _found(root / "sys/class/thermal", "thermal_zone*"):
        now = _celsius(zone / "temp")
        if now is not None and now >= _limit(zone):
            name = clean(_word(zone / "type"), _PROGRAM_CHARS) or zone.name
            return f"{name} has {now:.0f} °C"
    return ""


def _limit(zone: Path) -> float:
    found = []
    for file in _found(zone, "trip_point_*_type"):
        kind, at = _word(file), _celsius(file.with_name(file.name.replace("_type", "_temp")))
        if at is not None and kind in ("passive", "hot"):
            found.append(at)
        elif at is not None and kind == "critical":
            found.append(at - BELOW_CRITICAL_C)
    return min(found, default=HOT_C)


def _celsius(file: Path) -> float | None:
    millidegrees = _number(_word(file))
    return millidegrees / 1000 if millidegrees in _PLAUSIBLE_MILLIDEGREES else None


def _number(text: str) -> int:
    """-1 where it is none."""
    return int(text) if len(text) <= _DIGITS and text.isdecimal() else -1


def _found(path: Path, pattern: str = "*") -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path.glob(pattern))


def _word(file: Path) -> str:
    """The content of one of the kernel's small files; empty where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(_FILE_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


# -- GPUs ------------------------------------------------------------------------------------------

_GPU_PROCESSES = ("nvidia-smi", "pmon", "--count", "1", "--select", "u")


def game(told: str) -> str:
    """By the word of Feral's GameMode, which games start themselves."""
    return "a game" if "gamemode is active" in told else ""


def gpu_user(told: str, ours: frozenset[int]) -> str:
    """Another program that keeps an NVIDIA GPU busy: a table whose first line names its columns."""
    columns: list[str] = []
    for line in told.splitlines():
        if line.startswith("#"):
            columns = columns or line.lstrip("# ").split()
            continue
        row = dict(zip(columns, line.split(), strict=False))
        pid, busy = _number(row.get("pid", "")), _number(row.get("sm", ""))
        if pid >= 0 and pid not in ours and busy >= GPU_BUSY_PERCENT:
            return clean(row.get("command") or f"process {pid}", _PROGRAM_CHARS)
    return ""


def _own_processes() -> frozenset[int]:
    """This node, its engine and its workers."""
    me = psutil.Process()
    try:
        return frozenset({me.pid, *(child.pid for child in me.children(recursive=True))})
    except psutil.Error:
        return frozenset({me.pid})


# -- macOS -----------------------------------------------------------------------------------------

_PMSET_POWER = ("pmset", "-g", "batt")
_PMSET_HEAT = ("pmset", "-g", "therm")


def of_macos(input_told: str, power_told: str, heat_told: str) -> MachineUse:
    idle = re.search(r'"HIDIdleTime" = ([0-9]{1,20})\b', input_told)
    speed = re.search(r"CPU_Speed_Limit\s*=\s*([0-9]{1,3})\b", heat_told)
    slowed = speed is not None and int(speed[1]) < 100
    return MachineUse(
        idle_s=int(idle[1]) / 1e9 if idle else None,
        on_battery="drawing from 'Battery Power'" in power_told,
        heat=f"the processor is slowed down to {int(speed[1])} %" if speed is not None and slowed else "",
    )
