"""The frames of stock ggml-rpc, as they pass: which commands, how many bytes, which of them compute.

    request   command (1 byte), size (8 bytes, little-endian), so many bytes
    answer    size (8 bytes), so many bytes; for some commands, in the order of the requests

The commands are those of protocol version 8 (`ggml-rpc.cpp`). A session begins with HELLO, and the answer to
it has the server's version: one whose commands are not known here is refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, field
from typing import Any

from mesh_llm.frozen import frozen

COMMANDS = (
    *("ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "BUFFER_GET_BASE", "FREE_BUFFER", "BUFFER_CLEAR"),
    *("SET_TENSOR", "SET_TENSOR_HASH", "GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE", "GET_DEVICE_MEMORY"),
    *("INIT_TENSOR", "GET_ALLOC_SIZE", "HELLO", "DEVICE_COUNT", "GRAPH_RECOMPUTE", "MEMSET_TENSOR"),
    *("SET_TENSOR_2D", "GET_TENSOR_2D", "COMM_INIT", "COMM_ALLREDUCE", "COMM_FREE"),
)
"""By their numbers."""
UNANSWERED = {
    *("FREE_BUFFER", "BUFFER_CLEAR", "SET_TENSOR", "GRAPH_COMPUTE", "INIT_TENSOR", "GRAPH_RECOMPUTE"),
    *("MEMSET_TENSOR", "SET_TENSOR_2D", "COMM_ALLREDUCE", "COMM_FREE"),
}
COMPUTING = {"GRAPH_COMPUTE", "GRAPH_RECOMPUTE"}
VERSION = 8, 0
_HEAD_BYTES, _SIZE_BYTES = 9, 8
_HELLO_BYTES = 28
"""Version (3 bytes), one of padding, and what both ends could do besides TCP."""
_SESSIONS_KEPT = 64


class RpcRefused(ConnectionError):
    """What was said is not the protocol that this module knows. The tally has the sentence."""


@frozen
class RpcCount:
    """Of one kind of command."""

    commands: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@frozen
class RpcSessionReport:
    """What one connection did, by command."""

    seconds: float
    counts: dict[str, RpcCount] = field(default_factory=dict)
    refused: str | None = None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RpcSessionReport:
        counts = {name: RpcCount(**count) for name, count in fields["counts"].items()}
        return cls(seconds=fields["seconds"], counts=counts, refused=fields["refused"])

    def total(self, names: Collection[str] = COMMANDS) -> RpcCount:
        chosen = [count for name, count in self.counts.items() if name in names]
        return RpcCount(
            commands=sum(count.commands for count in chosen),
            sent_bytes=sum(count.sent_bytes for count in chosen),
            received_bytes=sum(count.received_bytes for count in chosen),
        )


class RpcTally:
    """The sessions through one door; the latest of them are kept."""

    def __init__(self) -> None:
        self._sessions: deque[RpcSession] = deque(maxlen=_SESSIONS_KEPT)

    def begin(self) -> RpcSession:
        session = RpcSession()
        self._sessions.append(session)
        return session

    def to_fields(self) -> list[dict[str, Any]]:
        return [asdict(session.report()) for session in self._sessions]


class RpcSession:
    """One connection. Two threads feed it: one with what the client says, one with the answers."""

    def __init__(self) -> None:
        self._began = self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._refused: str | None = None
        self._requests = _Frames(_HEAD_BYTES, self._on_request, self._on_sent)
        self._answers = _Frames(_SIZE_BYTES, self._on_answer, self._on_received)
        self._awaited: deque[str] = deque()
        """Commands whose answers are still to come."""
        self._hello = bytearray()

    def requests(self, data: memoryview) -> list[tuple[memoryview, bool]]:
        """What the client said, in pieces; of each, whether it belongs to commands that compute."""
        spans: list[tuple[int, int, bool]] = []
        for start, end, name in self._requests.feed(data):
            computes = name in COMPUTING
            if spans and spans[-1][2] == computes:
                start = spans.pop()[0]
            spans.append((start, end, computes))
        return [(data[start:end], computes) for start, end, computes in spans]

    def answers(self, data: memoryview) -> list[tuple[memoryview, bool]]:
        self._answers.feed(data)
        return [(data, False)]

    def report(self) -> RpcSessionReport:
        with self._lock:
            counts = {
                name: RpcCount(commands=count[0], sent_bytes=count[1], received_bytes=count[2])
                for name, count in self._counts.items()
            }
            return RpcSessionReport(seconds=self._heard - self._began, counts=counts, refused=self._refused)

    def _on_request(self, head: bytes) -> str:
        if head[0] >= len(COMMANDS):
            raise self._refuse(f"command {head[0]} is not one of ggml-rpc {VERSION[0]}")
        name = COMMANDS[head[0]]
        if not self._counts and name != "HELLO":
            raise self._refuse("the client did not begin with HELLO: it is too old, or not ggml-rpc")
        if name not in UNANSWERED:
            self._awaited.append(name)
        self._add(name, commands=1, sent_bytes=len(head))
        return name

    def _on_sent(self, name: str, body: memoryview) -> None:
        self._add(name, sent_bytes=len(body))

    def _on_answer(self, head: bytes) -> str:
        if not self._awaited:
            raise self._refuse("the server answered what nobody had asked")
        name = self._awaited.popleft()
        self._add(name, received_bytes=len(head))
        return name

    def _on_received(self, name: str, body: memoryview) -> None:
        self._add(name, received_bytes=len(body))
        if name == "HELLO":
            self._hello += body[:_HELLO_BYTES]
            self._check_hello()

    def _check_hello(self) -> None:
        answer = self._hello
        if len(answer) >= 2 and tuple(answer[:2]) != VERSION:
            raise self._refuse(
                f"the server speaks ggml-rpc {answer[0]}.{answer[1]}, and this line knows "
                f"{VERSION[0]}.{VERSION[1]}"
            )
        if any(answer[4:]):
            raise self._refuse("both ends want RDMA, which goes past this line; set GGML_RPC_NO_RDMA=1")

    def _add(self, name: str, *, commands: int = 0, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        with self._lock:
            count = self._counts.setdefault(name, [0, 0, 0])
            for index, more in enumerate((commands, sent_bytes, received_bytes)):
                count[index] += more
            self._heard = time.monotonic()

    def _refuse(self, sentence: str) -> RpcRefused:
        self._refused = sentence
        return RpcRefused(sentence)


class _Frames:
    """Where frames begin and end in a stream of bytes. Nothing is held back."""

    def __init__(
        self, head_bytes: int, on_head: Callable[[bytes], str], on_body: Callable[[str, memoryview], None]
    ) -> None:
        self._head_bytes = head_bytes
        self._on_head = on_head
        self._on_body = on_body
        self._head = bytearray()
        self._name = ""
        """Of the frame whose body comes."""
        self._left = 0
        """Bytes of that body that are still to come."""

    def feed(self, data: memoryview) -> list[tuple[int, int, str]]:
        """Stretches of the data that belong to one frame, with its name; "" while that is not known."""
        spans = []
        at = 0
        while at < len(data):
            start = at
            if self._left:
                at += min(self._left, len(data) - at)
                self._left -= at - start
                self._on_body(self._name, data[start:at])
            else:
                at += min(self._head_bytes - len(self._head), len(data) - at)
                self._name = self._read_head(data[start:at])
            spans.append((start, at, self._name))
        return spans

    def _read_head(self, part: memoryview) -> str:
        self._head += part
        if len(self._head) < self._head_bytes:
            return ""
        head = bytes(self._head)
        self._head.clear()
        self._left = int.from_bytes(head[-_SIZE_BYTES:], "little")
        return self._on_head(head)
