"""Links between two nodes, or on this machine: round trip and throughput by kind and by size of message."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from mesh_llm.engine import build
from mesh_llm.engine.process import module, spawn
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.lab.quic import QuicLine, Splicing, quic_lines
from mesh_llm.peers.link_measuring import figures, in_thread
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series
from mesh_llm.results.samples import Sample
from mesh_llm.transport.direct_links import knock_local, knock_tcp, new_ticket, open_door
from mesh_llm.transport.link_meter import LinkMeter

SIZES = (64, 1 << 10, 16 << 10, 256 << 10, 4 << 20, 16 << 20)
UNIX, KERNEL = "unix socket", "tcp socket"
"""Of the kernel, with nothing of ours in between."""
_LONGEST_S = 0.7
"""A round trip that would take longer is left out, and so are larger messages."""
_WITHIN_S = 600.0
_RELAY_S = 20.0
_NODES = (2, 3, 5)
_F32_BYTES = 4
_PROMPT = 512
_RELAY_LINE = re.compile(r"Relay: (\S+)")

Ask = Callable[[int], Awaitable[dict[str, Any]]]
"""The figures of messages of one size."""
Ends = tuple[socket.socket, socket.socket]
Tell = Callable[[str], None]


@frozen
class SizeFigures:
    size: int
    idle_s: tuple[float, ...]
    """Of each round trip."""
    busy_s: tuple[float, ...]
    """The same while another link of this kind sends all it can; none for what takes long already."""
    bytes_s: tuple[float, ...]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SizeFigures:
        return cls(
            size=int(fields["size"]),
            **{name: tuple(map(float, fields[name])) for name in ("idle_s", "busy_s", "bytes_s")},
        )


@frozen
class KindFigures:
    """One kind of link. `missing` says why there is none, or why larger messages were left out."""

    kind: str
    sizes: tuple[SizeFigures, ...] = ()
    missing: str | None = None

    def of(self, size: int) -> SizeFigures | None:
        return next((each for each in self.sizes if each.size == size), None)


@frozen
class Carried:
    """What a model sends from node to node."""

    name: str
    hidden: int

    @property
    def token_bytes(self) -> int:
        return _F32_BYTES * self.hidden


async def measured(kind: str, ask: Ask, sizes: Sequence[int], tell: Tell) -> KindFigures:
    """Size by size, smallest first, as long as one takes no longer than it may."""
    found: list[SizeFigures] = []
    for size in sizes:
        if found and statistics.median(found[-1].idle_s) * size / found[-1].size > _LONGEST_S:
            slow = f"messages of {size_text(size)} and more would take longer than {_LONGEST_S} s"
            return KindFigures(kind=kind, sizes=tuple(found), missing=slow)
        tell(f"{kind}, {size_text(size)}")
        try:
            found.append(SizeFigures.from_fields(await ask(size)))
        except MeshError as error:
            return KindFigures(kind=kind, sizes=tuple(found), missing=f"{size_text(size)}: {error.message}")
    return KindFigures(kind=kind, sizes=tuple(found))


# -- on this machine ---------------------------------------------------------------------------------


async def on_loopback(sizes: Sequence[int], tell: Tell) -> list[KindFigures]:
    """Every kind, between two processes of this machine; nothing leaves it."""
    built = await build.ensure((build.SPLICE,), lambda _: None)
    splicing = Splicing(library=built.libraries.get(build.SPLICE))
    kinds: dict[str, Callable[[], contextlib.AbstractAsyncContextManager[list[Ends]]]] = {
        UNIX: lambda: _sockets(socket.socketpair),
        KERNEL: lambda: _sockets(_tcp_pair),
        "local": lambda: _by_ticket(tcp=False),
        "tcp": lambda: _by_ticket(tcp=True),
        "quic": lambda: _by_quic(splicing),
        "relay": lambda: _by_relay(splicing),
    }
    found = []
    for kind, pairs in kinds.items():
        try:
            async with pairs() as ends, _asking(ends) as ask:
                found.append(await measured(kind, ask, sizes, tell))
        except MeshError as error:
            found.append(KindFigures(kind=kind, missing=error.message))
    return found


@contextlib.asynccontextmanager
async def _asking(pairs: Sequence[Ends]) -> AsyncIterator[Ask]:
    """A link that is measured, and one that keeps it busy; the far ends are another process's."""
    near, far = zip(*pairs, strict=True)
    numbers = [end.fileno() for end in far]
    with contextlib.ExitStack() as stack:
        meters = [stack.enter_context(LinkMeter(end, within_s=_WITHIN_S)) for end in near]
        async with spawn(
            module("mesh_llm.bench.transport_far"),
            on_stdout=lambda _: None,
            on_stderr=lambda _: None,
            pass_fds=numbers,
        ) as child:
            await child.send(json.dumps(numbers).encode() + b"\n", close=False)
            for end in far:
                end.close()

            async def ask(size: int) -> dict[str, Any]:
                return await in_thread(lambda: figures(meters[0], meters[1], size))

            yield ask


