"""`mesh-llm bundle`: one file that installs mesh-llm on other machines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from mesh_llm.cli.imports import import_quickly
from mesh_llm.cli.options import debug_option, home_path
from mesh_llm.cli.output import Output
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import EngineMissing, ModelError
from mesh_llm.home import Home
from mesh_llm.local import model_names
from mesh_llm.models.facts import model_facts
from mesh_llm.models.names import Here

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("-o", "--output", "target", type=_PATH, metavar="FILE", help="write it here")
@click.option("--native", is_flag=True, help="with the CPU library that suits this processor alone")
@click.option("--with-model", "model", metavar="NAME", help="with this model, which has to be on this disk")
@click.option("--wheel", type=_PATH, metavar="FILE", help="with this wheel of mesh-llm instead of making one")
@debug_option
def bundle(target: Path | None, native: bool, model: str | None, wheel: Path | None, debug: bool) -> None:
    """Make one file that installs mesh-llm on machines like this one.

    They need Python 3.11 to 3.14, and neither a package index nor a compiler: tar xzf FILE,
    then sh mesh-llm-*/install.sh. This machine needs a package index, and in a clone a compiler.
    """
    try:
        builder = import_quickly("mesh_llm.bundle.build")
    except ModuleNotFoundError as error:
        raise EngineMissing(
            f"{error.name} is not installed, and a bundle needs what a node needs",
            hint='pip install "mesh-llm[engine]"',
        ) from None
    file = (target or Path(builder.default_name())).absolute()
    with Output() as output:
        spec = builder.BundleSpec(
            target=file, wheel=wheel, native=native, model_files=asyncio.run(_files(model))
        )
        asyncio.run(builder.build(spec, output.progress))
    size_mb = file.stat().st_size / 1e6
    click.echo(f"{file} ({size_mb:,.0f} MB)")
    click.echo("On the other machine: tar xzf FILE, then sh mesh-llm-*/install.sh", err=True)


async def _files(model: str | None) -> tuple[Path, ...]:
    """All files of the model, which are on this disk."""
    if model is None:
        return ()
    named = await model_names.resolve(model, Home(home_path(None)))
    if not isinstance(named, Here):
        raise ModelError(f"{model} is not on this disk", hint=f"mesh-llm download {model}")
    return tuple(model_facts(await read_gguf(named.path)).files)
