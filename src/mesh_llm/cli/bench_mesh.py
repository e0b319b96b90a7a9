"""`mesh-llm bench`, `mesh-llm bench mesh`: the running mesh under load."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mesh_llm.bench import mesh_load
from mesh_llm.bench.client import client
from mesh_llm.bench.mesh_document import document
from mesh_llm.bench.mesh_load import QUICK, AskedMesh, Kept, LoadSpec
from mesh_llm.bench.servers import Server
from mesh_llm.cli import secret
from mesh_llm.cli.control import call
from mesh_llm.cli.measuring import Facts, command, run_measurement
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import Output
from mesh_llm.cli.results import folder_option, show
from mesh_llm.errors import UsageError
from mesh_llm.home import Home
from mesh_llm.results.document import Document

_PATIENCE_S = 60.0
"""Beyond what a step may be expected to take."""


@click.command(short_help="the running mesh, which is what bench alone does")
@click.option("--quick", is_flag=True, help="few lengths and streams: within two minutes")
@click.option(
    "--resume", is_flag=True, help="go on with the measurement that was stopped in this folder (-o)"
)
@click.option("--api-key", metavar="KEY|@FILE|-", help="where the API asks for one (also MESH_LLM_API_KEY)")
@folder_option
@home_option
@json_option
@debug_option
def mesh(
    quick: bool,
    resume: bool,
    api_key: str | None,
    folder: Path | None,
    home: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Measure the running mesh: first token by prompt length, streams at once, beside the prediction.

    It asks through the API of the node on this machine and changes nothing. Ctrl-C stops it;
    with -o FOLDER what was measured is kept, and --resume goes on from there.
    """
    key = secret.read("--api-key", api_key)
    if resume and folder is None:
        raise UsageError("--resume needs the folder of the stopped measurement", hint="add -o FOLDER")
    where, spec = Home(home_path(home)), QUICK if quick else LoadSpec()

    async def measured() -> Document:
        facts = Facts()
        status = mesh_load.serving(await call(where, "GET", "/api/status"))
        if status.api.key_needed and not key:
            raise UsageError(
                "the API of this node asks for a key", hint="--api-key @FILE, or MESH_LLM_API_KEY"
            )
        kept = Kept(folder, mesh_load.about(status, spec))
        if resume:
            kept.resume()
        else:
            kept.begin()
        async with client(spec.step_s + _PATIENCE_S) as asker:
            asked = AskedMesh(
                client=asker,
                server=Server(url=status.api.url or "", key=key or "", pid=0, ready_s=0.0),
                look=lambda: call(where, "GET", "/api/status"),
                tell=output.note,
                progress=output.progress,
            )
            found = await mesh_load.measure(spec, kept, asked)
        kept.done()
        return document(found, command=command(sys.argv[1:]), facts=await facts.gather())

    with Output() as output:
        try:
            result = run_measurement(measured())
        except KeyboardInterrupt:
            if folder is not None:
                output.note(f"Stopped. mesh-llm bench --resume -o {folder} goes on with it")
            raise
    show(result, folder=folder, as_json=as_json)