@contextlib.asynccontextmanager
async def _sockets(make: Callable[[], Ends]) -> AsyncIterator[list[Ends]]:
    with contextlib.ExitStack() as stack:
        pairs = [make() for _ in range(2)]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
        yield pairs


def _tcp_pair() -> Ends:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


@contextlib.asynccontextmanager
async def _by_ticket(*, tcp: bool) -> AsyncIterator[list[Ends]]:
    """Links as nodes open them: at a door, with a ticket."""
    with tempfile.TemporaryDirectory(prefix="mesh-link-") as folder:
        path = Path(folder) / "door"
        async with open_door(path) as door:
            pairs = []
            for _ in range(2):
                ticket = new_ticket()
                arriving = door.expect(ticket)
                near = await (
                    knock_tcp("127.0.0.1", door.listen("127.0.0.1"), ticket)
                    if tcp
                    else knock_local(path, ticket)
                )
                pairs.append((near, await arriving))
            yield pairs


@contextlib.asynccontextmanager
async def _by_quic(splicing: Splicing) -> AsyncIterator[list[Ends]]:
    async with _sockets(socket.socketpair) as near, _sockets(socket.socketpair) as far:
        lines = [QuicLine(one=one[1], other=other[1]) for one, other in zip(near, far, strict=True)]
        async with quic_lines(lines, splicing):
            yield [(one[0], other[0]) for one, other in zip(near, far, strict=True)]


@contextlib.asynccontextmanager
async def _by_relay(splicing: Splicing) -> AsyncIterator[list[Ends]]:
    if sys.platform != "linux":
        raise MeshError("two nodes of one machine have a direct path, which only Linux can cut off")
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if (found := _RELAY_LINE.match(line)) is not None and not said.done():
            said.set_result(found[1])

    argv = [*module("mesh_llm"), "relay", "--listen", "127.0.0.1:0"]
    async with spawn(argv, on_stdout=on_line, on_stderr=lambda _: None):
        try:
            url = await asyncio.wait_for(said, _RELAY_S)
        except TimeoutError:
            raise MeshError(f"the relay did not start within {_RELAY_S:.0f} s") from None
        async with _by_quic(replace(splicing, relay=url)) as pairs:
            yield pairs


# -- what was found ----------------------------------------------------------------------------------


def document(
    kinds: Sequence[KindFigures], *, where: str, carried: Carried, command: str, facts: dict[str, str]
) -> Document:
    sizes = sorted({each.size for kind in kinds for each in kind.sizes})
    there = [kind for kind in kinds if kind.sizes]
    return Document(
        name="transport",
        title=f"Links {where}",
        command=command,
        facts=facts,
        tables=(
            _table("Round trip, ms", there, sizes, lambda each: _ms(each.idle_s)),
            _table("Round trip, ms, with a busy link beside it", there, sizes, lambda each: _ms(each.busy_s)),
            _table("Throughput, MB/s", there, sizes, lambda each: f"{_rate(each) / 1e6:.1f}"),
            _table("Spread: the middle half of round trips, ms", there, sizes, _spread),
            _meaning(there, carried),
        ),
        plots=(
            _plot("Round trip", "ms", there, lambda each: [1000 * seconds for seconds in each.idle_s]),
            _plot("Throughput", "MB/s", there, lambda each: [rate / 1e6 for rate in each.bytes_s]),
        ),
        figures=tuple(
            chain.from_iterable(_figures(kind.kind, each) for kind in there for each in kind.sizes)
        ),
        notes=tuple(f"{kind.kind}: {kind.missing}" for kind in kinds if kind.missing),
    )


