"""Take a port, the API's or another, or say in one sentence why not."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

import psutil

from mesh_llm.errors import MeshError, PortInUse

_BACKLOG = 128


def bind(listen: str, port: int, *, option: str = "--port") -> socket.socket:
    """A listening socket on the first address that `listen` stands for; `option` is what chose the port."""
    try:
        found = socket.getaddrinfo(listen, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError):
        raise MeshError(f"cannot listen on {listen}:{port}: there is no such address") from None
    # localhost may stand for both; the printed address and the guides say 127.0.0.1.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and listen == "::":
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        taken.bind(address)
        # Here, not later: of two that bind at once only the one that listens first has the port.
        taken.listen(_BACKLOG)
    except OSError as error:
        taken.close()
        raise _refusal(error, listen, port, option) from None
    taken.setblocking(False)
    return taken


def tls(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        reason = error.reason or "unreadable"
        raise MeshError(f"the certificate {cert} and its key cannot be used: {reason}") from None
    except OSError as error:
        raise MeshError(f"cannot read the certificate {cert} or its key: {error.strerror}") from None
    return context


def _refusal(error: OSError, listen: str, port: int, option: str) -> MeshError:
    if error.errno == errno.EADDRINUSE:
        owner = _owner(port)
        by = f" by {owner}" if owner else ""
        return PortInUse(f"port {port} is in use{by}", hint=f"{option} 0 takes any free port")
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return MeshError(f"cannot listen on {listen}: it is not an address of this machine")
    if error.errno in (errno.EACCES, errno.EPERM):
        return MeshError(
            f"no permission to listen on port {port}", hint="ports below 1024 belong to the system"
        )
    return MeshError(f"cannot listen on {listen}:{port}: {os.strerror(error.errno or 0)}")


def _owner(port: int) -> str | None:
    """`NAME (pid N)` of who listens on `port`, as far as this user may know."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            local = connection.status == psutil.CONN_LISTEN and connection.laddr
            if local and local.port == port and connection.pid is not None:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        # Whoever it is belongs to another user, or has just ended.
        pass
    return None
