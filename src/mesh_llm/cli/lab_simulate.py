"""`mesh-llm lab simulate`: meshes of up to ten thousand nodes, on one core of this machine."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from pathlib import Path

import click

from mesh_llm.cli.measuring import Facts, command
from mesh_llm.cli.options import json_option, only_beside
from mesh_llm.cli.results import show
from mesh_llm.errors import UsageError
from mesh_llm.lab.simulate.report import document_of
from mesh_llm.lab.simulate.run import SimulationSize, simulated

_LEAST, _MOST = 10, 10_000
_QUICK = SimulationSize(nodes=(10, 30), churn_s=3, cases=3, events=10, rounds=2, views=10)


@click.command(short_help="meshes of thousands of nodes in one process")
@click.option("--nodes", default="10,100,1000,10000", show_default=True, help="sizes of meshes to simulate")
@click.option("--minutes", default=0.25, show_default=True, help="of churn, for each mesh")
@click.option("--seed", default=1, show_default=True, help="the same seed gives the same meshes and events")
@click.option("--quick", is_flag=True, help="10 and 30 nodes, in seconds")
@click.option("-o", "folder", type=click.Path(path_type=Path, file_okay=False), help="write the result there")
@json_option
def simulate(nodes: str, minutes: float, seed: int, quick: bool, folder: Path | None, as_json: bool) -> None:
    """Simulate large meshes: how news spreads, what it costs, how plans follow.

    The real membership and planning code runs over drawn machines, networks and sessions. Up to 1,000
    nodes each have a view of their own; beyond that a hundred do, and the others are modelled. It takes
    about ten minutes of one core and 2 GB with the default sizes.
    """
    if quick:
        only_beside("--quick", "quick", "seed", "folder", "as_json")
    extent = _QUICK if quick else _extent(nodes, minutes)
    facts, cpu_s = Facts(), time.process_time()
    found = simulated(seed, extent, lambda text: click.echo(text, err=True))
    known = asyncio.run(_facts(facts, seed, time.process_time() - cpu_s))
    show(document_of(found, command=command(sys.argv[1:]), facts=known), folder=folder, as_json=as_json)


def _extent(nodes: str, minutes: float) -> SimulationSize:
    try:
        counts = tuple(sorted({int(count) for count in nodes.split(",")}))
    except ValueError:
        raise UsageError(f"--nodes {nodes}: not a list of numbers", hint="write --nodes 10,100") from None
    if not counts or not _LEAST <= counts[0] <= counts[-1] <= _MOST:
        raise UsageError(f"--nodes {nodes}: a simulated mesh has {_LEAST} to {_MOST:,} nodes")
    if not 0 < minutes <= 60:
        raise UsageError(f"--minutes {minutes:g}: churn is simulated for up to an hour")
    return SimulationSize(nodes=counts, churn_s=60 * minutes, cases=300, events=100)


async def _facts(facts: Facts, seed: int, cpu_s: float) -> dict[str, str]:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        **await facts.gather(),
        "seed": str(seed),
        "on a core": f"{cpu_s:.0f} s",
        "memory": f"{memory / 1e6:,.0f} MB at most",
    }
