"""Split engines in tests: one configuration at a time, many questions to each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from mesh_llm.engine.inspect import read_gguf
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.engine.worker_process import WorkerProcess, lend
from mesh_llm.lab.delay import OPEN
from mesh_llm.lab.split import SplitEngine, SplitPlan, link_neighbours, split_engine
from mesh_llm.models.facts import model_facts
from tests.support.waiting import POLL_S, Patience

ANSWER_S = 60.0
"""For one request: minutes of what any of them takes on a busy machine."""
TOP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was chosen, and how close the choices were: bit by bit, as the engine computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    truncated: bool
    cached: int
    """Tokens of the prompt that were not computed again."""


class Client:
    """Asks one engine."""

    def __init__(self, engine: SplitEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.session = session

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and document, whatever they are."""
        async with (
            asyncio.timeout(ANSWER_S),
            self.session.post(f"{self.engine.url}{path}", json=body) as reply,
        ):
            return reply.status, await reply.json()

    async def events(self, prompt: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer, until the stream ends."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "return_tokens": True} | options
        async with (
            asyncio.timeout(ANSWER_S),
            self.session.post(f"{self.engine.url}/completion", json=body) as reply,
        ):
            async for line in reply.content:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    async def complete(self, prompt: Any, **options: Any) -> Answer:
        (answer,) = await self.complete_all([prompt], **options)
        return answer

    async def complete_all(self, prompts: Sequence[Any], **options: Any) -> list[Answer]:
        """All at once, as one request: they share batches in the same way each time."""
        body = {"prompt": list(prompts), "temperature": 0, "n_probs": TOP, "return_tokens": True} | options
        status, document = await self.post("/completion", body)
        assert status == 200, document
        documents = document if isinstance(document, list) else [document]
        return [_answer(entry) for entry in documents]


def _answer(document: dict[str, Any]) -> Answer:
    return Answer(
        tokens=tuple(document["tokens"]),
        logprobs=tuple(
            tuple((top["id"], top["logprob"]) for top in place["top_logprobs"])
            # None for tokens that are no whole character yet when the answer ends.
            for place in document.get("completion_probabilities", ())
        ),
        truncated=document["truncated"],
        cached=document["timings"]["cache_n"],
    )


async def plan_for(model: Path | Sequence[Path], libraries: dict[str, Path], **fields: Any) -> SplitPlan:
    """An unsplit engine over a model, to be varied with `replace`; small and quick."""
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh could not be built")
    first = model if isinstance(model, Path) else model[0]
    facts = model_facts(await read_gguf(first))
    small: dict[str, Any] = {"context": 512, "workers": (), "poison": True}
    return SplitPlan(facts=facts, libraries=libraries, **(small | fields))


def over(plan: SplitPlan, *layers: int, **fields: Any) -> SplitPlan:
    """The same plan with so many layers on each worker, the rest on the host."""
    return replace(plan, workers=layers, **fields)


@asynccontextmanager
async def client(plan: SplitPlan, workers: Sequence[WorkerProcess] = ()) -> AsyncIterator[Client]:
    """An engine for the length of the block, alone or split; nothing of it is left afterwards."""
    async with split_engine(plan, workers) as engine:
        headers = {"Authorization": f"Bearer {engine.key}"}
        started = [engine.supervisor.report.pid]
        started += [worker.child.pid for worker in engine.workers if worker not in workers]
        # A connection of its own for each request: the engine closes them after an error.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            yield Client(engine, session)
    left = [pid for pid in started if pid is not None and psutil.pid_exists(pid)]
    assert left == [], "left running"


@asynccontextmanager
async def lenders(*specs: WorkerSpec) -> AsyncIterator[list[WorkerProcess]]:
    """Workers, each linked to the next, that outlive the engines over them."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(lend(spec)) for spec in specs]
        await link_neighbours(workers, link=OPEN, lines=[])
        yield workers
    assert not [worker.child.pid for worker in workers if psutil.pid_exists(worker.child.pid)]


async def until(condition: Callable[[], object], *, within_s: float, what: str) -> None:
    """Wait for `condition` while children are being listened to."""
    patience = Patience(within_s)
    while True:
        # Seen before the condition: after a pause of this machine it is looked at once more.
        is_late = patience.is_over
        if condition():
            return
        assert not is_late, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


def token_ids(count: int, *, seed: int = 0) -> list[int]:
    """A prompt of exactly so many tokens, none of them special, none like its neighbours."""
    return [3 + (seed * 101 + index * 37 + index * index * 11) % 500 for index in range(count)]
