"""The console's port: who gets in, what is sent, and what one who does not read costs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import pytest

from mesh_llm import same_user
from mesh_llm.console import event_feed as feeding
from mesh_llm.console import server as serving
from mesh_llm.console.event_feed import CONSOLE_TICK_S, Feed
from mesh_llm.console.routes import Managed
from mesh_llm.console.server import Console
from mesh_llm.defaults import CONSOLE_BODY_LIMIT_BYTES
from mesh_llm.gateway import ports
from mesh_llm.same_user import is_foreign, is_of_another_user
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event, Progress, Role
from tests.support.raw_http import connect

PAGE = "X-Mesh-LLM-Page"
WAIT_S = 20.0


@dataclass(slots=True, kw_only=True)
class FakeManaged:
    """What the routes ask of the node."""

    document: dict[str, Any] = field(default_factory=lambda: {"node": {"name": "desk"}, "epoch": 1})
    looks: int = 0
    stopped: list[bool] = field(default_factory=list)
    invited: list[tuple[Role, float | None, int | None]] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    fault: Exception | None = None
    """What goes wrong where a key is to be added."""

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        return dict(self.document)

    def stop(self, leave: bool) -> None:
        self.stopped.append(leave)

    def pause(self) -> dict[str, Any]:
        self.asked.append("pause")
        return {"paused": "its user paused it"}

    def resume(self) -> dict[str, Any]:
        self.asked.append("resume")
        return {"paused": ""}

    def unload(self) -> None:
        self.asked.append("unload")

    def load(self) -> None:
        self.asked.append("load")

    async def plan(self, wishes: dict[str, Any]) -> dict[str, Any]:
        return {"wishes": wishes}

    def snapshot(self) -> dict[str, Any]:
        return {}

    def network(self) -> dict[str, Any]:
        return {}

    def invite(self, role: Role, lifetime_s: float | None, limit: int | None = None) -> dict[str, Any]:
        self.invited.append((role, lifetime_s, limit))
        return {"id": "1", "token": "mesh1-secret"}

    def invites(self) -> dict[str, Any]:
        return {"invites": []}

    async def load_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    def unload_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    def use_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    def keys(self) -> dict[str, Any]:
        return {"keys": []}

    def add_key(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.fault is not None:
            raise self.fault
        return asked

    def revoke_key(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    async def share(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    async def stop_sharing(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    async def measure(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"asked": asked}

    async def pair(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"open": True, **asked}

    def pairing(self) -> dict[str, Any]:
        return {"open": False}

    def answer_pairing(self, asked: dict[str, Any]) -> dict[str, Any]:
        return asked

    async def end_pairing(self) -> dict[str, Any]:
        return {"open": False}

    def revoke(self, id: str) -> dict[str, Any]:
        self.revoked.append(id)
        return {"revoked": id}

    def promote(self, name: str) -> dict[str, Any]:
        self.promoted.append(name)
        return {"name": name}


@dataclass(slots=True, kw_only=True)
class Bench:
    """A console, the node that it shows, and a browser."""

    node: FakeManaged
    feed: Feed
    port: int
    session: aiohttp.ClientSession
    token: str | None = None

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    async def get(self, path: str, **headers: str) -> aiohttp.ClientResponse:
        return await self.ask("GET", path, **headers)

    async def ask(
        self, method: str, path: str, *, data: Any = None, **headers: str
    ) -> aiohttp.ClientResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.session.request(method, self.url + path, data=data, headers=named)
        await answer.read()
        return answer

    async def call(self, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any]:
        """As the page does."""
        if self.token is None:
            self.token = (await (await self.get("/api/session")).json())["token"]
        data = None if body is None else json.dumps(body)
        answer = await self.ask(method, path, data=data, X_Mesh_LLM_Page=str(self.token))
        return answer.status, await answer.json()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Callable[[], Awaitable[tuple[str, Any]]]]:
        """The next event of the stream: its kind and its data; comments are passed over."""
        async with self.session.get(f"{self.url}/api/events") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"

            async def following() -> tuple[str, Any]:
                async with asyncio.timeout(WAIT_S):
                    while True:
                        text = (await answer.content.readuntil(b"\n\n")).decode()
                        if text.startswith("event: "):
                            kind, data = text.rstrip("\n").split("\n")
                            return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))
                        assert text == ":\n\n"

            yield following


Open = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def open_console() -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def start(*, api_key: str | None = None) -> Bench:
            node = FakeManaged()
            feed = Feed(node.status)
            managed = Managed(**{each.name: getattr(node, each.name) for each in fields(Managed)})
            console = Console(managed, feed, api_key=api_key)
            taken = ports.bind("127.0.0.1", 0, option="--console")
            port: int = taken.getsockname()[1]
            running = asyncio.create_task(feed.run(), name="feed")
            stack.push_async_callback(cancelled, running)
            await console.start(taken)
            stack.push_async_callback(console.stop)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Bench(node=node, feed=feed, port=port, session=session)

        yield start


@pytest.fixture
async def console(open_console: Open) -> Bench:
    return await open_console()


# -- who gets in --------------------------------------------------------------------------------

ROUTES = ("/", "/index.html", "/api/status", "/api/events", "/api/session", "/api/invites")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        ["Host: evil.example"],
        ["Host: localhost.evil.example"],
        ["Host: 127.0.0.1.evil.example:3131"],
        ["Host: 192.168.1.4:3131"],
        ["Host: localhost", "Host: evil.example"],
        ["Host: localhost:3131", "Origin: http://evil.example"],
        ["Host: localhost:3131", "Origin: null"],
        ["Host: localhost:3131", "Origin: https://localhost:3131"],
        # A page of another program on this machine.
        ["Host: localhost:3131", "Origin: http://localhost:3000"],
        ["Host: localhost:3131", "Origin: http://localhost"],
        ["Host: localhost:3131", "Sec-Fetch-Site: cross-site"],
        ["Host: localhost:3131", "Sec-Fetch-Site: same-site"],
    ],
)
async def test_strangers_are_refused(console: Bench, path: str, headers: list[str]) -> None:
    async with connect(console.port) as client:
        answer = await client.request("GET", path, *headers)
    assert answer.status in (400, 403), answer.body
    assert b"desk" not in answer.body
    assert b"token" not in answer.body
    assert console.node.looks == 0


async def test_a_request_without_a_host_is_refused(console: Bench) -> None:
    async with connect(console.port) as client:
        await client.send(b"GET /api/status HTTP/1.0\r\n\r\n")
        answer = await client.answer()
    assert answer.status == 403


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "LOCALHOST", "[::1]"])
async def test_loopback_names_are_ours(console: Bench, name: str) -> None:
    origin = f"Origin: http://{name}:3131"
    async with connect(console.port) as client:
        answer = await client.request(
            "GET", "/api/status", f"Host: {name}:3131", origin, "Sec-Fetch-Site: same-origin"
        )
    assert (answer.status, answer.json()["node"]) == (200, {"name": "desk"})


async def test_a_link_to_the_page_may_be_followed(console: Bench) -> None:
    visit = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert (await console.get("/", **visit)).status == 200
    assert (await console.get("/api/status", **visit)).status == 403
    assert (await console.get("/", **{**visit, "Sec_Fetch_Dest": "iframe"})).status == 403


async def test_one_connection_too_many_is_closed(console: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CONSOLE_CONNECTIONS", 2)
    async with connect(console.port) as one, connect(console.port) as two:
        assert [(await each.request("GET", "/")).status for each in (one, two)] == [200, 200]
        async with connect(console.port) as third:
            assert await third.end() == b""
        assert (await one.request("GET", "/")).status == 200
    async with asyncio.timeout(WAIT_S):
        # Until the server has noticed that they are gone.
        while True:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                async with connect(console.port) as again:
                    assert (await again.request("GET", "/")).status == 200
                    return


# -- the page's token ---------------------------------------------------------------------------

CALLS = ("stop", "leave", "unload", "load", "invite", "revoke", "promote", "plan", "measure")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [None, "", "wrong", "é"])
async def test_management_needs_the_pages_token(console: Bench, call: str, token: str | None) -> None:
    headers = {} if token is None else {"X_Mesh_LLM_Page": token}
    answer = await console.ask("POST", f"/api/{call}", data="{}", **headers)
    assert answer.status == 403
    assert (await answer.json())["error"] == "this needs the page's token"
    assert (console.node.stopped, console.node.invited, console.node.revoked) == ([], [], [])
    assert console.node.promoted == []


async def test_what_shows_secrets_or_plans_needs_it_as_well(console: Bench) -> None:
    for path in ("/api/invites", "/api/plan", "/api/nothing"):
        assert (await console.get(path)).status == 403, path


async def test_the_page_may_manage(console: Bench) -> None:
    assert await console.call("/api/invite", {"role": "client", "lifetime_s": 60}) == (
        200,
        {"id": "1", "token": "mesh1-secret"},
    )
    assert (await console.call("/api/invite", {"role": "owner", "uses": 1}))[0] == 200
    assert await console.call("/api/invites", method="GET") == (200, {"invites": []})
    assert await console.call("/api/revoke", {"id": "1"}) == (200, {"revoked": "1"})
    assert await console.call("/api/promote", {"name": "two"}) == (200, {"name": "two"})
    assert await console.call("/api/plan", {"split": True}) == (200, {"wishes": {"split": True}})
    assert await console.call("/api/unload") == (200, {"unloading": True})
    assert await console.call("/api/load") == (200, {"loading": True})
    assert console.node.asked == ["unload", "load"]
    assert await console.call("/api/leave") == (200, {"leaving": True, "pid": os.getpid()})
    assert await console.call("/api/stop") == (
        200,
        {"stopping": True, "pid": os.getpid(), "parent_pid": os.getppid()},
    )
    assert console.node.invited == [(Role.CLIENT, 60, None), (Role.OWNER, None, 1)]
    assert (console.node.revoked, console.node.promoted) == (["1"], ["two"])
    assert console.node.stopped == [True, False]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("[", "a request body must be a JSON object"),
        ("[]", "a request body must be a JSON object"),
        ("[" * 10_000, "a request body must be a JSON object"),
        ('{"role": "king"}', "an invite must be for an owner, a node or a client"),
        ('{"role": ["node"]}', "an invite must be for an owner, a node or a client"),
        ('{"lifetime_s": "long"}', "an invite must last at least a second and at most ten years"),
        ('{"lifetime_s": true}', "an invite must last at least a second and at most ten years"),
        ('{"lifetime_s": NaN}', "an invite must last at least a second and at most ten years"),
        *(
            (f'{{"uses": {uses}}}', "an invite can be limited to 1 to 1000000 uses")
            for uses in ("0", "-1", "1.5", "true", '"2"', "1000001")
        ),
        (" " * (CONSOLE_BODY_LIMIT_BYTES + 1), "a request body must not be larger than 64 KiB"),
    ],
)
async def test_calls_that_make_no_sense(console: Bench, body: str, sentence: str) -> None:
    await console.call("/api/invites", method="GET")
    answer = await console.ask("POST", "/api/invite", data=body, X_Mesh_LLM_Page=str(console.token))
    assert (answer.status, (await answer.json())["error"]) == (400, sentence)
    assert console.node.invited == []


async def test_a_full_disk_is_told_in_a_sentence(console: Bench) -> None:
    console.node.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/me/keys.json")
    assert await console.call("/api/add-key", {"name": "guest"}) == (
        409,
        {
            "error": "/home/me/keys.json: No space left on device",
            "hint": "make room (df -h shows where), then try again",
        },
    )


async def test_agents_are_told_what_to_type(console: Bench) -> None:
    """As soon as there is something to talk to; a key is named, and never shown."""
    console.node.document |= {"api": {"url": None, "key_needed": True}, "model": None}
    assert await console.call("/api/agents", method="GET") == (
        409,
        {"error": "this node has no API or no model yet", "hint": "try again in a moment"},
    )
    console.node.document["api"]["url"] = "http://127.0.0.1:9337"
    console.node.document["model"] = {"name": "my model", "context": 4096}
    status, document = await console.call("/api/agents", method="GET")
    assert status == 200
    agents = {agent["name"]: agent for agent in document["agents"]}
    coding = ["pi", "goose", "aider", "opencode", "claude", "continue", "zed"]
    assert list(agents) == [*coding, "open-webui", "llm", "curl", "openai"]
    assert agents["pi"]["command"] == "pi --provider mesh --model 'my model'"
    assert agents["goose"]["command"] == (
        "GOOSE_PROVIDER=openai OPENAI_HOST=http://localhost:9337 "
        "OPENAI_API_KEY=\"$MESH_LLM_API_KEY\" GOOSE_MODEL='my model' goose session"
    )
    assert all("my model" in agent["command"] + agent["snippet"] for agent in agents.values())
    assert (await console.get("/api/agents")).status == 403


async def test_each_start_has_another_token(open_console: Open) -> None:
    one, two = await open_console(), await open_console()
    tokens = [await (await each.get("/api/session")).json() for each in (one, two)]
    assert tokens[0]["token"] != tokens[1]["token"]
    assert tokens[0]["api_key_needed"] is False
    assert len(tokens[0]["token"]) >= 32


async def test_with_an_api_key_the_page_has_to_know_it(open_console: Open) -> None:
    console = await open_console(api_key="sk-1")
    first = await console.get("/api/session")
    assert (first.status, await first.json()) == (200, {"token": None, "api_key_needed": True})
    for wrong in ("Bearer sk-2", "Basic sk-1", "Bearer sk-", "Bearer  "):
        refused = await console.get("/api/session", Authorization=wrong)
        assert (await refused.json()).get("token") is None, wrong
    right = await console.get("/api/session", Authorization="Bearer sk-1")
    document = await right.json()
    assert document["api_key_needed"] is True
    stop = await console.ask("POST", "/api/stop", X_Mesh_LLM_Page=document["token"])
    assert (stop.status, console.node.stopped) == (200, [False])


ROW = "{}: 0100007F:{} 0100007F:{} {} 00000000:00000000 00:00000000 00000000 {} 0 {} 1"
HERE = ("127.0.0.1", 0x0C3B)


def test_other_users_of_the_machine_are_told_apart() -> None:
    """127.0.0.1:4000 is a socket of ours, :4001 of root, :4002 of somebody else; :4003 is nobody's."""
    own, stranger = os.getuid(), os.getuid() + 1
    lines = [
        ROW.format(index, f"{4000 + index:04X}", "0C3B", "01", uid, 1)
        for index, uid in enumerate((own, 0, stranger))
    ]
    found = [is_foreign(("127.0.0.1", port), HERE, lines) for port in (4000, 4001, 4002, 4003)]
    assert found == [False, False, True, True]


