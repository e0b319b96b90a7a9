"""`mesh-llm catalog`: which lists of models there are, and one that somebody else keeps."""

from __future__ import annotations

import asyncio
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.tables import size
from mesh_llm.errors import ModelError
from mesh_llm.home import Home, write_private
from mesh_llm.models import catalog as lists
from mesh_llm.models.catalog import CatalogEntry

_LABELS = {"size_bytes": "size", "good_for": "good for"}


@click.group()
def catalog() -> None:
    """Show the catalog of models, or bring it up to date from a list that you trust."""


@catalog.command()
@click.argument("name", required=False)
@home_option
@json_option
@debug_option
def show(name: str | None, home: Path | None, as_json: bool, debug: bool) -> None:
    """Show where the catalog comes from, or all that it says of the model NAME."""
    own = Home(home_path(home))
    document = _lists(own) if name is None else _entry(lists.load(*own.catalog_files).find(name))
    if as_json:
        print_json(document)
    elif name is None:
        rows = [(each["list"], str(each["models"]), each["from"]) for each in document["lists"]]
        print_table(rows, headers=("list", "models", "from"))
    else:
        print_table([(_LABELS.get(key, key), _shown(key, value)) for key, value in document.items() if value])


@catalog.command()
@click.option(
    "--from", "url", metavar="URL|FILE", help="an https:// address, or a file (default: the last one)"
)
@click.option(
    "--key", metavar="HEX", help="the key that has signed it: 64 hexadecimal digits (default: the last one)"
)
@home_option
@json_option
@debug_option
def update(url: str | None, key: str | None, home: Path | None, as_json: bool, debug: bool) -> None:
    """Fetch a signed catalog. Its models stand before mesh-llm's own, and behind those of catalog.toml.

    Nothing is ever fetched without this command. A list that the key has not signed is refused.
    """
    # Here: to check a signature brings iroh along.
    from mesh_llm.local import catalog_update

    source, entries = asyncio.run(catalog_update.update(Home(home_path(home)), url, key))
    if as_json:
        print_json({"from": source.url, "key": source.key, "models": [entry.name for entry in entries]})
    else:
        click.echo(f"{len(entries)} models from {source.url}, signed by {source.key}")


@catalog.command()
@home_option
@json_option
@debug_option
def reset(home: Path | None, as_json: bool, debug: bool) -> None:
    """Forget the catalog that update brought: mesh-llm's own list counts again."""
    from mesh_llm.local import catalog_update

    was = catalog_update.reset(Home(home_path(home)))
    if as_json:
        print_json({"reset": was})
    else:
        click.echo("The catalog is mesh-llm's own again" if was else "The catalog is mesh-llm's own already")


@catalog.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--secret",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="the secret key to sign with; made where it is not there",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FILE")
@debug_option
def sign(file: Path, secret: Path, output: Path, debug: bool) -> None:
    """Sign the catalog FILE for others, and print the key that they name with --key."""
    from mesh_llm.local import catalog_update
    from mesh_llm.transport.identity import Identity

    identity = Identity.from_secret(_secret(secret))
    output.write_bytes(catalog_update.sign(file.read_bytes(), identity))
    click.echo(identity.id)


def _secret(path: Path) -> bytes:
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    try:
        found = bytes.fromhex(path.read_text().strip())
    except ValueError:
        found = b""
    if len(found) != 32:
        raise ModelError(f"{path} is not a secret key", hint="name a file that is not there yet, to make one")
    return found


# -- what is shown ----------------------------------------------------------------------------------


def _lists(home: Home) -> dict[str, Any]:
    from mesh_llm.local import catalog_update

    fetched, own = catalog_update.source(home), home.catalog_file
    found = [{"list": "built in", "models": len(lists.built_in()), "from": "mesh-llm"}]
    if fetched is not None:
        day = datetime.fromtimestamp(fetched.at).strftime("%Y-%m-%d")
        entries = lists.read(home.catalog_update_file)
        about = f"{fetched.url}, signed by {fetched.key[:12]}…, {day}"
        found.append({"list": "update", "models": len(entries), "from": about, "key": fetched.key})
    if own.exists():
        found.append({"list": "your own", "models": len(lists.read(own)), "from": str(own)})
    return {"lists": found[::-1], "models": len(lists.load(*home.catalog_files))}


def _entry(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "about": entry.about,
        "good_for": list(entry.good_for),
        "aliases": list(entry.aliases),
        "source": str(entry.source),
        "files": list(entry.files),
        "size_bytes": entry.size_bytes,
        "quantisation": entry.quantisation,
        "quantisations": list(entry.quantisations),
        "architecture": entry.architecture,
        "layers": entry.layers,
        "context": entry.context,
        "licence": entry.licence,
        "draft": entry.draft,
        "shape": dict(entry.shape),
        "checked": entry.checked,
    }


def _shown(key: str, value: Any) -> str:
    if key == "size_bytes":
        return size(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
