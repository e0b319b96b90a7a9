"""`python -m bench.run`: run the benches, print their tables, keep them in results/."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable
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
    links,
    mesh,
    meshrelay,
    overhead,
    relay,
    resume,
    solo,
    speculation,
    split,
    startup,
)
from bench.facts import Load
from bench.plan import Plan
from bench.report import Result, Row
from mesh_llm.errors import MeshError

Measure = Callable[[Plan], Awaitable[tuple[tuple[Row, ...], tuple[str, ...]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    title: str
    measure: Measure


# Quiet ones first: a machine is never quieter than before the work starts.
BENCHES: dict[str, Bench] = {
    "idle": Bench(title=idle.TITLE, measure=idle.measure),
    "startup": Bench(title=startup.TITLE, measure=startup.measure),
    "download": Bench(title=download.TITLE, measure=download.measure),
    "relay": Bench(title=relay.TITLE, measure=relay.measure),
    "meshrelay": Bench(title=meshrelay.TITLE, measure=meshrelay.measure),
    "overhead": Bench(title=overhead.TITLE, measure=overhead.measure),
    "gateway": Bench(title=gateway.TITLE, measure=gateway.measure),
    "solo": Bench(title=solo.TITLE, measure=solo.measure),
    "fairness": Bench(title=fairness.TITLE, measure=fairness.measure),
    "links": Bench(title=links.TITLE, measure=links.measure),
    "mesh": Bench(title=mesh.TITLE, measure=mesh.measure),
    "resume": Bench(title=resume.TITLE, measure=resume.measure),
    "split": Bench(title=split.TITLE, measure=split.measure),
    "speculation": Bench(title=speculation.TITLE, measure=speculation.measure),
    "console": Bench(title=console.TITLE, measure=console.measure),
    "gpu": Bench(title=gpu.TITLE, measure=gpu.measure),
}
BY_NAME_ONLY = {"gpu"}
"""Not every machine can run them."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: some ten minutes for all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(argv)


async def run(names: list[str], plan: Plan, *, as_json: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    # Ctrl-C cancels this task already; the other ways to be told so shall end the servers, too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    known = await facts.gather()
    documents = []
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        result = await _one(name, plan, known)
        result.write()
        documents.append(result.document())
        if not as_json:
            print(result.markdown(), flush=True)
    if as_json:
        print(json.dumps(documents, ensure_ascii=False))


async def _one(name: str, plan: Plan, known: dict[str, str]) -> Result:
    before, started = Load.now(), time.monotonic()
    rows, notes = await BENCHES[name].measure(plan)
    took_s = time.monotonic() - started
    load = f"{before.text()} at the start, {Load.now().text()} at the end (the bench's own work included)"
    flags = ["--only", name, *(["--quick"] if plan.quick else [])]
    return Result(
        name=name,
        title=BENCHES[name].title,
        command=shlex.join(["python", "-m", "bench.run", *flags]),
        facts={**known, "load average": load, "took": f"{took_s:.0f} s"},
        rows=rows,
        notes=notes,
        quick=plan.quick,
    )


def main() -> int:
    options = arguments(sys.argv[1:])
    names = [name for name in BENCHES if name in (options.only or BENCHES.keys() - BY_NAME_ONLY)]
    try:
        asyncio.run(run(names, Plan(quick=options.quick), as_json=options.json))
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
