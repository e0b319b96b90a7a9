"""What the gateway counts, and the line it logs for each request."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mesh_llm.frozen import frozen
from mesh_llm.gateway.answer_writer import AnswerWriter
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.slot_queue import SlotQueue

# The version in which the engine writes its own series, too.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

access = logging.getLogger("mesh_llm.access")

CLIENT_GONE = "client_gone"
BROKEN = "broken"
_PATH_SHOWN = 200
_FIRST_TOKENS_KEPT = 1000
"""Until somebody asks for them."""
_ID_SHOWN = 100

# Paths are the caller's to choose, labels live as long as the process: only known ones become labels.
_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/models",
        "/v1/health",
        "/chat/completions",
        "/completion",
        "/completions",
        "/infill",
        "/embedding",
        "/embeddings",
        "/rerank",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/models",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/tags",
        "/api/show",
        "/api/ps",
        "/api/version",
        "/props",
        "/slots",
        "/health",
        "/metrics",
        "/",
    }
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PAUSE_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def route(path: str) -> str:
    return path if path in _ROUTES else "other"


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request and its answer, as they go along."""

    method: str
    path: str
    request_id: str = ""
    """What the client calls it, for its own logs."""
    started_s: float = field(default_factory=time.monotonic)
    received_bytes: int = 0
    own_answer_bytes: int = 0
    """Of an answer that is not the engine's."""
    own_answer_s: float = 0.0
    answer_writer: AnswerWriter | None = None
    """The way to the client, once the head of the engine's answer is on it."""
    last_words: Callable[[ApiError], bytes] | None = None
    """How a text under way tells the client that it broke off."""
    first_event_s: float = 0.0
    """When the first event of a text was told, by the monotonic clock."""
    prompt_tokens: int | None = None
    """That were computed for it, and not found in a cache; None where the engine does not say."""
    engine: str = ""
    """The url of the one that answers it."""
    first_noticed: bool = False
    """By those who look at answers under way."""
    events: int = 0
    resumed: int = 0
    """How often another engine went on with it."""
    lost_s: float = 0.0
    """When an engine was lost, as long as none has said anything since, by the monotonic clock."""
    pauses_s: list[float] = field(default_factory=list)
    """From a loss to what the next engine said."""
    headers: dict[str, str] = field(default_factory=dict)
    """Ours, on whatever is answered."""
    served_by: str = ""
    """The other node whose engine was asked last; empty for the engine here."""
    key: str = ""
    """The name of the API key that asks, where usage is counted by key."""
    prompt_total: int | None = None
    """Tokens of the prompt, cached ones included, as soon as the engine tells them."""
    completion_tokens: int | None = None
    """Of the whole answer; None while it is under way, or where the engine did not get to say it."""
    outcome: str = ""
    """Set where the status does not say how it ended: the client left, or the answer broke off."""

    def lost(self) -> None:
        self.lost_s = self.lost_s or time.monotonic()

    def found_again(self) -> None:
        self.pauses_s.append(time.monotonic() - self.lost_s)
        self.lost_s = 0.0

    def answered(self, body: bytes) -> None:
        """With a body of our own."""
        if self.method != "HEAD":
            self.own_answer_bytes = len(body)
            self.own_answer_s = time.monotonic()

    def tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer, so far."""
        answer = self.events if self.completion_tokens is None else self.completion_tokens
        return self.prompt_total or 0, answer

    @property
    def sent_bytes(self) -> int:
        return self.own_answer_bytes if self.answer_writer is None else self.answer_writer.sent_bytes

    @property
    def first_byte_s(self) -> float | None:
        """From the beginning to the first byte of the answer's body."""
        if not self.sent_bytes:
            return None
        at_s = self.own_answer_s if self.answer_writer is None else self.answer_writer.first_sent_s
        return at_s - self.started_s


@frozen
class FirstToken:
    """What a client waited for the first token of an answer, its turn and the prompt included."""

    engine: str
    seconds: float
    prompt_tokens: int | None


