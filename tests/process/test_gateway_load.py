"""Sixty-four clients at once, many of whom leave before they are answered: nothing is lost, nothing leaks.

Half of them ask the host, half a lite client of its mesh: both stand in the same queue.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from mesh_llm.gateway.slot_queue import GATEWAY_QUEUE_PER_CLIENT
from tests.support.joining import JoiningNode, Lab, lab, write_model
from tests.support.node import WAIT_S

CLIENTS = 64
OVER = 5
"""Requests more than may wait."""
SLOTS = 4
PATIENCE_S = 200.0
"""Of those who wait for their answer: it takes seconds where nothing else wants the machine."""
LEAVE = 0.3
"""Of the requests are given up, at any point of their way."""
RSS_GROWTH_BYTES = 24 << 20
"""Allocators keep some of what a crowd needed; a leaked request would hold on to 64 KB or more."""
FDS_GROWTH = 4
"""A connection that is kept for the next request, on either side."""


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Client:
    """Asks one thing after the other, on one connection as long as that lasts."""

    def __init__(self, number: int, url: str, tally: Tally, *, seed: int) -> None:
        self._url = url
        self._tally = tally
        self._dice = random.Random(f"{seed} {number}")

    async def run(self, requests: int, *, at_most_s: float) -> None:
        end_s = time.monotonic() + at_most_s
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            while requests and time.monotonic() < end_s:
                requests -= 1
                self._tally.outcomes["asked"] += 1
                self._tally.outcomes[await self._one(session)] += 1

    async def _one(self, session: aiohttp.ClientSession) -> str:
        dice = self._dice
        path = dice.choice(("/v1/chat/completions", "/v1/completions", "/completion"))
        tokens = dice.randint(1, 24)
        body = _body(path, tokens, stream=dice.random() < 0.6, salt=dice.randrange(1000))
        # Some leave while they wait, some in the middle of their answer, some never.
        patience_s = dice.uniform(0, 1.0) if dice.random() < LEAVE else PATIENCE_S
        try:
            async with asyncio.timeout(patience_s):
                return await self._ask(session, path, body, tokens)
        except TimeoutError:
            if patience_s > 1.0:
                self._tally.wrong.append(f"{path} was not answered within {patience_s:g} s")
            return "left"

    async def _ask(self, session: aiohttp.ClientSession, path: str, body: Any, tokens: int) -> str:
        while True:
            async with session.post(self._url + path, json=body) as answer:
                text = await answer.text()
            if answer.status == 429:
                assert 1 <= int(answer.headers["Retry-After"]) <= 60
                assert json.loads(text)["error"]["code"] == "queue_full"
                self._tally.outcomes["refused"] += 1
                await asyncio.sleep(self._dice.uniform(0.05, 0.2))
                continue
            if answer.status != 200:
                self._tally.wrong.append(f"{path} {answer.status} {text[:300]}")
            elif (flaw := _flaw(path, text, tokens, stream=body["stream"])) is not None:
                self._tally.wrong.append(f"{path} {flaw}: {text[-300:]}")
            return "answered"


def _body(path: str, tokens: int, *, stream: bool, salt: int) -> dict[str, Any]:
    text = f"{salt} one two three"
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if path == "/completion":
        body["n_predict"] = body.pop("max_tokens")
    elif stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _flaw(path: str, text: str, tokens: int, *, stream: bool) -> str | None:
    """What an answer lacks; None if it is whole."""
    if not stream:
        return _flaw_of_end([json.loads(text)], tokens)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if path != "/completion" and events[-1:] != ["[DONE]"]:
        return "does not end as a stream should"
    return _flaw_of_end([json.loads(event) for event in events if event != "[DONE]"], tokens)


def _flaw_of_end(documents: Sequence[dict[str, Any]], tokens: int) -> str | None:
    if any("error" in document for document in documents):
        return "has an error in it"
    counts = [document["usage"]["completion_tokens"] for document in documents if document.get("usage")]
    counts += [document["tokens_predicted"] for document in documents if document.get("stop") is True]
    return None if counts == [tokens] else f"has {counts} tokens of {tokens}"


@pytest.fixture
def nodes(libraries: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with lab(write_model(tmp_path / "models", layers=getattr(request, "param", 2))) as nodes:
        yield nodes


@pytest.mark.full
def test_crowd(nodes: Lab) -> None:
    """Some two hundred requests: a dozen seconds."""
    _crowd(nodes, requests=3, at_most_s=WAIT_S, seed=11)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_crowd_for_two_minutes(nodes: Lab) -> None:
    _crowd(nodes, requests=100_000, at_most_s=120.0, seed=12)


def _crowd(nodes: Lab, *, requests: int, at_most_s: float, seed: int) -> None:
    host = nodes.start(
        "host", "--model", nodes.model, "--ctx-size", "512", "--parallel", str(SLOTS)
    ).until_ready()
    guest = nodes.start("guest", "--client", "--join", host.token(role="client")).until_ready()
    watched = [psutil.Process(node.pid) for node in (host, guest)]

    asyncio.run(_rush((host, guest), requests=1, at_most_s=WAIT_S, seed=seed + 1000))
    _until_quiet(host, guest)
    before = [_size(process) for process in watched]

    tally = asyncio.run(_rush((host, guest), requests=requests, at_most_s=at_most_s, seed=seed))
    _until_quiet(host, guest)

    assert tally.wrong == []
    asked, answered, left = (tally.outcomes[what] for what in ("asked", "answered", "left"))
    assert asked == answered + left >= CLIENTS
    assert answered >= asked // 2
    assert left > 0
    for node, process, (rss, _) in zip((host, guest), watched, before, strict=True):
        assert _size(process)[0] - rss < RSS_GROWTH_BYTES, f"{node.name} grew from {rss} bytes"
    host.until(
        lambda: all(
            _size(process)[1] <= fds + FDS_GROWTH for process, (_, fds) in zip(watched, before, strict=True)
        ),
        what=f"descriptors are given back; there were {[fds for _, fds in before]}, "
        f"now {[_size(process)[1] for process in watched]}",
        within_s=WAIT_S,
    )
    _all_turns_can_be_had(host, guest)
    assert "Traceback" not in host.logs() + guest.logs()


async def _rush(nodes: Sequence[JoiningNode], *, requests: int, at_most_s: float, seed: int) -> Tally:
    tally = Tally()
    urls = [node.url for node in nodes]
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            client = Client(number, urls[number % len(urls)], tally, seed=seed)
            group.create_task(client.run(requests, at_most_s=at_most_s), name=f"client {number}")
    return tally


def _size(process: psutil.Process) -> tuple[int, int]:
    return process.memory_info().rss, process.num_fds()


def _until_quiet(host: JoiningNode, guest: JoiningNode) -> None:
    """No slot works any more, whichever way one asks."""
    for node in (host, guest):
        node.until(
            lambda: _slots_at_work(node) == [False] * SLOTS,  # noqa: B023
            what="all slots are free",
            within_s=WAIT_S,
        )


def _slots_at_work(node: JoiningNode) -> list[bool] | None:
    """None while it cannot say: one that was taken for dead for a moment has to find its way back first."""
    answer = node.ask("/slots")
    return [slot["is_processing"] for slot in answer.json()] if answer.status == 200 else None


def _all_turns_can_be_had(host: JoiningNode, guest: JoiningNode) -> None:
    """At the same time: none was lost on the way."""
    body = _body("/completion", 400, stream=True, salt=0)
    with (
        host.stream("/completion", body) as one,
        guest.stream("/completion", body) as two,
        host.stream("/completion", body) as three,
        guest.stream("/completion", body) as four,
    ):
        for stream in (one, two, three, four):
            assert stream.next()


@pytest.mark.parametrize("nodes", [30], indirect=True)
def test_full_queue(nodes: Lab) -> None:
    """One request at a time reaches the engine, so many wait, and those beyond are refused at once."""
    host = nodes.start("host", "--model", nodes.model, "--ctx-size", "8192", "--parallel", "1").until_ready()
    guest = nodes.start("guest", "--client", "--join", host.token(role="client")).until_ready()
    for node in (host, guest):
        refused = asyncio.run(_overfill(node.url, host.engine()))
        assert refused == [(429, "queue_full")] * OVER
        # All of them have left: the engine and its queue are free at once.
        for other in (host, guest):
            body = _body("/completion", 3, stream=False, salt=1)
            assert other.ask("/completion", body).json()["tokens_predicted"] == 3


async def _overfill(url: str, engine: psutil.Process) -> list[tuple[int, str]]:
    """What the first ones say who get an answer, while nobody else does."""
    body = _body("/completion", 100_000, stream=True, salt=0) | {"prompt": "1 2 3 4 5 6 7"}
    connector = aiohttp.TCPConnector(limit=0)

    async def ask(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.post(url + "/completion", json=body) as answer:
            return answer.status, (await answer.json())["error"]["code"]

    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(url + "/completion", json=body) as first,
    ):
        assert first.status == 200
        assert await first.content.readline()
        waiting = GATEWAY_QUEUE_PER_CLIENT + OVER
        tasks = {asyncio.create_task(ask(session), name=f"request {n}") for n in range(waiting)}
        refused: set[asyncio.Task[tuple[int, str]]] = set()
        # Or the first answer, which takes some seconds, might end before the queue is full.
        engine.suspend()
        try:
            async with asyncio.timeout(WAIT_S):
                while len(refused) < OVER:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    refused |= done
        finally:
            with suppress(psutil.NoSuchProcess):
                engine.resume()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [task.result() for task in refused]
