"""Sides of a comparison: how each is set up, asked in turns, and held against the engine alone."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mesh_llm.bench import rigs
from mesh_llm.bench.client import Client, TimedAnswer, client
from mesh_llm.bench.company import quiet
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.engine import build
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import MeshError
from mesh_llm.lab.split import SplitPlan
from mesh_llm.models.facts import model_facts
from mesh_llm.types import Setting

LOCAL = "local"
CONTEXT = 4096
SHORT = 64
"""Tokens of a prompt whose prefill is not what is measured."""
_TEXT = (
    "The keeper of the lighthouse wrote in her book every evening: the wind, the height of the water, "
    "which ships had passed and what they carried. On the fourteenth day a boat came without a name. "
)

Seen = dict[str, list[TimedAnswer]]


async def base_plan(model: Path) -> SplitPlan:
    """The engine alone, one thread; variations of it are what is measured."""
    # The one thing that a bench builds: nobody but this one uses it.
    built = await build.ensure((*build.STANDARD, "rpc"), lambda _: None)
    for error in built.missing.values():
        raise error
    return await plan_alone(model, built.libraries)


async def plan_alone(model: Path, libraries: dict[str, Path]) -> SplitPlan:
    facts = model_facts(await read_gguf(model))
    settings: dict[str, Setting] = {"n_ctx_checkpoints": 0}
    return SplitPlan(facts=facts, libraries=libraries, workers=(), context=CONTEXT, settings=settings)


@contextmanager
def passive_threads() -> Iterator[None]:
    """For every child of every side: waiting threads sleep, where many would spin on few cores."""
    name = "OMP_WAIT_POLICY"
    before = os.environ.get(name)
    os.environ[name] = "passive"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One side of a comparison, to be started."""

    plan: SplitPlan
    stock: bool = False
    only_compute: bool = False
    """Of stock: only commands that compute take their time on a link."""

    def start(self) -> AbstractAsyncContextManager[Rig]:
        return rigs.stock(self.plan, only_compute=self.only_compute) if self.stock else rigs.ours(self.plan)


def over(base: SplitPlan, workers: int, *, stock: bool = False, delay_s: float = 0.0) -> Setup:
    """All layers on so many workers, as evenly as they go."""
    return Setup(
        plan=replace(base, workers=shares(len(base.facts.layers), workers), delay_s=delay_s), stock=stock
    )


def shares(layers: int, workers: int) -> tuple[int, ...]:
    """The later ones take what is left over."""
    least, more = divmod(layers, workers)
    return tuple(least + (index >= workers - more) for index in range(workers))


@asynccontextmanager
async def running(setups: dict[str, Setup]) -> AsyncIterator[tuple[dict[str, Rig], Client]]:
    async with AsyncExitStack() as stack:
        started = {name: await stack.enter_async_context(setup.start()) for name, setup in setups.items()}
        yield started, await stack.enter_async_context(client())


async def tokens(asker: Client, rig: Rig, count: int) -> list[int]:
    """Exactly so many, as numbers."""
    answer = await asker.ask(rig.server, "/tokenize", {"content": _TEXT * (count // 30 + 1)})
    found: list[int] = answer.document["tokens"][:count]
    if len(found) < count:
        raise MeshError(f"the bench's text has only {len(found)} tokens")
    return found


async def complete(
    asker: Client, rig: Rig, prompt: list[int], decoded: int, *, cache: bool = False
) -> TimedAnswer:
    body = {
        "prompt": prompt,
        "n_predict": decoded,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": cache,
    }
    return await asker.ask(rig.server, "/completion", body)


async def ask_in_turns(
    asker: Client, sides: dict[str, Rig], prompt: list[int], decoded: int, rounds: Rounds
) -> Seen:
    """Every side once unmeasured, which also lays out its weights, then round by round."""
    seen: Seen = defaultdict(list)
    for rig in sides.values():
        await complete(asker, rig, prompt[:SHORT], 4)
    for number in rounds:
        for name, rig in turns(list(sides.items()), number):
            await quiet()
            seen[name].append(await complete(asker, rig, prompt, decoded))
    return seen


def agreement(seen: Seen) -> str:
    """Ours have to say what the engine alone says; whether stock does is told."""
    expected = {answer.document["content"] for answer in seen[LOCAL]}
    if len(expected) != 1:
        raise MeshError("the engine alone said different things at temperature 0")
    same = {name: {answer.document["content"] for answer in seen[name]} == expected for name in seen}
    wrong = [name for name, equal in same.items() if not equal and not name.startswith("stock")]
    if wrong:
        raise MeshError(f"at temperature 0 {', '.join(wrong)} said something else than the engine alone")
    other = [name for name, equal in same.items() if not equal]
    return "texts at temperature 0: equal in every round" + (f", but for {', '.join(other)}" if other else "")


def decode_speed(answer: TimedAnswer) -> float:
    return float(answer.timings["predicted_per_second"])


def decode_ms(answer: TimedAnswer) -> float:
    return float(answer.timings["predicted_per_token_ms"])


def prefill_speed(answer: TimedAnswer) -> float:
    return float(answer.timings["prompt_per_second"])
