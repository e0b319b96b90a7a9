"""`mesh-llm load`, `unload`, `use`: which models the mesh serves, while it runs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.control import call
from mesh_llm.cli.options import adapters, debug_option, home_option, home_path, json_option, options_named
from mesh_llm.cli.output import print_json
from mesh_llm.errors import UsageError
from mesh_llm.home import Home
from mesh_llm.mesh_settings import MESH_OPTIONS

_OF_THE_MODEL = (
    *(option.argument for option in MESH_OPTIONS.values()),
    *("alias", "draft", "draft_max", "no_draft", "lora", "lora_scaled"),
)


@click.command()
@click.argument("name", metavar="NAME|PATH")
@options_named(*_OF_THE_MODEL, "home", "debug")
@click.option("--on-demand", is_flag=True, help="load it when somebody asks for it, and not before")
@click.option(
    "--idle", metavar="TIME", help="with --on-demand: without requests for so long, it goes (default: 10m)"
)
@click.option("--pinned", is_flag=True, help="keep it loaded, as without --on-demand")
@json_option
def load(name: str, on_demand: bool, idle: str | None, pinned: bool, as_json: bool, **options: Any) -> None:
    """Serve one more model in the mesh of the running node, or one with other options.

    NAME is what --model takes. A model that is not on this disk is downloaded first. Nodes that
    lack its file fetch it from here, and those that serve other models go on serving them.
    """
    given = {
        field: option.parse(value)
        for field, option in MESH_OPTIONS.items()
        if (value := options[option.argument]) not in (None, "") and value is not False
    }
    if idle is not None and not on_demand:
        raise UsageError("--idle needs --on-demand")
    if on_demand and pinned:
        raise UsageError("--pinned and --on-demand exclude each other")
    idle_s = parse_idle(idle) if idle is not None else None
    body = {
        "name": _where(name),
        **({"on_demand": on_demand, "idle_s": idle_s} if on_demand or pinned else {}),
        "options": given,
        "alias": options["alias"],
        "draft": _where(options["draft"]) if options["draft"] else options["draft"],
        "draft_max": options["draft_max"],
        "no_draft": options["no_draft"],
        "lora": [{"path": str(path), "scale": scale} for path, scale in adapters(options)],
    }
    answer = _asked(options["home"], "load-model", body)
    if as_json:
        print_json(answer)
    elif answer["downloading"]:
        click.echo(
            f"{answer['model']} is being downloaded, and served then; mesh-llm status shows how far it is"
        )
    elif on_demand:
        click.echo(f"{answer['model']} is at hand: it is loaded when somebody asks for it")
    elif not answer.get("changed", True):
        click.echo(f"{answer['model']} is served already, as you ask for it")
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


def parse_idle(text: str) -> int:
    """`90s`, `10m`, `2h` in seconds."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if match is None:
        raise UsageError(f"--idle {text} is not a duration", hint="30s, 10m, 2h or 1d")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _where(name: str) -> str:
    """A path is the person's; the node may run elsewhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.suffix == ".gguf" and path.is_file() else name


def _asked(home: Path | None, what: str, body: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(call(Home(home_path(home)), "POST", f"/api/{what}", body))
