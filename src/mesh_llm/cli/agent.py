"""`mesh-llm agent`: what to type and paste for other people's agents, and `--write` does it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mesh_llm.agents import config_files, snippets
from mesh_llm.agents.config_files import Endpoint
from mesh_llm.cli.control import call, running_home
from mesh_llm.cli.options import debug_option, home_option, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.defaults import API_PORT, DEFAULT_MODEL
from mesh_llm.errors import AgentConfigRefused, MeshError, NodeNotRunning
from mesh_llm.frozen import frozen
from mesh_llm.home import Home

AGENT_CONFIG_BYTES = 4 << 20
"""An agent's config file is a few kilobytes; what is larger was written by something else."""


@frozen
class Written:
    """What became of an agent's config file."""

    file: Path
    changed: bool
    backup: Path | None = None


@click.command()
@click.argument("name", type=click.Choice(snippets.NAMES), required=False)
@click.option("--write", is_flag=True, help="merge it into the agent's own config file, with a backup")
@home_option
@json_option
@debug_option
def agent(name: str | None, write: bool, home: Path | None, as_json: bool, debug: bool) -> None:
    """Show how to connect an agent to the running node; without NAME, for all agents.

    --write merges it into the agent's own config and leaves everything else
    there as it is: pi (~/.pi/agent/models.json), goose, aider, opencode,
    continue, zed and llm.
    A key is never shown or written; MESH_LLM_API_KEY takes its place.
    """
    if write and name is None:
        raise click.UsageError("--write needs the name of an agent")
    endpoint, missing = asyncio.run(_endpoint(running_home(home)))
    if missing:
        click.echo(missing, err=True)
    if name is None:
        _list(endpoint, as_json=as_json)
        return
    written = write_config(name, endpoint) if write else None
    if as_json:
        print_json(_document(name, endpoint, written, running=not missing))
    elif written is not None:
        _tell(name, endpoint, written)
    else:
        _show(name, endpoint)


async def _endpoint(home: Home) -> tuple[Endpoint, str]:
    """The running node, as far as it knows already, and a sentence about what is assumed instead."""
    default = Endpoint(url=f"http://localhost:{API_PORT}", model=DEFAULT_MODEL)
    try:
        status = await call(home, "GET", "/api/status")
    except NodeNotRunning:
        return default, f"No node is running on {home.path}; showing the default port and model"
    api, model = status["api"], status["model"] or {}
    endpoint = Endpoint(
        url=config_files.as_typed(api["url"] or default.url),
        model=model.get("name") or default.model,
        context=model.get("context"),
        key_needed=api.get("key_needed", False),
    )
    if endpoint.context is None:
        return endpoint, "The node does not serve yet, so its context size is unknown and this may change"
    return endpoint, ""


# -- showing ---------------------------------------------------------------------------------------


def _list(endpoint: Endpoint, *, as_json: bool) -> None:
    recipes = [snippets.recipe(name, endpoint) for name in snippets.NAMES]
    if as_json:
        print_json({"agents": [asdict(recipe) for recipe in recipes]})
        return
    print_table([(recipe.name, recipe.title) for recipe in recipes], headers=("name", "agent"))
    click.echo("\nRun mesh-llm agent NAME for the details")


def _show(name: str, endpoint: Endpoint) -> None:
    """Commands and snippets begin at the margin: what is selected is what is pasted."""
    recipe = snippets.recipe(name, endpoint)
    click.echo(f"{recipe.command}\n")
    if recipe.snippet:
        if name in config_files.WRITTEN:
            click.echo(f"In {_shown(config_file(name))} (mesh-llm agent {name} --write does this):\n")
        click.echo(f"{recipe.snippet}\n")
    click.echo(recipe.note)


def _tell(name: str, endpoint: Endpoint, written: Written) -> None:
    file = _shown(written.file)
    if not written.changed:
        click.echo(f"{file} is up to date already; nothing changed")
    elif written.backup is None:
        click.echo(f"Wrote {file}")
    else:
        click.echo(f"Changed {file}; the previous version is {_shown(written.backup)}")
    click.echo(f"\n{snippets.recipe(name, endpoint).command}")
    if warning := snippets.small_context(name, endpoint):
        click.echo(f"\n{warning}", err=True)


