"""`mesh-llm load`, `unload`, `use`: which models the mesh serves, while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option, options_named
from mesh_llm.cli.output import print_json
from mesh_llm.home import Home
from mesh_llm.mesh_settings import MESH_OPTIONS

_OF_THE_MODEL = tuple(option.argument for option in MESH_OPTIONS.values())


@click.command()
@click.argument("name", metavar="NAME|PATH")
@options_named(*_OF_THE_MODEL, "alias", "no_draft", "home", "debug")
@json_option
def load(name: str, as_json: bool, **options: Any) -> None:
    """Serve one more model in the mesh of the running node, or one with other options.

    NAME is what --model takes. A model that is not on this disk is downloaded first. Nodes that
    lack its file fetch it from here, and those that serve other models go on serving them.
    """
    given = {
        field: option.parse(value)
        for field, option in MESH_OPTIONS.items()
        if (value := options[option.argument]) not in (None, "") and value is not False
    }
    body = {
        "name": _where(name),
        "options": given,
        "alias": options["alias"],
        "no_draft": options["no_draft"],
    }
    answer = _asked(options["home"], "load-model", body)
    if as_json:
        print_json(answer)
    elif answer["downloading"]:
        click.echo(
            f"{answer['model']} is being downloaded, and served then; mesh-llm status shows how far it is"
        )
    else:
        click.echo(f"{answer['model']} is being loaded; mesh-llm status shows how far it is")


@click.command()
@click.argument("name")
@home_option
@json_option
@debug_option
def unload(name: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Serve a model no longer. Answers under way are finished."""
    answer = _asked(home, "unload-model", {"name": name})
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['model']} is no longer served")


@click.command()
@click.argument("name")
@home_option
@json_option
@debug_option
def use(name: str, home: Path | None, as_json: bool, debug: bool) -> None:
    """Make a model that is served the default one: it answers requests that name none."""
    answer = _asked(home, "use-model", {"name": name})
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['model']} is the default model now")


def _where(name: str) -> str:
    """A path is the person's; the node may run elsewhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.suffix == ".gguf" and path.is_file() else name


def _asked(home: Path | None, what: str, body: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(call(Home(home_path(home)), "POST", f"/api/{what}", body))
