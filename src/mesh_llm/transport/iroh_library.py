"""iroh, loaded when it is first needed, with one slow piece of its generated code replaced.

Its import takes more than a tenth of a second: commands that do not talk to the mesh must not pay for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.metadata
import logging
import os
import re
from functools import cache
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.third_party import IROH, attributes_missing

log = logging.getLogger(__name__)

IROH_VERSION = "1.2.0"
"""Pinned exactly: a piece of its generated code is replaced."""


_PLACE = re.compile(r" \(/\S+:\d+:\d+\)$")
"""Where in iroh's sources an error arose."""


@cache
def iroh() -> Any:
    """The module of iroh's generated interface."""
    # With RUST_BACKTRACE, as developers have it, each wrong signature would cost a tenth of a second.
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
    try:
        version = importlib.metadata.version("iroh")
        module = importlib.import_module("iroh.iroh_ffi")
    except ImportError as error:
        raise MeshError(f"iroh cannot be loaded: {error}", hint="install mesh-llm again") from error
    if version != IROH_VERSION:
        raise MeshError(
            f"iroh {version} is installed, but this mesh-llm needs {IROH_VERSION}",
            hint=f"pip install iroh=={IROH_VERSION}",
        )
    if missing := attributes_missing(IROH):
        log.warning("links are slow: %s", missing[0])
    else:
        _write_at_once(module)
    for name in _CONNECTED:
        _free_on_loop(getattr(module, name))
    return module


_CONNECTED = ("Accepting", "BiStream", "Connecting", "Connection", "Incoming", "RecvStream", "SendStream")
"""Classes whose objects have a part in a connection."""
_loop: asyncio.AbstractEventLoop | None = None


def use_running_loop() -> None:
    """iroh's own threads hand results to this loop; there is one for the whole process."""
    global _loop
    _loop = asyncio.get_running_loop()
    iroh().uniffi_set_event_loop(_loop)


def _free_on_loop(kind: Any) -> None:
    """Let the loop free what is garbage, not whichever thread finds it.

    Python looks for garbage now and then, on any thread: also on one of iroh's that has called back, and
    holds the lock of a connection while it does. Freeing a stream takes that lock again: the thread would
    wait for itself for ever, and the loop for the thread.
    """
    free = kind.__del__

    def on_garbage(garbage: Any) -> None:
        try:
            if _loop is not None:
                _loop.call_soon_threadsafe(free, garbage)
                return
        except RuntimeError:
            pass  # the loop is closed, and with it all connections
        free(garbage)

    kind.__del__ = on_garbage


def message_of(error: Exception) -> str:
    """What an error of iroh says, in its last and plainest line."""
    text = error.message() if isinstance(error, iroh().IrohError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PLACE.sub("", lines[-1]) if lines else type(error).__name__


def _write_at_once(module: Any) -> None:
    # The generated method copies byte by byte in Python: 1.5 MB/s, against a hundred times as much.
    builder = module._UniffiRustBufferBuilder

    def write(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            start = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
            ctypes.memmove(start, bytes(value), len(value))

    builder.write = write
