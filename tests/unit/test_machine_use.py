"""What a machine tells of its use, from files that stand for those of the kernel."""

from __future__ import annotations

import os
import pty
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh_llm.local import machine_use
from mesh_llm.local.machine_use import (
    MachineUse,
    desktop_in_use,
    game,
    gpu_user,
    heat,
    is_on_battery,
    look,
    of_macos,
    typed_ago_s,
)

NOW = 1_800_000_000.0


def put(root: Path, **files: str | bytes) -> Path:
    """Files by their paths, with `__` for a slash."""
    for name, content in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


# -- input -----------------------------------------------------------------------------------------


def test_the_last_key_on_any_terminal_counts(tmp_path: Path) -> None:
    assert typed_ago_s(tmp_path, NOW) is None
    put(tmp_path, dev__pts__0="", dev__pts__ptmx="", dev__tty1="", dev__ttyS="", dev__null="")
    for name, ago_s in (("pts/0", 900), ("tty1", 40), ("pts/ptmx", 1), ("ttyS", 1), ("null", 1)):
        os.utime(tmp_path / "dev" / name, (NOW - ago_s, NOW))
    assert typed_ago_s(tmp_path, NOW) == 40
    os.utime(tmp_path / "dev/tty1", (NOW + 500, NOW))
    assert typed_ago_s(tmp_path, NOW) == 0.0


@pytest.mark.skipif(not Path("/dev/pts").is_dir(), reason="/dev/pts is missing")
def test_the_kernel_notes_what_is_typed() -> None:
    ours, theirs = pty.openpty()
    try:
        name = Path(os.ttyname(theirs))
        os.utime(name, (1.0, 1.0))
        os.write(ours, b"x\n")
        assert os.read(theirs, 8) == b"x\n"
        typed = name.stat().st_atime
    finally:
        os.close(ours)
        os.close(theirs)
    assert typed > 1.0


DESKTOP = "Type=wayland\nClass=user\nState=active\nIdleHint=no\nLockedHint=no"


@pytest.mark.parametrize(
    ("told", "used"),
    [
        (DESKTOP, True),
        (f"Type=tty\nClass=user\nState=active\nIdleHint=no\n\n{DESKTOP}", True),
        (DESKTOP.replace("IdleHint=no", "IdleHint=yes"), False),
        (DESKTOP.replace("LockedHint=no", "LockedHint=yes"), False),
        (DESKTOP.replace("State=active", "State=online"), False),
        (DESKTOP.replace("Class=user", "Class=greeter"), False),
        (DESKTOP.replace("Type=wayland", "Type=tty"), False),
        ("", False),
        ("no\x00sense\n==\n\n\n=", False),
    ],
)
def test_a_desktop_is_used_while_it_is_neither_idle_nor_locked(told: str, used: bool) -> None:
    assert desktop_in_use(told) is used


# -- power and heat --------------------------------------------------------------------------------


def supply(root: Path, name: str, **files: str) -> None:
    put(root, **{f"sys__class__power_supply__{name}__{file}": text for file, text in files.items()})


def test_a_laptop_is_on_battery_while_it_empties_its_own(tmp_path: Path) -> None:
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "hidpp", type="Battery\n", status="Discharging\n", scope="Device\n")
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "BAT0", type="Battery\n", status="Discharging\n")
    assert is_on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains\n", online="0\n")
    assert is_on_battery(tmp_path)
    supply(tmp_path, "usb", type="USB\n", online="1\n")
    assert not is_on_battery(tmp_path)
    supply(tmp_path, "usb", online="0\n")
    supply(tmp_path, "BAT0", status="Not charging\n")
    assert not is_on_battery(tmp_path)


def zone(root: Path, **files: str) -> None:
    put(root, **{f"sys__class__thermal__thermal_zone0__{file}": text for file, text in files.items()})


def test_a_machine_is_hot_where_it_would_slow_itself_down(tmp_path: Path) -> None:
    assert heat(tmp_path) == ""
    zone(tmp_path, type="x86_pkg_temp\n", temp="94000\n")
    assert heat(tmp_path) == ""
    zone(tmp_path, temp="95000\n")
    assert heat(tmp_path) == "x86_pkg_temp has 95 °C"
    zone(tmp_path, trip_point_0_type="critical\n", trip_point_0_temp="110000\n")
    assert heat(tmp_path) == ""
    zone(tmp_path, trip_point_1_type="passive\n", trip_point_1_temp="90000\n")
    assert heat(tmp_path) == "x86_pkg_temp has 95 °C"
    zone(tmp_path, trip_point_1_type="active\n")
    assert heat(tmp_path) == ""