def _table(
    title: str, kinds: Sequence[KindFigures], sizes: Sequence[int], cell: Callable[[SizeFigures], str]
) -> ResultTable:
    """Medians, by kind and size."""
    rows = []
    for kind in kinds:
        found = [kind.of(size) for size in sizes]
        rows.append((kind.kind, *("–" if each is None else cell(each) for each in found)))
    return ResultTable(title=title, columns=("link", *map(size_text, sizes)), rows=tuple(rows))


def _meaning(kinds: Sequence[KindFigures], carried: Carried) -> ResultTable:
    """For so many nodes: a token passes each once and comes back to the host."""
    sizes = sorted({each.size for kind in kinds for each in kind.sizes})
    size = next((size for size in sizes if size >= carried.token_bytes), sizes[-1] if sizes else 0)
    rows = []
    for kind in kinds:
        if (each := kind.of(size)) is None:
            continue
        hop_s = statistics.median(each.idle_s) / 2
        prompt_s = _PROMPT * carried.token_bytes / max(map(_rate, kind.sizes))
        tokens = (f"{1000 * nodes * hop_s:.2f} ms" for nodes in _NODES)
        rows.append((kind.kind, f"{1000 * hop_s:.3f} ms", *tokens, f"{1000 * prompt_s:.1f} ms"))
    return ResultTable(
        title=f"What that means for {carried.name}: {carried.token_bytes:,} bytes a token and hop",
        columns=(
            "link",
            "one hop",
            *(f"{nodes} nodes" for nodes in _NODES),
            f"{_PROMPT} tokens, a hop",
        ),
        rows=tuple(rows),
        note=f"links alone, without computing: a hop is half a round trip of {size_text(size)}, "
        "and a token takes as many hops as there are nodes",
    )


def _plot(
    title: str, unit: str, kinds: Sequence[KindFigures], values: Callable[[SizeFigures], Sequence[float]]
) -> Plot:
    def series(kind: KindFigures) -> Series:
        samples = [Sample.of(values(each)) for each in kind.sizes]
        return Series(
            label=kind.kind,
            x=tuple(float(each.size) for each in kind.sizes),
            y=tuple(sample.median for sample in samples),
            low=tuple(sample.quartiles[0] for sample in samples),
            high=tuple(sample.quartiles[1] for sample in samples),
        )

    return Plot(
        title=title,
        x_label="bytes of a message",
        y_label=unit,
        series=tuple(map(series, kinds)),
        x_log=True,
        y_log=True,
    )


def _figures(kind: str, each: SizeFigures) -> Iterator[Figure]:
    of = f"{kind}, {size_text(each.size)}"
    for name, seconds in (("round trip", each.idle_s), ("round trip, busy", each.busy_s)):
        values = tuple(1000 * value for value in seconds)
        if not values:
            continue
        yield Figure(name=f"{of}: {name}", unit="ms", values=values, higher_is_better=False)
    rates = tuple(rate / 1e6 for rate in each.bytes_s)
    yield Figure(name=f"{of}: throughput", unit="MB/s", values=rates, higher_is_better=True)


def _rate(each: SizeFigures) -> float:
    return statistics.median(each.bytes_s)


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3f}" if seconds else "–"


def _spread(each: SizeFigures) -> str:
    first, third = Sample.of(each.idle_s).quartiles
    return f"{1000 * first:.3f}–{1000 * third:.3f}"


def size_text(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
