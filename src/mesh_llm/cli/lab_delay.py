"""`mesh-llm lab delay`: a slow link between two addresses."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import click

from mesh_llm.cli import signals
from mesh_llm.cli.options import json_option
from mesh_llm.cli.output import is_terminal, print_error, print_table
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.lab.addresses import LineAddress, bound, listening
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.delay import DelayDoor, Lines, delay_lines
from mesh_llm.lab.rpc_proxy import COMMANDS, COMPUTING, RpcSessionReport

_FIELDS = {
    "delay": ("delay_s", 1e-3),
    "jitter": ("jitter_s", 1e-3),
    "bandwidth": ("bytes_s", 1e6),
    "loss": ("loss", 1e-2),
}
"""What people change: the field, and its unit here."""
_HELP = "type `delay 20`, `delay 20,5 jitter 2`, `bandwidth 10`, `loss 1` or `show`; Ctrl-C ends the line"


@frozen
class BothWays:
    there: Conditions
    back: Conditions

    def changed(self, words: list[str]) -> BothWays:
        """`delay 20,5 loss 1`: one value for both ways, or one each."""
        if not words or len(words) % 2:
            raise UsageError(f"{' '.join(words)!r} is not a change", hint=_HELP)
        there: dict[str, Any] = {}
        back: dict[str, Any] = {}
        for name, text in zip(words[::2], words[1::2], strict=True):
            if name not in _FIELDS:
                raise UsageError(f"a line has no {name!r}", hint=_HELP)
            field, unit = _FIELDS[name]
            for fields, value in zip((there, back), _two(name, text), strict=True):
                fields[field] = None if field == "bytes_s" and not value else value * unit
        return BothWays(there=replace(self.there, **there), back=replace(self.back, **back))

    def document(self) -> dict[str, Any]:
        return {"there": asdict(self.there), "back": asdict(self.back)}

    def text(self) -> str:
        if self.there == self.back:
            return f"both ways {self.there.text()}"
        return f"there {self.there.text()}; back {self.back.text()}"


def _two(name: str, text: str) -> tuple[float, float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 2):
        raise UsageError(
            f"{name} {text}: give one number for both ways, or two",
            hint=f"for example {name} 5 or {name} 5,1",
        )
    return values[0], values[-1]


@click.command(short_help="a slow, narrow or lossy link between two addresses")
@click.argument("listen")
@click.argument("target")
@click.option("--delay", default="0", metavar="MS[,MS]", help="one-way delay; two values: there, and back")
@click.option("--jitter", default="0", metavar="MS[,MS]", help="how much the delay varies, up and down")
@click.option("--bandwidth", default="0", metavar="MB/S[,MB/S]", help="most bytes in a second; 0: no limit")
@click.option("--loss", default="0", metavar="PERCENT[,PERCENT]", help="packets that are lost")
@click.option("--seed", type=int, default=0, show_default=True, help="for jitter and loss")
@click.option("--rpc", is_flag=True, help="stock ggml-rpc: slow down only commands that compute, count all")
@json_option
def delay(listen: str, target: str, seed: int, rpc: bool, as_json: bool, **given: str) -> None:
    """Pass everything from LISTEN on to TARGET and back, as a slow, narrow or lossy link would.

    Addresses are HOST:PORT or tcp:HOST:PORT, udp:HOST:PORT and unix:PATH. Port 0 takes a free
    one and prints it. Lines on stdin change the link while it runs: `delay 20`, `loss 1,0`,
    `show`. At the end, it prints what went through.

    Datagrams that are lost are gone. Streams lose no bytes: a lost packet costs the time that TCP
    takes to send it again.
    """
    ways = BothWays(there=Conditions(), back=Conditions()).changed(
        [word for name in _FIELDS for word in (name, given[name])]
    )
    addresses = LineAddress.parse(listen), LineAddress.parse(target)
    if rpc and addresses[0].kind == "udp":
        raise UsageError("--rpc needs a stream, and udp is none")
    if (addresses[0].kind == "udp") != (addresses[1].kind == "udp"):
        raise UsageError("datagrams and streams cannot be joined: udp at one end needs udp at the other")
    asyncio.run(_run(*addresses, ways, seed=seed, rpc=rpc, as_json=as_json))


async def _run(
    listen: LineAddress, target: LineAddress, ways: BothWays, *, seed: int, rpc: bool, as_json: bool
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in signals.ending():
        loop.add_signal_handler(number, stopped.set)
    listener = listening(listen)
    here = bound(listener, listen.kind)
    door = DelayDoor(listener=listener, target=target.at, there=ways.there, back=ways.back, rpc=rpc)
    try:
        async with delay_lines((), [door], seed=seed) as lines:
            await lines.read()
            _say(
                {"listening": here.text(), "target": target.text(), **ways.document()}
                if as_json
                else f"{here.text()} leads to {target.text()}, {ways.text()}"
            )
            if is_terminal(sys.stdin):
                click.echo(_HELP, err=True)
            talking = asyncio.create_task(_obey(lines, ways, as_json=as_json), name="commands")
            stopping = asyncio.create_task(stopped.wait(), name="signal")
            ending = asyncio.create_task(lines.ended(), name="line")
            tasks = talking, stopping, ending
            await asyncio.wait((stopping, ending), return_when=asyncio.FIRST_COMPLETED)
            ended = ending.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if ended:
                raise MeshError("the process of the line has ended by itself")
    finally:
        if isinstance(here.at, str):
            Path(here.at).unlink(missing_ok=True)
    _show(lines, as_json=as_json)


async def _obey(lines: Lines, ways: BothWays, *, as_json: bool) -> None:
    """Commands, until there are none; the line stays."""
    if not _can_speak(sys.stdin):
        return
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    except (ValueError, OSError):
        # A file: nobody will type.
        return
    while line := await reader.readline():
        words = line.decode(errors="replace").split()
        if not words:
            continue
        if words == ["show"]:
            await lines.read()
            _show(lines, as_json=as_json)
            continue
        try:
            ways = ways.changed(words)
        except MeshError as error:
            print_error(error)
            continue
        await lines.set(0, there=ways.there, back=ways.back)
        _say(ways.document() if as_json else ways.text())


def _can_speak(stdin: TextIO | None) -> bool:
    """asyncio waits for any device; `/dev/null`, of a job in the background, is none to wait for."""
    try:
        return stdin is not None and (stdin.isatty() or not stat.S_ISCHR(os.fstat(stdin.fileno()).st_mode))
    except (ValueError, OSError):
        return False


def _say(document: dict[str, Any] | str) -> None:
    print(document if isinstance(document, str) else json.dumps(document), flush=True)


def _show(lines: Lines, *, as_json: bool) -> None:
    """What went through, and for stock RPC what its sessions did."""
    sessions = lines.rpc[0] if lines.rpc else ()
    if as_json:
        ways = dict(zip(("there", "back"), map(asdict, lines.passages), strict=True))
        _say({"passed": ways, "rpc": [asdict(session) for session in sessions]})
        return
    rows = [
        (
            name,
            f"{passage.size_bytes / 1e6:.3f} MB",
            str(passage.chunks),
            f"{passage.median_ms:.2f} ms",
            f"{passage.worst_ms:.2f} ms",
            str(passage.lost),
        )
        for name, passage in zip(("there", "back"), lines.passages, strict=True)
    ]
    print_table(rows, headers=("WAY", "SENT", "CHUNKS", "DELAY", "WORST", "LOST"))
    for number, session in enumerate(sessions, start=1):
        _show_session(number, session)


def _show_session(number: int, session: RpcSessionReport) -> None:
    total, computed = session.total(), session.total(COMPUTING)
    click.echo(
        f"\nSession {number}: {session.seconds:.1f} s, {total.commands} commands, "
        f"{computed.commands} of them computed; {total.sent_bytes / 1e6:.1f} MB to the server, "
        f"{total.received_bytes / 1e6:.1f} MB back"
    )
    if session.refused:
        click.echo(f"Refused: {session.refused}")
    rows = [
        (
            name,
            str(count.commands),
            f"{count.sent_bytes / 1e3:.1f} kB",
            f"{count.received_bytes / 1e3:.1f} kB",
        )
        for name in COMMANDS
        if (count := session.counts.get(name)) is not None
    ]
    print_table(rows, headers=("COMMAND", "COUNT", "SENT", "RECEIVED"))