HOSTILE = ["", "\n", "x", "-1", "1e9", "9" * 4000, "\x00\xff", "NaN", "0x20", " 7 7 "]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_that_makes_no_sense_does_nothing(tmp_path: Path, value: str) -> None:
    zone(tmp_path, type=value, temp=value, trip_point_0_type="passive", trip_point_0_temp=value)
    supply(tmp_path, "BAT0", type="Battery", status=value, online=value, scope=value)
    (tmp_path / "sys/class/power_supply/loop").symlink_to("loop")
    (tmp_path / "sys/class/power_supply/folder/status").mkdir(parents=True)
    assert heat(tmp_path) == ""
    assert not is_on_battery(tmp_path)


def test_a_name_of_a_part_cannot_move_the_cursor(tmp_path: Path) -> None:
    zone(tmp_path, type="\x1b[2J" + "y" * 500, temp="100000")
    assert heat(tmp_path) == f"?[2J{'y' * 36} has 100 °C"


# -- GPUs ------------------------------------------------------------------------------------------

PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1201     G      3      1      -      -      -      -    Xorg
    0       4711   C+G     87     40      -      -      -      -    witcher3.exe
"""


def test_a_program_that_keeps_the_gpu_busy_is_named_unless_it_is_ours() -> None:
    assert gpu_user(PMON, frozenset()) == "witcher3.exe"
    assert gpu_user(PMON, frozenset({4711})) == ""
    assert gpu_user(PMON.replace(" 87 ", " 19 "), frozenset()) == ""
    # Older drivers have fewer columns.
    assert gpu_user("# gpu pid type sm mem enc dec command\n 0 7 G 50 1 - - game\n", frozenset()) == "game"


@pytest.mark.parametrize(
    "told",
    [
        "",
        "# gpu",
        "0 1 2",
        "# pid sm\n1\n",
        "# pid sm\n²  ³\n",
        "#\n\n# pid\n- -",
        f"# pid sm\n{'9' * 5000} 99",
    ],
)
def test_a_table_that_makes_no_sense_names_nobody(told: str) -> None:
    assert gpu_user(told, frozenset()) == ""


def test_games_say_so_themselves() -> None:
    assert game("gamemode is active\n") == "a game"
    assert game("gamemode is inactive\n") == game("") == ""


# -- all of it -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="this is not Linux")
async def test_one_look(tmp_path: Path) -> None:
    put(tmp_path, dev__pts__0="", run__systemd__sessions__2="", **{"run__systemd__sessions__2.ref": ""})
    os.utime(tmp_path / "dev/pts/0", (NOW - 77, NOW))
    asked: list[Sequence[str]] = []

    async def told(command: Sequence[str]) -> str:
        asked.append(command)
        return {"loginctl": DESKTOP, "nvidia-smi": PMON}.get(command[0], "")

    async def nothing(command: Sequence[str]) -> str:
        return ""

    assert await look(tmp_path, told, now=NOW) == MachineUse(idle_s=0.0, gpu_user="witcher3.exe")
    assert asked[0][:4] == ["loginctl", "show-session", "2", "--property=Type"]
    assert await look(tmp_path, nothing, now=NOW) == MachineUse(idle_s=77.0)
    assert await look(tmp_path / "empty", nothing, now=NOW) == MachineUse()


async def test_a_program_that_is_missing_or_fails_says_nothing() -> None:
    assert await machine_use.ask(["there-is-no-such-program"]) == ""
    assert await machine_use.ask(["false"]) == ""
    assert await machine_use.ask(["echo", "it is so"]) == "it is so"


def test_macos() -> None:
    """By what its manual pages show; it has never run on one."""
    idle = '    | |   "HIDIdleTime" = 4200000000\n'
    battery = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t87%; discharging\n"
    assert of_macos(idle, battery, "CPU_Speed_Limit \t= 70\n") == MachineUse(
        idle_s=4.2, on_battery=True, heat="the processor is slowed down to 70 %"
    )
    assert of_macos("", "Now drawing from 'AC Power'\n", "CPU_Speed_Limit = 100") == MachineUse()
    assert of_macos("\x00", '"HIDIdleTime" = x', "CPU_Speed_Limit = ") == MachineUse()
