"""`mesh-llm lab chaos`: a mesh on this machine under load, while things are done to it."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from mesh_llm.cli.measuring import Facts, command
from mesh_llm.cli.options import debug_option, json_option, only_beside
from mesh_llm.cli.output import print_json, print_table, set_up_logging
from mesh_llm.cli.results import show
from mesh_llm.cli.serve import run_loop
from mesh_llm.defaults import DEFAULT_MODEL
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.lab.chaos import oracles, records, report
from mesh_llm.lab.chaos.records import Asked, ChaosLog, Record
from mesh_llm.lab.chaos.run import run
from mesh_llm.lab.chaos.schedule import EVERY_S, KINDS, Fault, draw, moved_up
from mesh_llm.lab.chaos.shrink import shrunk

FAILED = 1
RUNS = 12
AFTER_S = 20.0
"""That a shortened run lasts after its last fault."""

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(short_help="a mesh under load while nodes, engines and links fail")
@click.option("--minutes", type=click.FloatRange(0.1, 24 * 60), default=2.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="the same seed gives the same faults")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(1, 3600),
    default=EVERY_S,
    show_default=True,
    help="seconds between two faults, in the mean; more on a machine that is slow or busy",
)
@click.option("--model", metavar="NAME|PATH", help=f"as for a node (default: {DEFAULT_MODEL})")
@click.option("--clients", type=click.IntRange(1, 32), default=3, show_default=True, help="asking at once")
@click.option("--only", metavar="KIND[,KIND…]", help=f"these faults alone: {', '.join(KINDS)}")
@click.option(
    "--embeddings", is_flag=True, help="ask for vectors alone, of a model that has no other answers"
)
@click.option("--log", "log_file", type=_FILE, help="where to write what happened (default: a new file)")
@click.option("--replay", type=_FILE, metavar="LOG", help="the faults of that run again")
@click.option("--shrink", type=_FILE, metavar="LOG", help="find the few faults of that run that make it fail")
@click.option("--runs", type=click.IntRange(1, 1000), help=f"at most, to shrink (default: {RUNS})")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="a folder for the result")
@json_option
@debug_option
def chaos(
    minutes: float,
    seed: int,
    every_s: float,
    model: str | None,
    clients: int,
    only: str | None,
    embeddings: bool,
    log_file: Path | None,
    replay: Path | None,
    shrink: Path | None,
    runs: int | None,
    out: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Try a mesh on this machine: under load, while nodes, engines and links fail.

    Three nodes and a lite client. Every answer is compared with the undisturbed
    one; what must not happen is looked for all the while. Ends with 1 where it did.
    """
    set_up_logging(None, debug=debug, log_format="text")
    if shrink is not None:
        only_beside("--shrink", "shrink", "runs", "as_json", "debug")
        raise SystemExit(_shrink(shrink, runs or RUNS, as_json=as_json))
    if runs is not None and replay is None:
        raise UsageError("--runs is for --shrink", hint="--minutes says how long a run takes")
    if replay is not None:
        only_beside("--replay", "replay", "log_file", "out", "as_json", "debug")
        asked = replace(records.asked(records.read(replay)), command=command(sys.argv[1:]))
    else:
        faults = draw(seed=seed, minutes=minutes, every_s=every_s, kinds=_kinds(only))
        asked = Asked(
            seed=seed,
            minutes=minutes,
            model=model,
            clients=clients,
            faults=faults,
            embeddings=embeddings,
            command=command(sys.argv[1:]),
        )
    file = log_file or Path(tempfile.mkstemp(prefix="mesh-llm-chaos-", suffix=".log")[1])
    facts = Facts()
    time = "1 minute" if asked.minutes == 1 else f"{asked.minutes:g} minutes"
    click.echo(f"{len(asked.faults)} faults in {time}, and two more around them", err=True)
    found = _run(asked, file)
    findings = oracles.judge(found)
    document = report.document(found, findings, asyncio.run(_facts(asked, facts)))
    show(document, folder=out, as_json=as_json)
    click.echo(f"The log is {file}; mesh-llm lab chaos --replay {file} does it again", err=True)
    raise SystemExit(FAILED if findings else 0)


def _kinds(only: str | None) -> Sequence[str]:
    wanted = only.split(",") if only else tuple(KINDS)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise UsageError(f"--only {unknown[0]}: there is no such fault", hint=f"one of {', '.join(KINDS)}")
    return wanted


def _run(asked: Asked, file: Path | None) -> list[Record]:
    log = ChaosLog(file)
    try:
        return run_loop(run(asked, log, tell=lambda text: click.echo(text, err=True)))
    finally:
        log.close()


async def _facts(asked: Asked, facts: Facts) -> dict[str, str]:
    return {**await facts.gather(), "model": asked.model or DEFAULT_MODEL}


def _shrink(log_file: Path, runs: int, *, as_json: bool) -> int:
    before = records.read(log_file)
    asked = records.asked(before)
    wanted = {finding.oracle for finding in oracles.judge(before)}
    if not wanted:
        raise MeshError(f"nothing failed in {log_file}", hint="there is nothing to look for")

    async def fails(faults: Sequence[Fault]) -> bool:
        part = _part_of(asked, faults)
        log = ChaosLog(None)
        click.echo(f"Running {len(faults)} of {len(asked.faults)} faults", err=True)
        found = await run(part, log, tell=lambda _: None)
        again = {finding.oracle for finding in oracles.judge(found)} & wanted
        click.echo(f"  {', '.join(sorted(again)) or 'holds'}", err=True)
        return bool(again)

    kept = run_loop(shrunk(asked.faults, fails, runs=runs))
    if as_json:
        print_json({"faults": [each.to_document() for each in kept]})
    else:
        print_table(
            [(f"{each.at_s:.1f}", each.kind, each.node, f"{each.for_s:.1f}") for each in kept],
            headers=("s", "fault", "node", "for s"),
        )
    return FAILED


def _part_of(asked: Asked, faults: Sequence[Fault]) -> Asked:
    """The same run with fewer faults, and no longer than they take."""
    moved = moved_up(faults)
    end_s = max((each.end_s for each in moved), default=0.0) + AFTER_S
    return replace(asked, minutes=round(end_s / 60, 2), faults=moved)