def test_where_nothing_tells_users_apart_all_are_one() -> None:
    assert not is_foreign(("127.0.0.1", 4000), HERE, [])


@pytest.mark.parametrize("state", ["04", "05", "06"])
def test_a_socket_that_is_closed_is_not_roots(state: str) -> None:
    """The system says so of one that waits for the other side's end."""
    assert is_foreign(("127.0.0.1", 4000), HERE, [ROW.format(0, "0FA0", "0C3B", state, 0, 0)])


def test_a_port_that_is_used_twice_belongs_to_whoever_called() -> None:
    """Its other connection, to another place, is old and nobody's, or our user's own."""
    others = [
        ROW.format(0, "0FA0", "2479", "06", 0, 0),
        ROW.format(1, "0FA0", "247A", "01", os.getuid(), 1),
    ]
    lines = [*others, ROW.format(2, "0FA0", "0C3B", "01", os.getuid() + 1, 1)]
    assert is_foreign(("127.0.0.1", 4000), HERE, lines)


@pytest.mark.parametrize(
    ("listens", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::ffff:127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
async def test_whoever_calls_is_found_in_the_systems_tables(
    listens: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()

    async with called(listens, address) as (caller, transport):
        assert not is_of_another_user(transport)
        caller.shutdown(socket.SHUT_WR)
        assert not is_of_another_user(transport), "it still reads"
        with monkeypatch.context() as patched:
            patched.setattr(same_user, "_ROOT", -1)
            patched.setattr(os, "getuid", lambda: user + 1)
            assert is_of_another_user(transport)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_whoever_has_closed_is_a_stranger(address: str) -> None:
    async with called(address, address) as (caller, transport):
        caller.close()
        assert is_of_another_user(transport)
    assert is_of_another_user(None)


@asynccontextmanager
async def called(listens: str, address: str) -> AsyncIterator[tuple[socket.socket, asyncio.BaseTransport]]:
    """Who calls, and the other end."""
    came = asyncio.get_running_loop().create_future()
    taken = ports.bind(listens, 0)
    server = await asyncio.start_server(lambda _, writer: came.set_result(writer), sock=taken)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    async with server:
        with socket.socket(family) as caller:
            caller.connect((address, taken.getsockname()[1]))
            writer = await came
            yield caller, writer.transport
        writer.close()


# -- the page -----------------------------------------------------------------------------------


async def test_every_answer_carries_the_policy(console: Bench) -> None:
    for path in ("/", "/api/status", "/api/session", "/nothing.js", "/api/stop"):
        headers = (await console.get(path)).headers
        assert headers["Content-Security-Policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        ), path
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Server"] == "mesh-llm"
        assert "Access-Control-Allow-Origin" not in headers


async def test_the_page_is_sent_once(console: Bench) -> None:
    first = await console.get("/")
    assert first.headers["Content-Type"] == "text/html; charset=utf-8"
    assert first.headers["Cache-Control"] == "no-cache"
    assert (await console.get("/index.html")).headers["ETag"] == first.headers["ETag"]
    again = await console.get("/", If_None_Match=first.headers["ETag"])
    assert (again.status, await again.read()) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/../routes.py",
        "/%2e%2e/routes.py",
        "/..%2froutes.py",
        "/%2e%2e%2froutes.py",
        "//etc/passwd",
        "/.hidden.js",
        "/a/../../routes.py",
        "/index.html%00.js",
        "/index",
        "/" + "a/" * 50 + "a.js",
    ],
)
async def test_nothing_else_is_sent(console: Bench, path: str) -> None:
    async with connect(console.port) as client:
        answer = await client.request("GET", path)
    assert answer.status == 404
    assert answer.json()["error"]


async def test_no_other_method(console: Bench) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = await console.ask(method, "/")
        assert answer.status in (404, 405)
        assert "Access-Control-Allow-Origin" not in answer.headers


# -- events -------------------------------------------------------------------------------------

SAMPLE = {"t": 1.0, "tok_s": 20.5, "active": 1}


async def test_a_stream_begins_with_all_there_is(console: Bench) -> None:
    console.feed.event(Event(kind="elected", text="Elected as host"))
    console.feed.sample(SAMPLE)
    console.feed.progress(Progress(what="Loading", done=1, total=4, unit="bytes"))
    console.feed.progress(Progress(what="Building", done=2, total=2))
    async with console.watch() as following:
        kind, snapshot = await following()
    assert kind == "snapshot"
    assert snapshot["status"] == {"node": {"name": "desk"}, "epoch": 1}
    assert snapshot["history"] == {"interval_s": 2, "samples": [SAMPLE]}
    assert [(event["kind"], event["text"]) for event in snapshot["events"]] == [
        ("elected", "Elected as host")
    ]
    assert snapshot["events"][0]["t"] > 1_700_000_000
    # What is finished is progress no more.
    assert snapshot["progress"] == [{"what": "Loading", "done": 1, "total": 4, "unit": "bytes"}]


async def test_news_follow_as_they_come(console: Bench) -> None:
    async with console.watch() as following:
        assert (await following())[0] == "snapshot"
        console.feed.event(Event(kind="lost", text="mini was lost\nand a line"))
        console.feed.sample(SAMPLE)
        console.feed.progress(Progress(what="Loading", done=4, total=4, unit="bytes"))
        kind, event = await following()
        assert (kind, event["kind"], event["text"]) == ("event", "lost", "mini was lost\nand a line")
        assert await following() == ("sample", SAMPLE)
        finished = {"what": "Loading", "done": 4, "total": 4, "unit": "bytes"}
        assert await following() == ("progress", finished)
        console.node.document["epoch"] = 2
        assert await following() == ("status", {"node": {"name": "desk"}, "epoch": 2})


async def test_a_status_that_has_not_changed_is_not_sent_again(console: Bench) -> None:
    async with console.watch() as following:
        await following()
        looks = console.node.looks
        async with asyncio.timeout(WAIT_S):
            while console.node.looks < looks + 2:
                await asyncio.sleep(0.01)
        console.feed.sample(SAMPLE)
        assert (await following())[0] == "sample"


async def test_one_look_is_enough_for_all(console: Bench) -> None:
    began_s = time.monotonic()

    def looks_at_most() -> float:
        """The first one, and another after each tick, which may come a tenth early."""
        return 1 + (time.monotonic() - began_s) / (0.9 * CONSOLE_TICK_S)

    async with AsyncExitStack() as stack:
        watching = [await stack.enter_async_context(console.watch()) for _ in range(20)]
        snapshots = [await following() for following in watching]
        assert {kind for kind, _ in snapshots} == {"snapshot"}
        assert console.node.looks <= looks_at_most()
        for epoch in (2, 3):
            console.node.document["epoch"] = epoch
            news = [await following() for following in watching]
            assert news == [("status", {"node": {"name": "desk"}, "epoch": epoch})] * 20
        assert console.node.looks <= looks_at_most()


async def test_a_page_that_opens_takes_no_news_from_the_others(
    console: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "CONSOLE_TICK_S", 0.5)
    async with console.watch() as first:
        assert (await first())[0] == "snapshot"
        console.node.document["epoch"] = 2
        assert (await first())[1]["epoch"] == 2
        # Late enough for the second page to look for itself, and before the next tick.
        await asyncio.sleep(0.47)
        console.node.document["epoch"] = 3
        async with console.watch() as second:
            assert (await second())[0] == "snapshot"
            assert (await first())[1]["epoch"] == 3


async def test_nobody_looks_where_nobody_watches(console: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "CONSOLE_TICK_S", 0.01)
    async with console.watch() as following:
        await following()
    async with asyncio.timeout(WAIT_S):
        while console.feed.watchers:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    looks = console.node.looks
    await asyncio.sleep(0.2)
    assert console.node.looks == looks


async def test_there_are_only_so_many_seats(console: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "CONSOLE_WATCHERS", 2)
    async with console.watch() as one, console.watch() as two:
        await one()
        await two()
        refused = await console.get("/api/events")
        assert refused.status == 503
        assert await refused.json() == {
            "error": "2 pages watch this node already",
            "hint": "close some of them",
        }
    async with asyncio.timeout(WAIT_S):
        while console.feed.watchers:
            await asyncio.sleep(0.01)
    async with console.watch() as again:
        assert (await again())[0] == "snapshot"


async def test_a_stream_in_which_nothing_happens_gives_signs_of_life(
    console: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "CONSOLE_BEAT_S", 0.05)
    async with console.session.get(f"{console.url}/api/events") as answer, asyncio.timeout(WAIT_S):
        assert await answer.content.readuntil(b"\n\n") == b":\n\n"
        assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: snapshot\n")
        assert await answer.content.readuntil(b"\n\n") == b":\n\n"


@pytest.mark.parametrize(("most_bytes", "most_s"), [(1 << 20, WAIT_S), (1 << 30, 0.0)])
async def test_one_who_does_not_read_is_dropped(
    console: Bench, monkeypatch: pytest.MonkeyPatch, most_bytes: int, most_s: float
) -> None:
    """Who is behind by too much, or for too long."""
    monkeypatch.setattr(feeding, "CONSOLE_BEHIND_BYTES", most_bytes)
    monkeypatch.setattr(feeding, "CONSOLE_BEHIND_S", most_s)
    async with connect(console.port) as sleeper, console.watch() as reader:
        await sleeper.send(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader()
        async with asyncio.timeout(WAIT_S):
            while console.feed.watchers < 2:
                await asyncio.sleep(0.01)
            # First the system's own buffers fill.
            while console.feed.watchers == 2:
                console.feed.event(Event(kind="model", text="x" * 200_000))
                assert (await reader())[0] == "event"
        # Whoever reads has missed nothing, and goes on.
        console.feed.sample(SAMPLE)
        assert await reader() == ("sample", SAMPLE)


async def test_the_stream_ends_with_the_node(console: Bench) -> None:
    async with console.session.get(f"{console.url}/api/events") as answer, asyncio.timeout(WAIT_S):
        await answer.content.readuntil(b"\n\n")
        console.feed.ended.set()
        await answer.read()
    assert console.feed.watchers == 0


async def test_what_is_kept_is_bounded(console: Bench) -> None:
    for index in range(1000):
        console.feed.event(Event(kind="lost", text=str(index)))
        console.feed.sample({"t": float(index)})
        console.feed.progress(Progress(what=str(index), done=0, total=1))
    async with console.watch() as following:
        _, snapshot = await following()
    assert [event["text"] for event in snapshot["events"]] == [str(index) for index in range(900, 1000)]
    assert [sample["t"] for sample in snapshot["history"]["samples"]] == [*map(float, range(700, 1000))]
    assert [step["what"] for step in snapshot["progress"]] == [*map(str, range(984, 1000))]


# -- pictures -----------------------------------------------------------------------------------


async def test_a_qr_code_is_drawn(console: Bench) -> None:
    status, document = await console.call("/api/qr", {"text": "mesh1-token"})
    assert status == 200
    assert document["picture"].startswith("data:image/svg+xml")
    assert (await console.call("/api/qr", {"text": "a" * 2953}))[0] == 200
    status, document = await console.call("/api/qr", {"text": "a" * 2954})
    assert (status, document["error"]) == (400, "a QR code takes at most 2,953 characters")
