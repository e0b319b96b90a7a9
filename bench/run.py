"""`python -m bench.run`: run the benches, print their tables, keep them in results/."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp

from bench import (
    console,
    download,
    facts,
    fairness,
    gateway,
    gpu,
    idle,
    install,
    lanes,
    lines,
    links,
    members,
    mesh,
    meshrelay,
    overhead,
    prediction,
    recovery,
    relay,
    replicas,
    resume,
    revision,
    solo,
    speculation,
    split,
    startup,
    state,
    switching,
    wheel,
)
from bench.plan import Plan
from bench.report import Result, Row
from bench.revision import Trees
from mesh_llm.bench.facts import Load, load_text
from mesh_llm.errors import MeshError

Measured = tuple[tuple[Row, ...], tuple[str, ...]]
Measure = Callable[[Plan], Awaitable[Measured]]
Compare = Callable[[Plan, Trees], Awaitable[Measured]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    title: str
    measure: Measure
    compare: Compare | None = None
    """Another commit beside this one; None where it has no way to set one up."""


# Quiet ones first: a machine is never quieter than before the work starts.
BENCHES: dict[str, Bench] = {
    "idle": Bench(title=idle.TITLE, measure=idle.measure, compare=idle.compare),
    "startup": Bench(title=startup.TITLE, measure=startup.measure),
    "download": Bench(title=download.TITLE, measure=download.measure),
    "relay": Bench(title=relay.TITLE, measure=relay.measure),
    "meshrelay": Bench(title=meshrelay.TITLE, measure=meshrelay.measure),
    "members": Bench(title=members.TITLE, measure=members.measure, compare=members.compare),
    "overhead": Bench(title=overhead.TITLE, measure=overhead.measure, compare=overhead.compare),
    "gateway": Bench(title=gateway.TITLE, measure=gateway.measure, compare=gateway.compare),
    "solo": Bench(title=solo.TITLE, measure=solo.measure),
    "prediction": Bench(title=prediction.TITLE, measure=prediction.measure),
    "fairness": Bench(title=fairness.TITLE, measure=fairness.measure),
    "lines": Bench(title=lines.TITLE, measure=lines.measure),
    "links": Bench(title=links.TITLE, measure=links.measure),
    "mesh": Bench(title=mesh.TITLE, measure=mesh.measure, compare=mesh.compare),
    "replicas": Bench(title=replicas.TITLE, measure=replicas.measure),
    "switching": Bench(title=switching.TITLE, measure=switching.measure),
    "resume": Bench(title=resume.TITLE, measure=resume.measure),
    "recovery": Bench(title=recovery.TITLE, measure=recovery.measure),
    "split": Bench(title=split.TITLE, measure=split.measure),
    "lanes": Bench(title=lanes.TITLE, measure=lanes.measure),
    "state": Bench(title=state.TITLE, measure=state.measure),
    "speculation": Bench(title=speculation.TITLE, measure=speculation.measure),
    "console": Bench(title=console.TITLE, measure=console.measure),
    "install": Bench(title=install.TITLE, measure=install.measure),
    "wheel": Bench(title=wheel.TITLE, measure=wheel.measure),
    "gpu": Bench(title=gpu.TITLE, measure=gpu.measure),
}
BY_NAME_ONLY = {"gpu", "install", "recovery", "wheel"}
"""Not every machine can run them, they take hours, use an index, or (`wheel`) `make wheel` comes first."""
COMPARABLE = ", ".join(name for name, bench in BENCHES.items() if bench.compare is not None)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: some ten minutes for all")
    parser.add_argument("--against", metavar="REV", help=f"another commit as the other side: {COMPARABLE}")
    parser.add_argument("--count", type=int, metavar="N", help="recovery: kills of each kind (default: 50)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


def chosen(only: Sequence[str] | None, *, against: bool) -> list[str]:
    """The benches to run, in their order."""
    able = {name for name, bench in BENCHES.items() if bench.compare is not None}
    default = able if against else BENCHES.keys() - BY_NAME_ONLY
    names = [name for name in BENCHES if name in (only or default)]
    unable = [name for name in names if name not in able]
    if against and unable:
        raise MeshError(
            f"--against: {', '.join(unable)} cannot set up another commit; {COMPARABLE} can",
            hint=f"--only {' '.join(name for name in BENCHES if name in able)}",
        )
    return names


async def run(names: list[str], plan: Plan, *, against: str | None, as_json: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    # Ctrl-C cancels this task already; the other ways to be told so shall end the servers, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    known = await facts.gather()
    if against is None:
        await _all(names, plan, known, None, as_json=as_json)
        return
    async with revision.pair(against, now=known["commit"]) as trees:
        commits = {"commit": known["commit"], "against": f"{trees.then.commit} ({against})"}
        await _all(names, plan, {**commits, **known}, trees, as_json=as_json)


async def _all(
    names: list[str], plan: Plan, known: dict[str, str], trees: Trees | None, *, as_json: bool
) -> None:
    documents = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        result = await _one(name, plan, known, trees)
        result.write()
        documents.append(result.document())
        if not as_json:
            print(result.markdown(), flush=True)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))


async def _one(name: str, plan: Plan, known: dict[str, str], trees: Trees | None) -> Result:
    before, started = Load.now(), time.monotonic()
    rows, notes = await _measured(BENCHES[name], plan, trees)
    took_s = time.monotonic() - started
    load = load_text(before)
    flags = ["--only", name, *(["--quick"] if plan.quick else [])]
    flags += ["--count", str(plan.count)] if plan.count is not None else []
    flags += ["--against", trees.then.commit] if trees is not None else []
    return Result(
        name=name,
        title=BENCHES[name].title + ("" if trees is None else ", now and then"),
        command=shlex.join(["python", "-m", "bench.run", *flags]),
        facts={**known, "load average": load, "took": f"{took_s:.0f} s"},
        rows=rows,
        notes=notes,
        quick=plan.quick,
        against=trees is not None,
    )


async def _measured(bench: Bench, plan: Plan, trees: Trees | None) -> Measured:
    if trees is None:
        return await bench.measure(plan)
    assert bench.compare is not None, "chosen by name"
    return await bench.compare(plan, trees)


def main() -> int:
    options = arguments(sys.argv[1:])
    try:
        names = chosen(options.only, against=options.against is not None)
        plan = Plan(quick=options.quick, count=options.count)
        asyncio.run(run(names, plan, against=options.against, as_json=options.json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except MeshError as error:
        print(f"Error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"Hint: {error.hint}", file=sys.stderr)
        return 1
    except (TimeoutError, aiohttp.ClientError) as error:
        print(f"Error: a server did not answer: {error!r}", file=sys.stderr)
        print("Hint: the machine may be too busy; see `uptime`, and run it again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
