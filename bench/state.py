"""Saved states of a split model: what of a text is used again, and what a save costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, ratio_row
from bench.stats import at_least, at_most
from mesh_llm.bench.client import Client
from mesh_llm.bench.company import quiet
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.sides import Setup, base_plan, passive_threads, running, shares
from mesh_llm.engine.spec import StatesSpec
from mesh_llm.lab.split import SplitPlan
from mesh_llm.planning.fit import CHECKPOINTS
from mesh_llm.results.samples import Sample
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.split import token_ids

TITLE = "Saved states: a split model against the engine alone, and against the same without them"

ARCHITECTURES = ("llama", "qwen3moe", "gemma3", "gpt-oss", "lfm2", "granitehybrid")
WORKERS, DELAY_S = 2, 0.010
TOKENS, ANSWER = 1500, 30
CONVERSATIONS, SLOTS = 12, 4
ALONE, SPLIT, WITHOUT = "alone", "split", "without"
_STATES = StatesSpec(checkpoints=CHECKPOINTS)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rows: list[Row] = []
    with passive_threads(), servers.fresh_home() as folder:
        model = _synthetic(folder / "synthetic.gguf") if plan.quick else default_model()
        base = await base_plan(model)
        for architecture in ARCHITECTURES:
            rows.append(await _reuse(folder, architecture, plan.choose(6, 3)))
        rows.append(await _conversations(base))
        rounds = plan.rounds(full=30, quick=8, full_s=400.0, quick_s=150.0)
        rows.append(await _cost(base, rounds))
    return tuple(rows), (f"saves: {rounds.note()}", *_NOTES)


def _synthetic(path: Path) -> Path:
    """A quarter of SmolLM2, for a quick run."""
    sizes: Any = {"feed_forward": 2048, "heads": 8, "kv_heads": 4, "head_size": 64}
    return tiny_gguf.write(path, "llama", layers=8, hidden=512, quantisation="Q4_0", **sizes)


async def _reuse(folder: Path, architecture: str, rounds: int) -> Row:
    """Tokens of a second turn that are not computed again, where the answer before it has another end."""
    model = tiny_gguf.write(folder / f"{architecture}.gguf", architecture, layers=6)
    settings: dict[str, Setting] = {"n_ctx_checkpoints": CHECKPOINTS}
    tiny = replace(await base_plan(model), context=2048, settings=settings)
    split = replace(tiny, workers=shares(len(tiny.facts.layers), WORKERS), states=_STATES)
    setups = {ALONE: Setup(plan=tiny), SPLIT: Setup(plan=split)}
    seen: dict[str, list[float]] = {ALONE: [], SPLIT: []}
    async with running(setups) as (sides, asker):
        for number in range(rounds):
            for name, rig in turns(list(sides.items()), number):
                seen[name].append(await _second_turn(asker, rig, seed=number))
    ours, theirs = (_side(name, seen, 1.0, "tokens", digits=0) for name in (SPLIT, ALONE))
    return ratio_row(
        f"reused of {TOKENS + ANSWER + 38} tokens: {architecture}", (ours, theirs), at_least(1.0)
    )


async def _second_turn(asker: Client, rig: Rig, *, seed: int) -> float:
    prompt = token_ids(TOKENS, seed=seed)
    first = await asker.ask(rig.server, "/completion", _body(prompt, ANSWER))
    more = [*prompt, *first.document["tokens"][:-2], *token_ids(40, seed=seed + 7)]
    second = await asker.ask(rig.server, "/completion", _body(more, 2))
    return float(second.timings["cache_n"])


def _body(prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        **more,
    }


def _sides(base: SplitPlan, **fields: Any) -> dict[str, Setup]:
    """The same split engine, without states and with them."""
    split = replace(base, workers=shares(len(base.facts.layers), WORKERS), settings={}, **fields)
    return {WITHOUT: Setup(plan=split), SPLIT: Setup(plan=replace(split, states=_STATES))}


async def _conversations(base: SplitPlan) -> Row:
    """Second turns of more conversations than slots."""
    async with running(_sides(base, slots=SLOTS, delay_s=DELAY_S)) as (sides, asker):
        firsts = await _turns(asker, sides)
    return ratio_row(
        f"{CONVERSATIONS} conversations over {SLOTS} slots, second turns: first token, without over with",
        (_side(WITHOUT, firsts, 1.0, "s"), _side(SPLIT, firsts, 1.0, "s")),
        at_least(10.0),
    )


async def _cost(base: SplitPlan, rounds: Rounds) -> Row:
    """The first token of a new text, before which the one in its slot is saved."""
    async with running(_sides(base)) as (sides, asker):
        saves = await _saves(asker, sides, rounds)
    return added_row(
        f"a text of {TOKENS} tokens is saved: later first token of the next one",
        (_side(SPLIT, saves, 1000.0, "ms"), _side(WITHOUT, saves, 1000.0, "ms")),
        at_most(2.0),
    )


def _side(name: str, seen: dict[str, list[float]], factor: float, unit: str, *, digits: int = 2) -> Side:
    return Side(
        name=name, sample=Sample.of([factor * value for value in seen[name]]), unit=unit, digits=digits
    )


async def _turns(asker: Client, sides: dict[str, Rig]) -> dict[str, list[float]]:
    """Seconds to the first token of each second turn; every first turn is over by then."""
    texts = [token_ids(TOKENS, seed=index) for index in range(CONVERSATIONS)]
    answers: dict[str, list[list[int]]] = {name: [] for name in sides}
    for name, rig in sides.items():
        for text in texts:
            answer = await asker.ask(rig.server, "/completion", _body(text, ANSWER))
            answers[name].append(answer.document["tokens"])
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for index, text in enumerate(texts):
        for name, rig in turns(list(sides.items()), index):
            await quiet()
            more = [*text, *answers[name][index], *token_ids(40, seed=index + 100)]
            stream = await asker.stream(rig.server, "/completion", _body(more, 4, stream=True))
            seen[name].append(stream.first_s)
    return seen


async def _saves(asker: Client, sides: dict[str, Rig], rounds: Rounds) -> dict[str, list[float]]:
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for number in rounds:
        for name, rig in turns(list(sides.items()), number):
            await asker.ask(rig.server, "/completion", _body(token_ids(TOKENS), 1))
            await quiet()
            short = _body(token_ids(4, seed=200 + number), 2, stream=True)
            seen[name].append((await asker.stream(rig.server, "/completion", short)).first_s)
    return seen


_NOTES = (
    "reuse: tiny models with random weights over two workers; alone: the same engine, as many checkpoints; "
    "the last two tokens of an answer of 30 are replaced by others",
    "conversations: SmolLM2 (--quick: random weights, a quarter of it) over two workers, 10 ms one way, "
    "1,500 tokens each; a save: without delays",
    "without: the same split engine that saves nothing, as before",
)
