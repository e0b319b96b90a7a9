"""What the gateway asks of the node behind it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

from mesh_llm.types import State


class Connect(Protocol):
    """Makes a connection to an engine on another node. Raises `OSError`.

    One for a `client` carries one request, which waits for its turn at the engine and has it until
    the connection ends. `resumed`: its answer has begun already, and it goes before all others.
    """

    def __call__(self, *, client: str | None = None, resumed: bool = False) -> Awaitable[socket.socket]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Where the engine listens right now."""

    url: str
    """`http://127.0.0.1:PORT`, without a path."""
    key: str = field(repr=False)
    """The engine's own random key; never the client's, and never in a log."""
    served_by: str = field(default="", compare=False)
    """The name of the node on which it runs."""
    connect: Connect | None = field(default=None, repr=False, compare=False)
    """To an engine on another node; that one's url is only a name."""

    @property
    def authority(self) -> str:
        """`127.0.0.1:PORT`."""
        return self.url.partition("//")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    state: State
    reason: str
    """A sentence for people; empty when serving."""
    model: str | None


class Serving(Protocol):
    """The node, as far as the gateway knows it."""

    def upstream(self) -> Upstream | None:
        """Where to send a request now; None while there is nothing to serve with."""

    def health(self) -> Health: ...

    def metrics(self, engine: bytes) -> bytes:
        """The node's series, in Prometheus' text format; `engine`: those that the upstream gave just now."""

    def remark(self, kind: str, text: str) -> None:
        """Something that people who watch the node may want to read."""

    async def engine_failure(self, upstream: Upstream) -> str:
        """The sentence why `upstream` broke off, within some two seconds of its doing so."""