class Meters:
    def __init__(self) -> None:
        # A registry of our own: two gateways in one process must not share their numbers.
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mesh_llm_gateway_requests",
            "Requests answered, by route and by status or other outcome.",
            ("route", "status"),
            registry=self._registry,
        )
        self._guests = Counter(
            "mesh_llm_gateway_guest_requests",
            "Requests of other nodes' gateways to the engine here, by status or other outcome.",
            ("status",),
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "mesh_llm_gateway_in_flight", "Requests in progress.", registry=self._registry
        )
        self._first_byte = Histogram(
            "mesh_llm_gateway_first_byte_seconds",
            "Time from a request's headers to the first byte of its answer's body.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first_token = Histogram(
            "mesh_llm_gateway_first_token_seconds",
            "Time to first token: from a request's headers to the first event of its text, queue included.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._token = Histogram(
            "mesh_llm_gateway_token_seconds",
            "Time between two events of a text, the mean of each answer.",
            ("route",),
            buckets=_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "mesh_llm_gateway_token_events",
            "Events of texts sent to clients, or put together for them; mostly one for each token.",
            registry=self._registry,
        )
        self._resumed = Counter(
            "mesh_llm_gateway_resumed",
            "Times that another engine resumed a request.",
            registry=self._registry,
        )
        self._pause = Histogram(
            "mesh_llm_gateway_resume_pause_seconds",
            "Pause of a resumed text: from the loss of an engine to the next event, from another one.",
            buckets=_PAUSE_SECONDS,
            registry=self._registry,
        )
        directions = Counter(
            "mesh_llm_gateway_bytes",
            "Bytes of request bodies from clients (in) and of answers to them (out).",
            ("direction",),
            registry=self._registry,
        )
        self._of_keys = tuple(
            Counter(f"mesh_llm_key_{name}", text, ("key",), registry=self._registry)
            for name, text in (
                ("requests", "Requests by API key, since the node was started."),
                ("prompt_tokens", "Tokens of prompts by API key, cached ones included."),
                ("completion_tokens", "Tokens of answers by API key."),
            )
        )
        self._bytes_in, self._bytes_out = directions.labels("in"), directions.labels("out")
        # Looking a series up by its labels takes longer than counting in it.
        self._requests_of = lru_cache(self._requests.labels)
        self._guests_of = lru_cache(self._guests.labels)
        self._first_byte_of = lru_cache(self._first_byte.labels)
        self._first_token_of = lru_cache(self._first_token.labels)
        self._token_of = lru_cache(self._token.labels)
        self._under_way: set[Exchange] = set()
        self._first_tokens_s: deque[float] = deque(maxlen=_FIRST_TOKENS_KEPT)
        self._last_first: FirstToken | None = None

    def count_guest(self, status: str) -> None:
        """A request of another node's gateway has ended; its client is that one's to count."""
        self._guests_of(status).inc()

    def watch_queues(self, slot_queues: Callable[[], Iterable[SlotQueue]]) -> None:
        """Tell of the queues in front of the engines here, whichever node their requests come from."""
        gauge = Gauge(
            "mesh_llm_gateway_queue_waiting", "Requests that wait for a slot.", registry=self._registry
        )
        gauge.set_function(lambda: sum(queue.waiting for queue in slot_queues()))
        gauge = Gauge("mesh_llm_gateway_slots_taken", "Slots of engines in use.", registry=self._registry)
        gauge.set_function(lambda: sum(queue.taken for queue in slot_queues()))
        self.on_wait = Histogram(
            "mesh_llm_gateway_queue_seconds",
            "Time that requests waited for a slot of an engine on this node.",
            buckets=_SECONDS,
            registry=self._registry,
        ).observe

    def begin(self, request: web.BaseRequest) -> Exchange:
        self._in_flight.inc()
        request_id = request.headers.get("X-Request-Id", "")
        exchange = Exchange(method=request.method, path=request.rel_url.raw_path, request_id=request_id)
        self._under_way.add(exchange)
        return exchange

    def finish(self, exchange: Exchange, *, status: int) -> None:
        end = exchange.outcome or str(status)
        label = route(exchange.path)
        self._in_flight.dec()
        self._notice_first(exchange)
        self._under_way.discard(exchange)
        self._requests_of(label, end).inc()
        self._bytes_in.inc(exchange.received_bytes)
        self._bytes_out.inc(exchange.sent_bytes)
        if exchange.first_byte_s is not None:
            self._first_byte_of(label).observe(exchange.first_byte_s)
        self._resumed.inc(exchange.resumed)
        for pause_s in exchange.pauses_s:
            self._pause.observe(pause_s)
        if exchange.events:
            self._count_text(label, exchange)
        if exchange.key:
            for counter, count in zip(self._of_keys, (1, *exchange.tokens()), strict=True):
                counter.labels(exchange.key).inc(count)
        if access.isEnabledFor(logging.INFO):
            _write_line(exchange, end)

    def _count_text(self, label: str, exchange: Exchange) -> None:
        self._first_token_of(label).observe(exchange.first_event_s - exchange.started_s)
        if exchange.events > 1:
            lasted_s = time.monotonic() - exchange.first_event_s
            self._token_of(label).observe(lasted_s / (exchange.events - 1))
        self._tokens.inc(exchange.events)

    def take_first_tokens_s(self) -> list[float]:
        """What requests waited for their first token, of those that have got it since this was last asked."""
        self._notice_all()
        taken = list(self._first_tokens_s)
        self._first_tokens_s.clear()
        return taken

    def last_first_token(self) -> FirstToken | None:
        """Of the last request that has got one."""
        self._notice_all()
        return self._last_first

    def _notice_all(self) -> None:
        for exchange in sorted(self._under_way, key=lambda each: each.first_event_s):
            self._notice_first(exchange)

    def _notice_first(self, exchange: Exchange) -> None:
        # Looked for now and then: telling of each first token as it comes would cost every token a question.
        if exchange.first_event_s and not exchange.first_noticed:
            exchange.first_noticed = True
            waited_s = exchange.first_event_s - exchange.started_s
            self._first_tokens_s.append(waited_s)
            self._last_first = FirstToken(
                engine=exchange.engine, seconds=waited_s, prompt_tokens=exchange.prompt_tokens
            )

    def text(self) -> bytes:
        return generate_latest(self._registry)


