"""Every model on this disk with what its header says, and whether it fits: what `mesh-llm models` shows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mesh_llm import __version__
from mesh_llm.defaults import DEFAULT_SLOTS, ENGINE_VERSION, HEADERS_KEPT, INSPECT_AT_ONCE
from mesh_llm.engine import build, machine
from mesh_llm.engine.inspect import describe, read_headers
from mesh_llm.engine.library import find_wheel
from mesh_llm.errors import EngineMissing, MeshError, ModelError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home, cache_folder
from mesh_llm.models import catalog
from mesh_llm.models.header_cache import NO_FINGERPRINT, Header, Headers, header_of
from mesh_llm.models.stores import Found, LocalModel, Places, Skipped, search
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.planning.solo_fit import choose_devices
from mesh_llm.planning.would_fit import WouldFit, outlook, supposed
from mesh_llm.status_schema import ServedModelStatus, from_document
from mesh_llm.types import Device, DeviceKind, NodeFacts, NodeId, Progress, ProgressSink, Role

_THIS_MACHINE = NodeId("0" * 64)
"""Stands for a node that does not run."""


@frozen
class Listed:
    model: LocalModel
    header: Header | None
    """None where nobody could read it: without an engine, or with some of its files."""
    here: WouldFit | None = None
    """On this machine alone."""
    mesh: WouldFit | None = None
    """Over all nodes of the mesh, where one runs and this machine is too small."""


@frozen
class FreeMemory:
    """Where models may be put."""

    here: Snapshot
    mesh: Snapshot | None
    """None where no node runs here, or none with others."""
    runs: bool = False
    """Whether a node does."""


@frozen
class Inventory:
    listed: tuple[Listed, ...]
    skipped: tuple[Skipped, ...]
    places: Places
    rooms: FreeMemory | None
    note: str
    """What kept it from being complete."""
    served: tuple[ServedModelStatus, ...] = ()
    """By the mesh of the node that runs on this home."""
    catalog: tuple[str, ...] = ()


async def take_stock(home: Home, *, progress: ProgressSink) -> Inventory:
    places = Places.from_environment()
    found, rooms, served = await asyncio.gather(
        asyncio.to_thread(search, places), _rooms(home), _served(home)
    )
    note = ""
    try:
        find_wheel()
        headers = await _headers(found, progress)
    except EngineMissing as error:
        headers, note = {}, f"The model files could not be read: {error.message}"
    listed = [Listed(model=model, header=headers.get(model.path)) for model in found.models]
    skipped = [
        Skipped(path=each.model.path, store=each.model.store, reason=each.header.problem)
        for each in listed
        if each.header is not None and each.header.problem and each.header.refusal is None
    ]
    out = {each.path for each in skipped}
    return Inventory(
        listed=tuple(_judged(each, rooms) for each in listed if each.model.path not in out),
        skipped=(*found.skipped, *skipped),
        places=places,
        rooms=rooms,
        note=note,
        served=served,
        catalog=tuple(entry.name for entry in catalog.load(home.catalog_file)),
    )


async def _served(home: Home) -> tuple[ServedModelStatus, ...]:
    if not home.control_socket.exists():
        return ()
    # Here, as below.
    from mesh_llm.cli.control import call

    try:
        models = (await call(home, "GET", "/api/status"))["models"]
    except MeshError:
        return ()
    return tuple(from_document(ServedModelStatus, model) for model in models)


# -- headers --------------------------------------------------------------------------------------


async def _headers(found: Found, progress: ProgressSink) -> dict[Path, Header]:
    """By path, of the models that are complete; from the cache where they are as they were."""
    cache = Headers(cache_folder() / "headers.json", reader=f"{__version__} {ENGINE_VERSION}")
    headers: dict[Path, Header] = {}
    unknown: list[LocalModel] = []
    for model in found.models:
        if model.missing:
            continue
        if (known := cache.known(model)) is not None:
            headers[model.path] = known
        else:
            unknown.append(model)
    # A folder may be full of files that were made to be read forever.
    unknown = unknown[:HEADERS_KEPT]
    index = 0
    async for answer in read_headers([model.path for model in unknown]):
        model = unknown[index]
        headers[model.path] = header_of(model, answer)
        # What could not be read may be readable the next time.
        if not isinstance(answer, ModelError):
            cache.learn(model, headers[model.path])
        index += 1
        if len(unknown) > INSPECT_AT_ONCE:
            progress(Progress(what="Reading headers", done=index, total=len(unknown), unit="files"))
    cache.save()
    return headers


# -- fit ------------------------------------------------------------------------------------------


def _judged(listed: Listed, rooms: FreeMemory | None) -> Listed:
    header = listed.header
    if rooms is None or header is None or header.facts is None or header.refusal is not None:
        return listed
    here = outlook(rooms.here, header.facts, slots=DEFAULT_SLOTS)
    if here.fits or rooms.mesh is None:
        return replace(listed, here=here)
    return replace(listed, here=here, mesh=outlook(rooms.mesh, header.facts, slots=DEFAULT_SLOTS))


async def _rooms(home: Home) -> FreeMemory | None:
    """This machine and the mesh, as a running node knows them; None where the engine does not run here."""
    me, nodes = await members(home)
    own = next((node for node in nodes if node.id == me and node.facts.memory_bytes), None)
    if own is None:
        try:
            own = Candidate(id=_THIS_MACHINE, facts=await _this_machine())
        except MeshError:
            return None
    here, mesh = supposed([own], NO_FINGERPRINT), supposed(nodes, NO_FINGERPRINT)
    return FreeMemory(here=here, mesh=mesh if len(mesh.nodes) > 1 else None)


async def members(home: Home) -> tuple[str, Sequence[Candidate]]:
    """Of the mesh of the node that runs here, with the id of that node; nobody where none does."""
    if not home.control_socket.exists():
        return "", ()
    # Here: a third of the time that this verb takes, for those who have no node.
    from mesh_llm.cli.control import call
    from mesh_llm.membership.fact_documents import facts_from_document

    try:
        document = await call(home, "GET", "/api/snapshot")
    except MeshError:
        # A listing of files is none the worse for it.
        return "", ()
    return document["me"], [
        Candidate(
            id=NodeId(node["id"]),
            facts=facts_from_document(node["facts"]),
            alive=node["alive"],
            reachable=node["reachable"],
        )
        for node in document["nodes"]
    ]


async def _this_machine() -> NodeFacts:
    described = await describe(build.at_hand().libraries)
    devices = tuple(
        Device(**{**fields, "kind": DeviceKind(fields["kind"])}) for fields in described["devices"]
    )
    free = machine.available_memory()
    return NodeFacts(
        name="this machine",
        role=Role.NODE,
        version=__version__,
        engine=ENGINE_VERSION,
        memory_bytes=free,
        machine_memory_bytes=free,
        gpus=choose_devices(None, devices),
    )
