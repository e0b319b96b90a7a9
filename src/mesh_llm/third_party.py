"""What this package relies on in other people's code beyond what they promise: one list, checked.

- symbols of the engine: listed in native/hooks/engine_symbols.cpp, looked up when the engine is loaded;
- literals of the engine that its log and its figures are read by: looked up in its binary;
- private attributes of Python packages: looked up when the module that needs them is imported.

docs/design/engine-upgrade.md has them as a table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
from collections.abc import Iterable
from pathlib import Path

from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen


@frozen
class EngineSymbol:
    """struct ggml_mesh_symbol in native/ggml-mesh.h."""

    name: str
    """As the linker has it; empty on platforms where functions of the engine cannot be replaced."""
    feature: str
    without: str
    replaced: bool
    found: bool


def features_off(symbols: Iterable[EngineSymbol]) -> tuple[str, ...]:
    """A sentence for each feature that the loaded engine lacks a symbol of."""
    missing: dict[str, list[EngineSymbol]] = {}
    for symbol in symbols:
        if not symbol.found:
            missing.setdefault(symbol.feature, []).append(symbol)
    return tuple(
        f"{feature} is off, {lacking[0].without}: {_lacks([symbol.name for symbol in lacking])}"
        for feature, lacking in missing.items()
    )


def _lacks(names: list[str]) -> str:
    if not all(names):
        return "functions of the engine cannot be replaced on this platform"
    return f"this engine has no {' and no '.join(names)}"


@frozen
class EngineText:
    """What the engine writes, and we read; as it stands in its binary."""

    literals: tuple[str, ...]
    read_by: str
    without: str


ENGINE_TEXTS = (
    EngineText(
        literals=tuple(
            f"{kind} buffer size = %8.2f MiB" for kind in ("model", "KV", "RS", "compute", "output")
        ),
        read_by="engine/diagnostics.py: buffer_bytes",
        without="status and metrics do not show the engine's buffers",
    ),
    EngineText(
        literals=("%d.%02d.%03d.%03d",),
        read_by="engine/diagnostics.py: explain",
        without="the reason of a crash is shown with a time before it",
    ),
    EngineText(
        literals=("api_keys: ****",),
        read_by="engine/diagnostics.py: redacted",
        without="the engine's log may hold the end of its key, which is made anew for each start",
    ),
    EngineText(
        literals=(
            *("failed to allocate", "GGML_ASSERT(%s) failed", "couldn't bind", "HTTP server error"),
            *("error loading model", "failed to load model", "model loading error"),
        ),
        read_by="engine/diagnostics.py: explain",
        without="a crash is told by its exit status and the last line of the log",
    ),
    EngineText(
        literals=("listening on %s", "version: %s (build %d"),
        read_by="engine/children/external.py",
        without="--bin-dir refuses the llama-server of that build",
    ),
    EngineText(
        literals=(
            *("tokens_predicted_total", "tokens_predicted_seconds_total"),
            *("prompt_tokens_total", "prompt_seconds_total", "requests_processing", "requests_deferred"),
        ),
        read_by="engine/telemetry.py: /metrics",
        without="tokens per second are not shown, and an engine counts as busy",
    ),
    EngineText(
        literals=("is_processing", "next_token", "n_decoded"),
        read_by="engine/telemetry.py: /slots",
        without="tokens count when their answer has ended",
    ),
    # llama.cpp's web page. Its licence is MIT; tools/ui/package.json there names the packages inside it. Our
    # wheel carries the page with that licence beside it, our sources do not.
    EngineText(
        literals=("_Z19llama_ui_get_assetsv", "arrayI14llama_ui_assetLm"),
        read_by="engine/children/page.py",
        without="the API's address shows no chat",
    ),
)


def texts_missing(engine: Path) -> tuple[str, ...]:
    """A sentence for each text that is not in the engine's binary; reads all of it."""
    with engine.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
        return tuple(
            f"{text.without}: this engine does not write {literal!r}"
            for text in ENGINE_TEXTS
            for literal in text.literals
            if binary.find(literal.encode()) < 0
        )


@frozen
class PrivateAttributes:
    owner: str
    """A class, with its module."""
    names: tuple[str, ...]
    read_by: str
    without: str


AIOHTTP = (
    PrivateAttributes(
        owner="aiohttp.web_protocol.RequestHandler",
        names=(
            *("_force_close", "_request_count", "_waiter", "_next_keepalive_close_time"),
            *("_reading_paused", "_loop"),
        ),
        read_by="gateway/client_connection.py",
        without="the gateway does not start: it could not tell idle connections from busy ones",
    ),
    PrivateAttributes(
        owner="aiohttp.web_server.Server",
        names=("_make_request",),
        read_by="gateway/client_connection.py",
        without="the gateway does not start: bodies that do not come would keep others out",
    ),
    PrivateAttributes(
        owner="aiohttp.web_protocol.RequestHandler",
        names=("_manager",),
        read_by="relay/connections.py",
        without="the relay does not start: it could not count its connections",
    ),
)
IROH = (
    PrivateAttributes(
        owner="iroh.iroh_ffi._UniffiRustBufferBuilder",
        names=("write", "_reserve"),
        read_by="transport/iroh_library.py",
        without="iroh copies byte by byte, at 1.5 MB/s",
    ),
)


def attributes_missing(listed: Iterable[PrivateAttributes], *, read_by: str | None = None) -> tuple[str, ...]:
    """A sentence for each class that lacks attributes, or is not there."""
    return tuple(
        f"{entry.without}: {entry.owner} has no {' and no '.join(lacking)}"
        for entry in listed
        if read_by in (None, entry.read_by) and (lacking := _lacking(entry))
    )


def _lacking(entry: PrivateAttributes) -> list[str]:
    module, _, name = entry.owner.rpartition(".")
    owner = getattr(importlib.import_module(module), name, None)
    return [attribute for attribute in entry.names if not hasattr(owner, attribute)]


def require_aiohttp(read_by: str) -> None:
    """Refuse an aiohttp whose insides are others than those that a module of ours was written for."""
    if missing := attributes_missing(AIOHTTP, read_by=read_by):
        version = importlib.metadata.version("aiohttp")
        raise MeshError(
            f"aiohttp {version} is not one that this mesh-llm knows: {missing[0]}",
            hint="pip install --upgrade mesh-llm, which brings the aiohttp that it was made for",
        )
