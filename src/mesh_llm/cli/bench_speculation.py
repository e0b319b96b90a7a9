"""`mesh-llm bench speculation`: prose, code and JSON, with drafts and without."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mesh_llm.bench import speculation as bench_speculation
from mesh_llm.bench.company import Bystanders
from mesh_llm.bench.facts import model_file
from mesh_llm.bench.grid import NODES_LIMIT
from mesh_llm.bench.speculation import SpeculationSpec, document
from mesh_llm.cli.measuring import Facts, command, run_measurement
from mesh_llm.cli.options import debug_option, home_path, json_option
from mesh_llm.cli.output import Output
from mesh_llm.cli.results import folder_option, show
from mesh_llm.home import Home
from mesh_llm.results.document import Document


@click.command(short_help="prose, code and JSON, with drafts and without")
@click.option("--model", metavar="NAME|PATH", help="default: smollm2")
@click.option("--draft", metavar="NAME|PATH", help="a draft model beside the text itself (default: none)")
@click.option(
    "--nodes",
    type=click.IntRange(1, NODES_LIMIT),
    default=3,
    show_default=True,
    help="host and workers together",
)
@click.option(
    "--latency",
    type=click.FloatRange(0, 10_000),
    default=10.0,
    show_default=True,
    metavar="MS",
    help="one way, on every link",
)
@click.option("--quick", is_flag=True, help="three rounds and shorter answers")
@folder_option
@json_option
@debug_option
def speculation(
    model: str | None,
    draft: str | None,
    nodes: int,
    latency: float,
    quick: bool,
    folder: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Measure what guessing ahead gains for prose, code and JSON, on this machine.

    The same split engine answers with drafts and without, in turns.
    """

    async def measured() -> Document:
        facts, home, company = Facts(), Home(home_path(None)), Bystanders()
        spec = SpeculationSpec(
            model=await model_file(model, home),
            draft=await model_file(draft, home) if draft else None,
            nodes=nodes,
            latency_s=latency / 1000,
            rounds=3 if quick else 5,
            tokens=48 if quick else 96,
        )
        found = await bench_speculation.measure(spec, tell=output.note, progress=output.progress)
        return document(
            found, spec, company=company, command=command(sys.argv[1:]), facts=await facts.gather()
        )

    with Output() as output:
        result = run_measurement(measured())
    show(result, folder=folder, as_json=as_json)
