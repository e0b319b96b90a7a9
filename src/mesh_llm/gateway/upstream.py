"""What the gateway asks of the node behind it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Protocol

from mesh_llm.frozen import frozen
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.types import State


@frozen
class SlotRequest:
    """What a request that needs one of the engine's slots waits for."""

    client: str
    """On whose behalf."""
    account: str = ""
    """Which other node asks; empty for this node's own clients."""
    name: str = ""
    """Which of that client's own: it divides its turns between them."""
    resumed: bool = False
    """Its answer has begun already: it goes before all others."""
    within_s: float | None = None
    """What is left of its time; None where the queue's own bound will do."""


class OpenConnection(Protocol):
    """Makes a connection to an engine on another node. Raises `OSError`.

    One with a `turn` carries one request, which waits for it at the engine.
    """

    def __call__(self, turn: SlotRequest | None = None, /) -> Awaitable[socket.socket]: ...


class LaneChoice(Protocol):
    """Several engines of one plan."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Of those that take requests."""

    def take(self, upstream: Upstream, request: bytes) -> AbstractContextManager[Upstream]:
        """The one for a request that computes, for the length of the block."""


@frozen
class Upstream:
    """Where the engine listens right now."""

    url: str
    """`http://127.0.0.1:PORT`, without a path."""
    key: str = field(default="", repr=False)
    """The engine's own random key; never the client's, and never in a log. It stays on the engine's node:
    empty for an engine elsewhere."""
    served_by: str = field(default="", compare=False)
    """The name of the node on which it runs."""
    connect: OpenConnection | None = field(default=None, repr=False, compare=False)
    """To an engine on another node; that one's url is only a name."""
    predict: int | None = field(default=None, compare=False)
    """Tokens of an answer, at most, where its request sets no limit."""
    lanes: LaneChoice | None = field(default=None, repr=False, compare=False)
    """Where it is one of several on this node; what needs no slot is asked of this one."""

    @property
    def authority(self) -> str:
        """`127.0.0.1:PORT`."""
        return self.url.partition("//")[2]


@frozen
class Health:
    state: State
    reason: str
    """A sentence for people; empty when serving."""
    model: str | None


@frozen
class EngineLoss:
    sentence: str
    """Why an engine broke off."""
    by_node: bool = False
    """A node of its plan is gone, and not only an engine or a worker: no request does that."""


class ModelServing(Protocol):
    """One of the models that the node's API answers with."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it is called: first the name under which it is served."""

    def upstream(self) -> Upstream | None:
        """Where to send a request now; None while there is nothing to serve with."""

    def health(self) -> Health:
        """Of the node, as far as this model goes."""

    async def engine_failure(self, upstream: Upstream) -> EngineLoss:
        """Why `upstream` broke off, within some two seconds of its doing so."""


class Serving(Protocol):
    """The node, as far as the gateway knows it."""

    def models(self) -> Sequence[ModelServing]:
        """All that are served, or to be served, the default one first; never none."""

    def engine(self, epoch: int) -> Upstream | None:
        """The engine of this node that serves the plan of that number; None where it does not."""

    def slot_queue(self, upstream: Upstream) -> SlotQueue | None:
        """In front of an engine of this node; None where the engine's own queue will do."""

    def slot_queues(self) -> Sequence[SlotQueue]: ...

    def metrics(self, engine: bytes) -> bytes:
        """The node's series, in Prometheus' text format; `engine`: those that the upstream gave just now."""

    def remark(self, kind: str, text: str) -> None:
        """Something that people who watch the node may want to read."""
