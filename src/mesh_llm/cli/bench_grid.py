"""`mesh-llm bench grid`: node counts by latencies on this machine, beside stock llama.cpp RPC."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mesh_llm.bench import grid as bench_grid
from mesh_llm.bench.facts import model_file
from mesh_llm.bench.grid import GridSide, GridSpec
from mesh_llm.bench.grid_document import document
from mesh_llm.cli.demo import parse_latency
from mesh_llm.cli.measuring import Facts, command, numbers, run_measurement
from mesh_llm.cli.options import debug_option, home_path, json_option
from mesh_llm.cli.output import Output
from mesh_llm.cli.results import folder_option, show
from mesh_llm.home import Home
from mesh_llm.results.document import Document

_NODES, _LATENCIES = "3,4,5", "0,5,10,20,30"
_QUICK_NODES, _QUICK_LATENCIES = "3,5", "0,10"
_NONE_OR_MORE = click.FloatRange(min=0)
_QUICK_SIDES = (GridSide.OURS, GridSide.STOCK)


@click.command(short_help="node counts by latencies here, beside stock RPC")
@click.option("--model", metavar="NAME|PATH", help="default: smollm2")
@click.option(
    "--nodes", metavar="N[,N…]", help=f"host and workers together (default: {_NODES}; quick: {_QUICK_NODES})"
)
@click.option(
    "--latency",
    metavar="MS[,MS…]",
    help=f"one way, on every link (default: {_LATENCIES}; quick: {_QUICK_LATENCIES})",
)
@click.option(
    "--draft", metavar="NAME|PATH", help="a draft model for the side with drafts (default: the text)"
)
@click.option("--jitter", type=_NONE_OR_MORE, default=0.0, metavar="MS", help="how much the latency varies")
@click.option(
    "--bandwidth", type=_NONE_OR_MORE, default=0.0, metavar="MB/S", help="of every link; 0: no limit"
)
@click.option(
    "--loss", type=_NONE_OR_MORE, default=0.0, metavar="PERCENT", help="packets that are sent again"
)
@click.option("--rounds", type=click.IntRange(1, 100), help="rounds in each cell (default: 5; quick: 3)")
@click.option("--quick", is_flag=True, help="few cells, ours and stock alone: within three minutes")
@folder_option
@json_option
@debug_option
def grid(
    model: str | None,
    nodes: str | None,
    latency: str | None,
    draft: str | None,
    jitter: float,
    bandwidth: float,
    loss: float,
    rounds: int | None,
    quick: bool,
    folder: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Measure decode over several node counts and latencies on this machine.

    Ours, ours with drafts, stock llama.cpp RPC and the engine alone take turns in the
    same rounds, over the same links. Nothing listens beyond this machine.
    """
    counts = numbers("--nodes", nodes or (_QUICK_NODES if quick else _NODES), int)
    latencies_s = parse_latency(latency or (_QUICK_LATENCIES if quick else _LATENCIES))

    async def measured() -> Document:
        facts, home = Facts(), Home(home_path(None))
        spec = GridSpec(
            model=await model_file(model, home),
            nodes=counts,
            latencies_s=latencies_s,
            sides=_QUICK_SIDES if quick else bench_grid.SPLIT_SIDES,
            draft=await model_file(draft, home) if draft else None,
            jitter_s=jitter / 1e3,
            bytes_s=bandwidth * 1e6 or None,
            loss=loss / 100,
            rounds=rounds or (3 if quick else 5),
            tokens=24 if quick else 48,
            cell_s=bench_grid.QUICK_CELL_S if quick else bench_grid.CELL_S,
        )
        found = await bench_grid.measure(spec, tell=output.note, progress=output.progress)
        return document(found, command=command(sys.argv[1:]), facts=await facts.gather())

    with Output() as output:
        result = run_measurement(measured())
    show(result, folder=folder, as_json=as_json)
