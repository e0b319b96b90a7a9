"""The two addresses of a line, as people write them: `tcp:HOST:PORT`, `udp:HOST:PORT`, `unix:PATH`."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from mesh_llm.errors import PortInUse, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.loopback import is_loopback

KINDS = ("tcp", "udp", "unix")


@frozen
class LineAddress:
    kind: str
    at: tuple[str, int] | str

    @classmethod
    def parse(cls, text: str) -> LineAddress:
        """HOST:PORT alone is TCP, and what has a slash in it is a path."""
        kind, _, rest = text.partition(":")
        if kind not in KINDS:
            kind, rest = ("unix" if "/" in text else "tcp"), text
        if kind == "unix":
            return cls(kind=kind, at=rest)
        host, _, port = rest.rpartition(":")
        if not host or not port.isdecimal() or int(port) >= 1 << 16:
            raise UsageError(
                f"{text!r} is not an address",
                hint="for example 127.0.0.1:5000, udp:127.0.0.1:5000 or unix:PATH",
            )
        return cls(kind=kind, at=(host.strip("[]"), int(port)))

    def text(self) -> str:
        if isinstance(self.at, str):
            return f"{self.kind}:{self.at}"
        host, port = self.at
        return f"{self.kind}:[{host}]:{port}" if ":" in host else f"{self.kind}:{host}:{port}"


def listening(address: LineAddress) -> socket.socket:
    """A socket there, for programs of this machine alone: whoever reaches it reaches the line's target."""
    if isinstance(address.at, str):
        return _unix(address.at)
    if not is_loopback(address.at[0]):
        raise UsageError(
            f"a line listens on this machine alone, not at {address.at[0]}",
            hint="127.0.0.1:0 takes any free port; the target may be anywhere",
        )
    kind = socket.SOCK_DGRAM if address.kind == "udp" else socket.SOCK_STREAM
    family, _, _, _, where = socket.getaddrinfo(*address.at, type=kind)[0]
    end = socket.socket(family, kind)
    try:
        if kind == socket.SOCK_STREAM:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.bind(where)
        if kind == socket.SOCK_STREAM:
            end.listen()
    except OSError as error:
        end.close()
        raise PortInUse(f"cannot listen at {address.text()}: {error.strerror}") from error
    return end


def _unix(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_old(Path(path))
        mask = os.umask(0o177)
        try:
            end.bind(path)
        finally:
            os.umask(mask)
        end.listen()
    except OSError as error:
        end.close()
        raise PortInUse(f"cannot listen at {path}: {error.strerror or error}") from error
    return end


def _remove_old(path: Path) -> None:
    """A socket at which nobody listens any more."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def bound(end: socket.socket, kind: str) -> LineAddress:
    """Where it listens: its port, too, where any free one was asked for."""
    name = end.getsockname()
    return LineAddress(kind=kind, at=name if isinstance(name, str) else (name[0], name[1]))
