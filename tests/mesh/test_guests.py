"""A member that may use the API, and means no good: what it gets at a real host, and what others get."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.transport.invite import decode
from mesh_llm.transport.network import Peer, Stream
from tests.support.joining import TEXT, JoiningNode, lab, write_model
from tests.support.members import mesh_of_members
from tests.support.node import ENDLESS
from tests.support.raw_http import request_bytes
from tests.support.series import Scrape
from tests.support.waiting import until

SOON_S = 15.0
"""For an honest request: a moment on a quiet machine."""
MANY = 6


@pytest.fixture(scope="module")
def one(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoiningNode]:
    with lab(write_model(tmp_path_factory.mktemp("models"))) as nodes:
        yield nodes.create("one", "--ctx-size", "8192")


@asynccontextmanager
async def client_of(one: JoiningNode) -> AsyncIterator[Peer]:
    async with mesh_of_members() as members:
        client = await members.member()
        token = await asyncio.to_thread(one.token, role="client")
        peer, _ = await client.network.join(decode(token))
        yield peer


async def sent(one: JoiningNode, peer: Peer, request: bytes, **header: Any) -> Stream:
    epoch = (await asyncio.to_thread(one.status))["plan"]["epoch"]
    stream = await peer.open("http", {"epoch": epoch, **header})
    await stream.write(request)
    return stream


async def answer_of(stream: Stream, *, within_s: float = SOON_S) -> bytes:
    """Of a request that asks to close the connection."""
    whole = b""
    async with asyncio.timeout(within_s):
        while part := await stream.read(1 << 16):
            whole += part
    return whole


def completion(*headers: str) -> bytes:
    return request_bytes("POST", "/v1/completions", *headers, body=json.dumps(ENDLESS).encode())


async def ask_honestly(one: JoiningNode) -> float:
    """How long it took."""
    began_s = time.monotonic()
    answer = await asyncio.to_thread(one.ask, "/v1/completions", TEXT)
    assert answer.status == 200
    return time.monotonic() - began_s


def taken(one: JoiningNode) -> float:
    return Scrape(one.ask("/metrics").body).value("mesh_llm_gateway_slots_taken")


def until_waiting(one: JoiningNode, count: int) -> None:
    def waiting() -> float:
        return Scrape(one.ask("/metrics").body).value("mesh_llm_gateway_queue_waiting")

    until(lambda: waiting() == count, within_s=SOON_S, what=f"{count} wait for a slot")


async def test_it_learns_no_key_and_no_path(one: JoiningNode) -> None:
    async with client_of(one) as peer:
        epoch = (await asyncio.to_thread(one.status))["plan"]["epoch"]
        serving = await peer.open("serving", {"epoch": epoch})
        document = await serving.read_document(1 << 20)
        assert document["epoch"] == epoch
        assert "key" not in document
        props = await sent(one, peer, request_bytes("GET", "/props", "Connection: close"))
        head, _, body = (await answer_of(props)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body)["model_path"] == json.loads(body)["model_alias"] == "tiny"
        assert b"/tiny.gguf" not in body
        assert one.ask("/props").json()["model_path"] == "tiny"


async def test_silence_keeps_nobody_waiting(one: JoiningNode) -> None:
    half = completion()[:-10]
    async with client_of(one) as peer:
        streams = [await sent(one, peer, begun, client="x") for begun in (b"", b"POST", half) * 3]
        # They are all there when this one is answered.
        listed = await sent(one, peer, request_bytes("GET", "/v1/models", "Connection: close"))
        assert (await answer_of(listed)).startswith(b"HTTP/1.1 ")
        assert await asyncio.to_thread(taken, one) == 0
        assert await ask_honestly(one) < SOON_S
        assert not any(stream.was_reset() for stream in streams)


async def test_without_a_name_it_takes_a_turn_as_others_do(one: JoiningNode) -> None:
    async with client_of(one) as peer:
        stream = await sent(one, peer, completion())
        assert (await stream.read(1 << 16)).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await asyncio.to_thread(taken, one) == 1
        stream.reset()
        assert await ask_honestly(one) < SOON_S


async def test_without_a_name_many_wait_behind_one_of_another(one: JoiningNode) -> None:
    """In the engine's own queue an honest request would wait for all of them."""
    body = json.dumps({**TEXT, "max_tokens": 200}).encode()
    request = request_bytes("POST", "/v1/completions", "Connection: close", body=body)
    async with client_of(one) as peer, asyncio.TaskGroup() as group:
        held = await sent(one, peer, completion())
        assert (await held.read(1 << 16)).startswith(b"HTTP/1.1 200 OK\r\n")
        streams = [await sent(one, peer, request) for _ in range(MANY)]
        await asyncio.to_thread(until_waiting, one, MANY)
        tasks = [group.create_task(answer_of(stream, within_s=2 * SOON_S)) for stream in streams]
        honest = group.create_task(ask_honestly(one))
        await asyncio.to_thread(until_waiting, one, MANY + 1)
        held.reset()
        await honest
        ended = sum(task.done() for task in tasks)
    assert all(task.result().startswith(b"HTTP/1.1 200 ") for task in tasks)
    assert ended <= MANY // 2, f"{ended} of {MANY} went first"


async def test_nothing_is_computed_for_one_who_has_left(one: JoiningNode) -> None:
    """llama-server would go on for a conversation that may be asked for again."""
    async with client_of(one) as peer:
        stream = await sent(one, peer, completion("X-Conversation-Id: mine"), client="x")
        assert (await stream.read(1 << 16)).startswith(b"HTTP/1.1 200 OK\r\n")
        stream.reset()
        await asyncio.to_thread(
            until,
            lambda: not one.ask("/slots").json()[0]["is_processing"],
            within_s=SOON_S,
            what="the slot is free",
        )
        [slot] = one.ask("/slots").json()
        assert slot["next_token"][0]["n_decoded"] < 4000
        lookup = request_bytes("GET", "/v1/stream?conv_id=mine", "Connection: close")
        assert b"not_offered" in await answer_of(await sent(one, peer, lookup))