def _document(name: str, endpoint: Endpoint, written: Written | None, *, running: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        **asdict(snippets.recipe(name, endpoint)),
        "running": running,
        "url": endpoint.url,
        "model": endpoint.model,
        "context": endpoint.context,
        "key_needed": endpoint.key_needed,
        "file": str(config_file(name)) if name in config_files.WRITTEN else None,
    }
    if written is not None:
        backup = None if written.backup is None else str(written.backup)
        document |= {"changed": written.changed, "backup": backup}
    return document


def _shown(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)


# -- writing ---------------------------------------------------------------------------------------


def config_file(name: str) -> Path:
    """Where the agent itself looks, by the variables that it obeys."""
    path = config_files.file_of(name)
    if name == "pi" and (folder := os.environ.get("PI_CODING_AGENT_DIR")):
        return Path(folder).expanduser() / "models.json"
    if name == "opencode" and (file := os.environ.get("OPENCODE_CONFIG")):
        return Path(file).expanduser()
    if name == "llm":
        return _llm_folder() / Path(path).name
    if path.startswith("~/.config/") and (base := os.environ.get("XDG_CONFIG_HOME")):
        path = f"{base}/{path.removeprefix('~/.config/')}"
    file_path = Path(path).expanduser()
    # Either name will do for opencode; where a person has chosen, a second file would be a surprise.
    with_comments = file_path.with_suffix(".jsonc")
    return with_comments if name == "opencode" and with_comments.exists() else file_path


def _llm_folder() -> Path:
    """Where `llm` itself looks."""
    if folder := os.environ.get("LLM_USER_PATH"):
        return Path(folder)
    return Path(click.get_app_dir("io.datasette.llm"))


def write_config(name: str, endpoint: Endpoint) -> Written:
    """Merge `endpoint` into the agent's file. Twice is once: the second time nothing changes."""
    named = config_file(name)
    # The file itself, not a link to it, is replaced: people keep such files elsewhere and link to them.
    path = _target(named)
    before = _read(path, named)
    try:
        after = config_files.rewritten(name, before or "", endpoint)
    except AgentConfigRefused as error:
        raise AgentConfigRefused(f"{named} was not changed: {error.message}", hint=error.hint) from None
    if before == after:
        return Written(file=named, changed=False)
    backup = None
    try:
        if before is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            # To replace a file its folder is enough; one that is closed to us was closed for a reason.
            path.open("r+b").close()
            backup = _backed_up(path, named)
        _replace(path, after)
    except OSError as error:
        if backup is not None:
            backup.unlink(missing_ok=True)
        raise MeshError(
            f"cannot write {error.filename or path}: {error.strerror}",
            hint=f"mesh-llm agent {name} shows what to paste",
        ) from error
    return Written(file=named, changed=True, backup=backup)


def _target(named: Path) -> Path:
    try:
        return named.resolve()
    except (OSError, RuntimeError):  # the latter before Python 3.13
        raise AgentConfigRefused(f"{named} is a symbolic link that points to itself") from None


def _read(path: Path, named: Path) -> str | None:
    """None where there is no file; newlines as they are."""
    try:
        if path.exists() and not path.is_file():
            raise AgentConfigRefused(f"{named} is not a file")
        with path.open("rb") as file:
            content = file.read(AGENT_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(content) > AGENT_CONFIG_BYTES:
        raise AgentConfigRefused(f"{named} was not changed: it is too large for a config file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise AgentConfigRefused(f"{named} was not changed: it is not UTF-8") from None


def _backed_up(path: Path, named: Path) -> Path:
    """A copy beside the file that people know; an older one is kept."""
    status = path.stat()
    number = 1
    while True:
        backup = named.with_name(f"{named.name}.bak{number if number > 1 else ''}")
        try:
            handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            continue
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(path.read_bytes())
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
        except BaseException:
            backup.unlink(missing_ok=True)
            raise
        return backup


def _replace(path: Path, text: str) -> None:
    """All or nothing, with the permissions and the owner that the file had."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                status = path.stat()
                # Another's file stays theirs when root writes; nobody else can give files away.
                with suppress(PermissionError):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), status.st_mode & 0o7777)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
