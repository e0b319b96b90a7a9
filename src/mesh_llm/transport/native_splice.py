"""Splices in threads of a native library, which need neither this interpreter nor its lock.

    splicer = load_native(path_of_libmesh_splice)     # None where it cannot be used
    report = await splice(link, send, recv, splicer=splicer)

The library (native/splice) calls iroh through the C functions that iroh's own
Python module calls. Their addresses are looked up here, and only used for the
version whose interface the library was written for.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import logging
import os
import socket
from pathlib import Path
from typing import Any

import iroh.iroh_ffi as iroh_ffi
from iroh.iroh_ffi import RecvStream, SendStream

from mesh_llm.transport.splice import SpliceEnd, SpliceReport

log = logging.getLogger(__name__)

_IROH_VERSION = "1.2.0"
_CONTRACT_VERSION = 30
"""Of uniffi: how futures are polled, what a buffer and a call's status look like."""
_CHECKSUMS = {
    "method_recvstream_read": 19153,
    "method_sendstream_write_all": 64390,
    "method_sendstream_finish": 43289,
    "method_iroherror_message": 60838,
}
"""What uniffi made of the methods' signatures."""

_FUNCTIONS = (
    "ffi_iroh_ffi_rustbuffer_from_bytes",
    "ffi_iroh_ffi_rustbuffer_free",
    "uniffi_iroh_ffi_fn_clone_sendstream",
    "uniffi_iroh_ffi_fn_free_sendstream",
    "uniffi_iroh_ffi_fn_method_sendstream_write_all",
    "uniffi_iroh_ffi_fn_method_sendstream_finish",
    "uniffi_iroh_ffi_fn_clone_recvstream",
    "uniffi_iroh_ffi_fn_free_recvstream",
    "uniffi_iroh_ffi_fn_method_recvstream_read",
    "ffi_iroh_ffi_rust_future_poll_void",
    "ffi_iroh_ffi_rust_future_cancel_void",
    "ffi_iroh_ffi_rust_future_complete_void",
    "ffi_iroh_ffi_rust_future_free_void",
    "ffi_iroh_ffi_rust_future_poll_rust_buffer",
    "ffi_iroh_ffi_rust_future_cancel_rust_buffer",
    "ffi_iroh_ffi_rust_future_complete_rust_buffer",
    "ffi_iroh_ffi_rust_future_free_rust_buffer",
    "uniffi_iroh_ffi_fn_method_iroherror_message",
)
"""In the order of `struct mesh_iroh` in splice.h."""

_ENDS = {1: SpliceEnd.FINISHED, 2: SpliceEnd.LINK_LOST, 3: SpliceEnd.STREAM_LOST}


class _Iroh(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint64), ("functions", ctypes.c_void_p * len(_FUNCTIONS)))


class _Report(ctypes.Structure):
    _fields_ = (
        ("sent_bytes", ctypes.c_uint64),
        ("received_bytes", ctypes.c_uint64),
        ("end", ctypes.c_int32),
        ("reason", ctypes.c_char * 252),
    )


def load_native(path: Path | None) -> NativeSplicer | None:
    """A splicer of the library at `path`, unless that or iroh is not what it should be."""
    if path is None:
        return None
    flaw = _flaw_of_iroh(iroh_ffi._UniffiLib)
    if flaw is not None:
        log.warning("native splices are not used: %s", flaw)
        return None
    try:
        return NativeSplicer(path)
    except (OSError, AttributeError) as error:
        log.warning("native splices are not used: %s", error)
        return None


def _flaw_of_iroh(library: ctypes.CDLL) -> str | None:
    version = importlib.metadata.version("iroh")
    if version != _IROH_VERSION:
        return f"iroh is {version}, not {_IROH_VERSION}"
    contract = library.ffi_iroh_ffi_uniffi_contract_version()
    if contract != _CONTRACT_VERSION:
        return f"iroh's calls are of version {contract}, not {_CONTRACT_VERSION}"
    for name, expected in _CHECKSUMS.items():
        found = getattr(library, f"uniffi_iroh_ffi_checksum_{name}")()
        if found != expected:
            return f"iroh's {name} has checksum {found}, not {expected}"
    return None


class NativeSplicer:
    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(os.fspath(path))
        self._iroh = _Iroh(size=ctypes.sizeof(_Iroh))
        for index, name in enumerate(_FUNCTIONS):
            self._iroh.functions[index] = ctypes.cast(getattr(iroh_ffi._UniffiLib, name), ctypes.c_void_p)
        self._start = self._library.mesh_splice_start
        self._start.argtypes = (
            ctypes.POINTER(_Iroh),
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
        )
        self._start.restype = ctypes.c_void_p
        self._read = self._library.mesh_splice_read
        self._read.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Report))
        self._read.restype = None
        self._free = self._library.mesh_splice_free
        self._free.argtypes = (ctypes.c_void_p,)
        self._free.restype = None

    async def copy(self, link: socket.socket, send: SendStream, recv: RecvStream) -> SpliceReport:
        loop = asyncio.get_running_loop()
        # Threads wait in the kernel; the mode belongs to the socket, not to a descriptor of it.
        link.setblocking(True)
        done, theirs = socket.socketpair()
        with done:
            done.setblocking(False)
            running = self._begin(link, send, recv, theirs)
            try:
                # They send nothing on it, and close it when both directions have ended.
                await loop.sock_recv(done, 1)
                report = _Report()
                self._read(running, ctypes.byref(report))
            finally:
                # Wakes and joins the threads: a moment, and no interpreter's lock is needed for it.
                self._free(running)
        return SpliceReport(
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
            end=_ENDS[report.end],
            reason=report.reason.decode("utf-8", "replace"),
        )

    def _begin(self, link: socket.socket, send: Any, recv: Any, theirs: socket.socket) -> int:
        link_fd, done_fd = os.dup(link.fileno()), theirs.detach()
        started: int | None = self._start(
            ctypes.byref(self._iroh), link_fd, send._handle, recv._handle, done_fd
        )
        if started is None:
            os.close(link_fd)
            os.close(done_fd)
            raise OSError("a splice could not start its threads")
        return started