def _write_line(exchange: Exchange, end: str) -> None:
    """One line for each request: neither keys nor what was asked or answered."""
    first_s = exchange.first_byte_s
    fields = {
        "method": exchange.method,
        # No query: people put keys there.
        "path": _plain(exchange.path, _PATH_SHOWN),
        "status": end,
        "bytes": exchange.sent_bytes,
        "seconds": round(time.monotonic() - exchange.started_s, 3),
        "first_byte_seconds": round(first_s, 3) if first_s is not None else None,
        "request_id": _plain(exchange.request_id, _ID_SHOWN) or None,
        "resumed": exchange.resumed,
        "served_by": _plain(exchange.served_by, _ID_SHOWN) or None,
        "key": exchange.key or None,
    }
    text = "%(method)s %(path)s %(status)s %(bytes)d %(seconds).3f"
    if first_s is not None:
        text += " first_byte=%(first_byte_seconds).3f"
    if exchange.request_id:
        text += " id=%(request_id)s"
    if exchange.resumed:
        text += " resumed=%(resumed)d"
    if exchange.served_by:
        text += " served_by=%(served_by)s"
    if exchange.key:
        text += " key=%(key)s"
    access.info(text, fields, extra={"fields": fields})


def _plain(text: str, most: int) -> str:
    """A log line is one line of plain text, whatever a client sends."""
    return "".join(letter if " " < letter <= "~" else "?" for letter in text[:most])
