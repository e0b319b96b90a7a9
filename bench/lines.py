"""Lines of the lab: what they carry where nothing is to be slow, and how near they come to a delay."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench.lines_programs import Address, datagram_rate, datagram_socket, round_trips, stream_rate
from bench.plan import Plan
from bench.report import Row, Side, plain_row, ratio_row
from bench.servers import fresh_home
from bench.stats import at_least, at_most
from mesh_llm.bench import servers
from mesh_llm.bench.company import Bystanders, quiet
from mesh_llm.bench.rounds import turns
from mesh_llm.engine.process import spawn
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.delay import DelayDoor, delay_lines
from mesh_llm.results.samples import Sample

TITLE = "Lines of the lab: what they carry, and how near they come to a delay"

PLAIN, LINE, FAR = "without a line", "line", "line of 10 ms"
_STREAM_BYTES = 512 << 20
_DATAGRAMS_S = 1.0
_DELAY_S = 0.010
_PINGS, _PING_BYTES = 60, 2500

Measured = tuple[tuple[Row, ...], tuple[str, ...]]
Values = dict[str, list[float]]


async def measure(plan: Plan) -> Measured:
    bystanders = Bystanders()
    rates: dict[str, Values] = {kind: defaultdict(list) for kind in ("tcp", "unix", "udp")}
    off_ms: Values = defaultdict(list)
    late_ms: Values = defaultdict(list)
    rounds = plan.rounds(full=20, quick=5, full_s=240.0, quick_s=60.0)
    with fresh_home() as folder:
        async with _far(folder) as plain, _doors(folder, plain) as (lines, far):
            for number in rounds:
                for name, addresses in turns([(PLAIN, plain), (LINE, lines)], number):
                    for kind, values in rates.items():
                        await quiet()
                        values[name].append(await asyncio.to_thread(_rate, kind, addresses[kind]))
                for kind in ("tcp", "unix"):
                    await quiet()
                    off, late = await asyncio.to_thread(_off_ms, plain[kind], far[kind])
                    off_ms[kind].append(off)
                    late_ms[kind].append(late)
    rows = (
        *(
            plain_row(
                f"{kind}: throughput, no delay",
                _side(rates[kind], LINE, "MB/s", 0),
                at_least(500),
                theirs=_side(rates[kind], PLAIN, "MB/s", 0),
            )
            for kind in ("tcp", "unix")
        ),
        ratio_row(
            "udp: datagrams a second, no delay, of those without a line",
            (_side(rates["udp"], LINE, "thousand/s", 1), _side(rates["udp"], PLAIN, "thousand/s", 1)),
            at_least(0.8),
        ),
        *(
            plain_row(f"{kind}: off a delay of 10 ms, median", _side(off_ms, kind, "ms", 3), at_most(0.5))
            for kind in ("tcp", "unix")
        ),
        *(
            plain_row(f"{kind}: off a delay of 10 ms, 19 of 20 within", _side(late_ms, kind, "ms", 3), None)
            for kind in ("tcp", "unix")
        ),
    )
    notes = (
        rounds.note(),
        f"others used {bystanders.cores():.1f} cores meanwhile",
        f"throughput: {_STREAM_BYTES / 1e6:.0f} MB one way, until a byte has come back",
        "udp: 1200 bytes each, at most 256 on their way, for a second; ends in Python, a call for each",
        "off a delay: half of what a round trip takes longer than without a line, less the delay",
    )
    return rows, notes


def _rate(kind: str, address: Address) -> float:
    if kind == "udp":
        return datagram_rate(address, _DATAGRAMS_S) / 1e3
    return stream_rate(address, _STREAM_BYTES) / 1e6


def _off_ms(plain: Address, far: Address) -> tuple[float, float]:
    """How far one way is from its delay: in the median, and what one in twenty exceeds."""
    near_s = statistics.median(round_trips(plain, _PINGS, _PING_BYTES))
    off_s = sorted(
        abs((seconds - near_s) / 2 - _DELAY_S) for seconds in round_trips(far, _PINGS, _PING_BYTES)
    )
    return 1000 * statistics.median(off_s), 1000 * off_s[len(off_s) * 19 // 20]


def _side(values: Values, name: str, unit: str, digits: int) -> Side:
    return Side(name=name, sample=Sample.of(values[name]), unit=unit, digits=digits)


@asynccontextmanager
async def _far(folder: Path) -> AsyncIterator[dict[str, Address]]:
    """The far ends' process; where it listens."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    argv = servers.following([sys.executable, "-P", "-m", "bench.lines_programs", str(folder / "far.sock")])
    root = str(Path(__file__).parents[1])
    async with spawn(
        argv,
        on_stdout=told.set_result,
        on_stderr=lambda _: None,
        env={**servers.ENVIRONMENT, "PYTHONPATH": root},
    ):
        async with asyncio.timeout(servers.READY_S):
            told_addresses = json.loads(await told)
        yield {kind: at if isinstance(at, str) else tuple(at) for kind, at in told_addresses.items()}


@asynccontextmanager
async def _doors(
    folder: Path, targets: dict[str, Address]
) -> AsyncIterator[tuple[dict[str, Address], dict[str, Address]]]:
    """Doors to each target: without conditions, and with a delay."""
    listen: dict[str, Callable[[str], socket.socket]] = {
        "tcp": lambda _: socket.create_server(("127.0.0.1", 0)),
        "unix": lambda name: _listening(folder / name),
        "udp": lambda _: _bound(),
    }
    doors = {
        (name, kind): DelayDoor(
            listener=listen[kind](f"{name}.sock"), target=target, there=conditions, back=conditions
        )
        for name, conditions in (("open", Conditions()), ("slow", Conditions(delay_s=_DELAY_S)))
        for kind, target in targets.items()
    }
    addresses = {key: door.listener.getsockname() for key, door in doors.items()}
    async with delay_lines((), list(doors.values())):
        yield tuple({kind: addresses[name, kind] for kind in targets} for name in ("open", "slow"))  # type: ignore[misc]


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _bound() -> socket.socket:
    end = datagram_socket()
    end.bind(("127.0.0.1", 0))
    return end
