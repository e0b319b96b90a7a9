"""What the gateway asks of the node behind it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from typing import Protocol

from mesh_llm.frozen import frozen
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.types import Plan, State


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
class EngineLoad:
    """What an engine has to do, and how fast it is, as its host tells."""

    taken: int = 0
    waiting: int = 0
    slots: int = 1
    turn_s: float = 5.0
    """That a turn takes."""
    tok_s: float = 10.0
    """For one answer alone, as predicted."""
    prompt_tok_s: float = 100.0

    @classmethod
    def of(cls, plan: Plan, *, taken: int, waiting: int, turn_s: float) -> EngineLoad:
        load = cls(taken=taken, waiting=waiting, slots=max(1, plan.slots), turn_s=turn_s)
        if (predicted := plan.predicted) is None or min(predicted.tok_s, predicted.prompt_tok_s) <= 0:
            return load
        return replace(load, tok_s=predicted.tok_s, prompt_tok_s=predicted.prompt_tok_s)


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
    load: EngineLoad | None = field(default=None, compare=False)
    """As last heard; None where nobody has said."""
    lost_node: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    """Whether a node of its plan is gone since: a request ends engines and workers, but no node."""

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
    loads: bool = False
    """A model on demand: it is loaded when somebody waits for it, and worth waiting for."""


@frozen
class ModelDetails:
    """What is known of a model, loaded or not."""

    context: int | None = None
    """Tokens of one request; None where only loading it tells."""
    takes: tuple[str, ...] = ("text",)
    gives: tuple[str, ...] = ("text",)
    on_demand: bool = False
    seed: int | None = None
    """Of requests that bring none."""


class ModelServing(Protocol):
    """One of the models that the node's API answers with."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it is called: first the name under which it is served."""

    def upstreams(self) -> Sequence[Upstream]:
        """Where a request may be sent now, this node's own engine first; none while nothing serves."""

    def upstream(self) -> Upstream | None:
        """The first of them."""

    async def look(self, digests: Sequence[str]) -> Mapping[str, str]:
        """Ask hosts elsewhere how busy they are; which of these beginnings of a prompt each knows, by url."""

    def health(self) -> Health:
        """Of the node, as far as this model goes."""

    def details(self) -> ModelDetails: ...

    def want(self) -> None:
        """A client waits for it now: one that is loaded on demand is loaded."""

    async def engine_failure(self, upstream: Upstream) -> str:
        """The sentence why `upstream` broke off, within some two seconds of its doing so."""


class Serving(Protocol):
    """The node, as far as the gateway knows it."""

    def models(self) -> Sequence[ModelServing]:
        """All that are served, or to be served, the default one first; never none."""

    def engine(self, epoch: int) -> Upstream | None:
        """The engine of this node that serves the plan of that number; None where it does not."""

    def slot_queue(self, upstream: Upstream) -> SlotQueue | None:
        """In front of an engine of this node; None where the engine's own queue will do."""

    def slot_queues(self) -> Sequence[SlotQueue]: ...

    async def load(self, name: str) -> None:
        """Load a model that is at hand, or that an owner's node finds by that name. Raises `MeshError`."""

    async def unload(self, name: str) -> None:
        """Let it go from memory; it stays at hand. Raises `MeshError`."""

    def metrics(self, engine: bytes) -> bytes:
        """The node's series, in Prometheus' text format; `engine`: those that the upstream gave just now."""

    def remark(self, kind: str, text: str) -> None:
        """Something that people who watch the node may want to read."""
