"""Whole nodes on the hosts of `tests.support.namespaces`: each host counts as a machine of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tests.support.command import MESH_LLM, Running
from tests.support.namespaces import Host
from tests.support.node import SKY, SMALL, WAIT_S, NodeProcess, temporary_home

T = TypeVar("T")

SOON_S = 60.0
"""For what takes a few seconds on a quiet machine."""
SERVE_S = 150.0
"""For a plan to serve: one that does not come up is given up after a minute, and the next one tried."""
RELAY_PORT = 3340
RELAY_TOKEN = {"MESH_LLM_RELAY_TOKEN": "across-the-nats"}

MESH_OPTIONS, SMALL_NODE = SMALL[:4], SMALL[4:]
"""Those that the mesh's creator sets, and those of each node."""
FREE = {"MESH_LLM_BIND_IP": "", "MESH_LLM_NO_RELAY": "1"}
"""On every interface: packets go as far as the network that was built, which has no way out."""
RELAYED = {"MESH_LLM_NO_RELAY": ""}

_NETWORK = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def built(network: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """A network, for a test that waits for processes and so needs no loop of its own."""
    with asyncio.Runner() as runner:
        value = runner.run(_enter(network))
        try:
            yield value
        finally:
            runner.run(_leave(network))


async def _enter(network: AbstractAsyncContextManager[T]) -> T:
    return await network.__aenter__()


async def _leave(network: AbstractAsyncContextManager[Any]) -> None:
    await network.__aexit__(None, None, None)


def do(work: Coroutine[Any, Any, T]) -> T:
    """One change to a network."""
    return asyncio.run(work)


def within(host: Host, work: Callable[[], T]) -> T:
    """`work` as a thread on `host` does it: the sockets that it makes belong there."""
    done: list[T] = []
    failed: list[BaseException] = []

    def enter_and_work() -> None:
        try:
            with Path("/run/netns", host.namespace).open() as namespace:
                if _libc.setns(namespace.fileno(), _NETWORK) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=enter_and_work, name=f"on {host.namespace}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


class HostNode(NodeProcess):
    """`mesh-llm` on a host of a network."""

    def __init__(
        self,
        *arguments: str | Path,
        host: Host,
        home: Path,
        model: Path | str | None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str | Path] = MESH_LLM,
    ) -> None:
        self.host = host
        super().__init__(
            *SMALL_NODE,
            *arguments,
            home=home,
            model=model,
            env={**FREE, **(env or {})},
            around=host.command,
            program=program,
        )

    def __enter__(self) -> HostNode:
        return self

    def connect(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        where = (parts.hostname, parts.port)
        connection = HTTPConnection(parts.netloc, timeout=WAIT_S)
        connection.sock = within(self.host, lambda: socket.create_connection(where, timeout=WAIT_S))
        return connection

    # -- what it says --------------------------------------------------------------------------

    def token(self) -> str:
        self.until_said("Invite token: ", within_s=SOON_S)
        return next(
            line.removeprefix("Invite token: ").strip()
            for line in self.stdout.splitlines()
            if line.startswith("Invite token: ")
        )

    def until_status(
        self, condition: Callable[[dict[str, Any]], object], *, what: str, within_s: float = SOON_S
    ) -> dict[str, Any]:
        """The first status for which `condition` holds."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            document = self.status_or_none()
            if document is None:
                return False
            seen.clear()
            seen.update(document)
            return bool(condition(document))

        try:
            self.until(holds, what=what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- status\n{seen}\n--- log\n{self.logs()[-6000:]}") from None
        return dict(seen)

    def sky(self) -> str:
        """Its answer to one question, which is the same wherever it is computed."""
        reply = self.ask("/v1/chat/completions", SKY)
        assert reply.status == 200, reply.body
        text = reply.json()["choices"][0]["message"]["content"]
        assert isinstance(text, str)
        return text

    def until_sky(self, text: str, *, within_s: float = SOON_S) -> None:
        """Until its answer is `text`; errors in between are told to clients, who ask again."""

        def answers() -> bool:
            reply = self.ask("/v1/chat/completions", SKY)
            assert reply.status in (200, 502, 503), reply.body
            return reply.status == 200 and reply.json()["choices"][0]["message"]["content"] == text

        self.until(answers, what="it answers", within_s=within_s)


class Lab:
    """Networks and the nodes on them; what was made last goes first."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._networks = ExitStack()
        self._running = ExitStack()
        self._nodes: list[HostNode] = []

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *failure: Any) -> None:
        with self._networks:
            self._end(*failure)

    def end(self) -> None:
        """All nodes."""
        self._end(None, None, None)

    def _end(self, *failure: Any) -> None:
        # All at once: one after the other, each would hand its work over to those that are left.
        for node in self._nodes:
            if node.running:
                node.signal(signal.SIGTERM)
        self._nodes.clear()
        self._running.__exit__(*failure)

    def build(self, network: AbstractAsyncContextManager[T]) -> T:
        return self._networks.enter_context(built(network))

    def found(
        self, name: str, host: Host, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> HostNode:
        """The first node of a mesh."""
        return self.start(name, host, *MESH_OPTIONS, *arguments, env=env)

    def join(
        self, name: str, host: Host, token: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> HostNode:
        return self.start(name, host, "--join", token, *arguments, env=env)

    def start(
        self, name: str, host: Host, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> HostNode:
        home = self._running.enter_context(temporary_home())
        return self.run(
            HostNode("--name", name, *arguments, host=host, home=home, model=self._model, env=env)
        )

    def run(self, node: HostNode) -> HostNode:
        """One that a test has made itself; it ends with the others."""
        self._nodes.append(node)
        self._running.enter_context(node)
        return node


def link_to(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Of a status: the way from its node to `name`; empty while it knows none."""
    return next((dict(n["link"]) for n in document["mesh"]["nodes"] if n["name"] == name), {})


def names(document: dict[str, Any]) -> list[str]:
    return sorted(node["name"] for node in document["mesh"]["nodes"])


def measured(node: HostNode, name: str, kind: str, *, within_s: float = SOON_S) -> dict[str, Any]:
    """The link to `name`, once its delay is known and it is of this kind."""

    def is_measured(document: dict[str, Any]) -> bool:
        link = link_to(document, name)
        return link.get("kind") == kind and link["rtt_ms"] is not None

    document = node.until_status(is_measured, what=f"a measured {kind} link to {name}", within_s=within_s)
    return link_to(document, name)


def stage_links(document: dict[str, Any]) -> dict[str, str]:
    """How the host is linked to each worker."""
    by_id = {node["id"]: node["name"] for node in document["mesh"]["nodes"]}
    return {by_id[stage["node"]]: stage["link"] for stage in document["engine"]["stages"]}


def stage_names(document: dict[str, Any]) -> list[str]:
    """The nodes that compute, in the order of the layers; empty while none serves."""
    by_id = {node["id"]: node["name"] for node in document["mesh"]["nodes"]}
    plan = document["plan"]
    return [by_id.get(stage["node"], "?") for stage in plan["stages"]] if plan else []


def serves(document: dict[str, Any], *computing: str) -> bool:
    """Whether a plan of exactly these nodes serves, in whatever order."""
    ready = document["node"]["state"] == "serving" and document["engine"]["state"] == "ready"
    return ready and sorted(stage_names(document)) == sorted(computing)


def all_serve(nodes: list[HostNode], *computing: str, within_s: float = SERVE_S) -> list[dict[str, Any]]:
    """Until they all agree on a plan of exactly these nodes; what each of them says of it."""
    try:
        documents = [
            node.until_status(
                lambda document: serves(document, *computing),
                what=f"a plan of {', '.join(computing)} serves",
                within_s=within_s,
            )
            for node in nodes
        ]
    except AssertionError as error:
        # It may be another node's to bring the plan up.
        logs = "\n".join(f"--- {node.home.name}\n{node.logs()[-4000:]}" for node in nodes)
        raise AssertionError(f"{error}\n{logs}") from None
    epochs = {document["plan"]["epoch"] for document in documents}
    return documents if len(epochs) == 1 else all_serve(nodes, *computing, within_s=within_s)


@contextmanager
def relay_on(host: Host) -> Iterator[str]:
    """`mesh-llm relay` on a host; its URL."""
    argv = host.command([*MESH_LLM, "relay", "--listen", f"{host.address}:{RELAY_PORT}"])
    url = f"http://{host.address}:{RELAY_PORT}"
    with Running(argv, env=RELAY_TOKEN) as relay:
        relay.until_said(f"Relay: {url}", within_s=SOON_S)
        yield url
