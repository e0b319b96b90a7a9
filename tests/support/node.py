"""A node as a real process, and what its clients can ask of it."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil

from tests.support.command import MESH_LLM, Running, mesh_llm
from tests.support.waiting import STRETCH

SMALL = ("--ctx-size", "2048", "--parallel", "1", "--threads", "1")
"""Starts fast, and leaves a core to the test."""
WAIT_S = 60.0
"""For anything that a node does, on a machine that is busy with something else: seconds otherwise."""
STATUS_S = 30.0
"""For its status, which takes half a second at most on a quiet machine."""
SKY = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "temperature": 0,
    "max_tokens": 24,
}
ENDLESS: dict[str, Any] = {
    "prompt": "1 2 3 4 5 6 7",
    "temperature": 0,
    "max_tokens": 100_000,
    "ignore_eos": True,
    "stream": True,
}
"""Goes on until somebody stops it, or the context is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Stream:
    """An event stream as its client sees it."""

    def __init__(self, response: HTTPResponse) -> None:
        self.response = response

    def data(self) -> Iterator[str]:
        """What follows each `data:`; ends with the stream, broken off or not."""
        while line := self.response.readline():
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").decode().strip()

    def next(self) -> str:
        return next(self.data())


@contextmanager
def temporary_home() -> Iterator[Path]:
    """Short, not pytest's own tmp_path: a unix socket's path ends at 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="mesh-", dir="/tmp") as folder:
        yield Path(folder)


class NodeProcess(Running):
    """`mesh-llm` without a verb, on a home and a port of its own."""

    def __init__(
        self,
        *arguments: str | Path,
        home: Path,
        model: Path | str | None,
        env: Mapping[str, str] | None = None,
        around: Callable[[Sequence[str | Path]], Sequence[str | Path]] = list,
        program: Sequence[str | Path] = MESH_LLM,
    ) -> None:
        """`model`: None for one that joins. `around`: makes the command line one that runs it elsewhere."""
        self.home = home
        argv = [*program, "--home", home, "--port", "0", *arguments]
        if model is not None:
            argv += ["--model", model]
        super().__init__(around(argv), env=env)

    def __enter__(self) -> NodeProcess:
        return self

    def until_ready(self, *, within_s: float = WAIT_S) -> Self:
        self.until_said("API ready at ", within_s=within_s)
        return self

    def until_state(self, state: str, *, within_s: float = WAIT_S) -> dict[str, Any]:
        """The first status with that state: the next one may have another."""
        seen: list[dict[str, Any]] = []

        def has_come() -> bool:
            document = self.status_or_none()
            if document is not None:
                seen.append(document)
            return document is not None and document["node"]["state"] == state

        self.until(has_come, what=f"its state is {state}", within_s=within_s)
        return seen[-1]

    @property
    def url(self) -> str:
        """As `status` gives it: the printed one says localhost."""
        if not hasattr(self, "_url"):
            self._url = str(self.status()["api"]["url"])
        return self._url

    def status(self) -> dict[str, Any]:
        document = self.status_or_none()
        assert document is not None, "the node does not answer"
        return document

    def status_or_none(self) -> dict[str, Any] | None:
        return status_of(self.home)

    def stop(self) -> None:
        ended = mesh_llm("stop", "--home", self.home)
        assert ended.status == 0, ended.stderr

    def engine(self) -> psutil.Process:
        """As soon as there is one: a node whose model is loading may be about to start it."""
        pids: list[int | None] = []

        def is_started() -> bool:
            pids.append(self.status()["engine"]["pid"])
            return pids[-1] is not None

        self.until(is_started, what="it has an engine")
        return psutil.Process(pids[-1])

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted((self.home / "logs").iterdir()))

    def connect(self) -> HTTPConnection:
        return HTTPConnection(urlsplit(self.url).netloc, timeout=STRETCH * WAIT_S)

    def ask(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Reply:
        with closing(self.connect()) as connection:
            return ask(connection, path, body, headers=headers)

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Stream]:
        with closing(self.connect()) as connection:
            send(connection, path, body)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            with response:
                yield Stream(response)


def status_of(home: Path) -> dict[str, Any] | None:
    """From the control socket, as `mesh-llm status --json` reads it: without its half second."""
    connection = HTTPConnection("node", timeout=STRETCH * STATUS_S)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closing(connection):
        try:
            connection.sock.settimeout(STRETCH * STATUS_S)
            connection.sock.connect(str(home / "run" / "control.sock"))
            connection.request("GET", "/api/status")
            document = json.loads(connection.getresponse().read())
        except (FileNotFoundError, ConnectionError):
            return None
    assert isinstance(document, dict)
    return document


def send(
    connection: HTTPConnection, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
) -> None:
    if body is None:
        connection.request("GET", path, headers=dict(headers or {}))
        return
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})


def ask(
    connection: HTTPConnection, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
) -> Reply:
    send(connection, path, body, headers=headers)
    response = connection.getresponse()
    return Reply(status=response.status, headers=dict(response.getheaders()), body=response.read())
