"""A long prompt of one client beside the tokens of others."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mesh_llm.engine.spec import DraftSpec, PaceSpec
from tests.support.lone_engine import KEY, LoneEngine, lone_engine
from tests.support.node import WAIT_S
from tests.support.waiting import until

SLOTS = 4
PACE = PaceSpec(usual=64 + SLOTS, fewest=16 + SLOTS, seconds=1e-6)
"""No machine reads anything in that time: steps are as short as they may be on all of them."""
PROMPT = random.Random(7).choices(range(1000, 30_000), k=600)
FOUR = {"context": SLOTS * 2048, "slots": SLOTS, "batch": 2048, "micro_batch": 512}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the engine's functions are replaced on Linux"
)


class Stream:
    """An answer without an end, and how many events of it have come."""

    def __init__(self, engine: LoneEngine, prompt: str) -> None:
        self.events = 0
        self._closing = False
        self._connection = HTTPConnection(urlsplit(engine.url).netloc, timeout=WAIT_S)
        body = {"prompt": prompt, "n_predict": 1900, "ignore_eos": True, "stream": True, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        self._connection.request("POST", "/completion", json.dumps(body), headers)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with self._connection.getresponse() as answer:
            assert answer.status == 200
            while not self._closing and (line := answer.readline()):
                self.events += line.startswith(b"data: ")

    def has_begun(self) -> bool:
        return self.events > 3

    def close(self) -> None:
        self._closing = True
        self._reader.join(WAIT_S)
        self._connection.close()


@contextmanager
def streams(engine: LoneEngine, *prompts: str) -> Iterator[list[Stream]]:
    with ExitStack() as stack:
        started = [stack.enter_context(closing(Stream(engine, prompt))) for prompt in prompts]
        for stream in started:
            until(stream.has_begun, within_s=WAIT_S, what="it says something")
        yield started


def reads(engine: LoneEngine, prompt: list[int]) -> None:
    reply = engine.ask("/completion", {"prompt": prompt, "n_predict": 1, "cache_prompt": False})
    assert reply.status == 200, reply.body
    assert reply.json()["timings"]["prompt_n"] == len(prompt)


@pytest.mark.full
def test_others_go_on_while_it_is_read(smollm2: Path, libraries: dict[str, Path]) -> None:
    with (
        lone_engine(smollm2, libraries, changes=FOUR | {"pace": PACE}) as engine,
        streams(engine, "Once upon a time") as (stream,),
    ):
        before = stream.events
        reads(engine, PROMPT)
        meanwhile = stream.events - before

    # One for each step, which are shorter than usual here; left to itself the engine takes all of it in one.
    assert meanwhile >= 2 * len(PROMPT) // PACE.usual


@pytest.mark.full
def test_guesses_of_all_slots_fit_into_a_short_step(smollm2: Path, libraries: dict[str, Path]) -> None:
    """The engine aborts where they do not."""
    changes = FOUR | {"pace": PACE, "draft": DraftSpec(text_depth=32)}
    again = "one two three four five six seven eight nine ten " * 12
    with (
        lone_engine(smollm2, libraries, changes=changes) as engine,
        streams(engine, again, again, again) as running,
    ):
        before = [stream.events for stream in running]
        reads(engine, PROMPT)
        meanwhile = [stream.events - count for stream, count in zip(running, before, strict=True)]

    assert min(meanwhile) >= 2 * len(PROMPT) // PACE.usual
