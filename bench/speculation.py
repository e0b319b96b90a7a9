"""Guessing ahead over far links: against the same engine without guesses, by kind of text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from bench import servers
from bench.plan import Plan
from bench.report import Row, ratio_row
from bench.split_sides import speeds
from bench.stats import Target, at_least
from mesh_llm.bench import texts
from mesh_llm.bench.client import Client, TimedAnswer
from mesh_llm.bench.company import quiet
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.sides import Setup, base_plan, decode_speed, over, passive_threads, running
from mesh_llm.defaults import DRAFT_MAX, GUESS_TEXT_MAX, MTP_DRAFT_MAX
from mesh_llm.engine import build
from mesh_llm.engine.spec import DraftSpec, StatesSpec
from mesh_llm.errors import MeshError
from mesh_llm.lab.split import SplitPlan
from mesh_llm.planning.fit import CHECKPOINTS
from tests.support import stepping_models, tiny_gguf
from tests.support.engine_lab import engine_lab
from tests.support.split import token_ids
from tests.support.stepping_models import NEVER

TITLE = "Guessing ahead: 3 workers, 20 ms one way, against the same without guesses"

DELAY_S, WORKERS = 0.020, 3
_TOKENS = 128
NONE, TEXT, OWN, RANDOM, BOTH = "none", "text", "own draft", "random draft", "own draft and text"
MTP, EAGLE3 = "MTP head", "EAGLE3 head"
_HEAD_DELAY_S, _HEAD_WORKERS = 0.010, 2
_HEAD_SIZES: dict[str, Any] = {
    "block_count": 12,
    "embedding_length": 512,
    "feed_forward_length": 1408,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "ssm.inner_size": 512,
    "ssm.time_step_rank": 8,
}
"""Of a generated model, large enough that its head is a small part of it."""
_READ_LAYERS = (2, 6, 9)
"""What an EAGLE3 head reads of these, as real ones do: early, in the middle, and three before the end."""
_LAST_LAYERS = (1, 2)
"""Those that workers can have beside it: the host computes what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of text, and what is asked of the ways to guess it."""

    name: str
    prompt: str | list[int]
    temperature: float = 0.0
    targets: tuple[tuple[str, Target | None], ...] = ()


TASKS = (
    Task(
        name="text that repeats itself",
        prompt=texts.REPEATING,
        targets=((TEXT, at_least(3.0)), (OWN, at_least(2.2)), (BOTH, None)),
    ),
    Task(
        name="a program edited",
        prompt=texts.CODE,
        targets=((TEXT, at_least(1.5)), (OWN, at_least(2.2)), (BOTH, None)),
    ),
    Task(
        name="JSON edited",
        prompt=texts.JSON,
        targets=((TEXT, at_least(1.5)), (OWN, at_least(2.2)), (BOTH, None)),
    ),
    Task(
        name="prose",
        prompt=texts.PROSE,
        targets=((TEXT, at_least(0.97)), (OWN, at_least(2.2)), (RANDOM, at_least(0.97))),
    ),
    Task(
        name="prose at temperature 1",
        prompt=texts.PROSE,
        temperature=1.0,
        targets=((TEXT, at_least(0.97)), (RANDOM, at_least(0.97)), (OWN, None)),
    ),
)

Seen = dict[str, list[TimedAnswer]]


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    model = default_model()
    base = await base_plan(model)
    rows: list[Row] = []
    notes: list[str] = []
    with passive_threads(), servers.fresh_home() as folder:
        random = tiny_gguf.write(folder / "random.gguf", "llama", layers=2, tokenizer=model)
        far = over(replace(base, context=2048), WORKERS, delay_s=DELAY_S)
        setups = {
            name: replace(far, plan=replace(far.plan, draft=draft)) for name, draft in _sides(model, random)
        }
        async with running(setups) as (sides, asker):
            for task in TASKS:
                rounds = plan.rounds(full=8, quick=3, full_s=180.0, quick_s=60.0)
                seen = await _in_turns(asker, sides, task, rounds)
                notes.append(f"{task.name}: {rounds.note()}; {_agreement(seen)}; {_accepted(seen)}")
                rows += [
                    ratio_row(f"{task.name}: {name}", speeds(seen, decode_speed, name, NONE), target)
                    for name, target in task.targets
                ]
        for kind, right in product((MTP, EAGLE3), (True, False)):
            found, note = await _heads(plan, folder, kind, right=right)
            rows += found
            notes.append(note)
    return tuple(rows), (*notes, *_NOTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headed:
    """A generated model whose next token is known, with a head for further ones."""

    alone: SplitPlan
    split: SplitPlan
    draft: DraftSpec


async def _heads(plan: Plan, folder: Path, kind: str, *, right: bool) -> tuple[list[Row], str]:
    """One whose head is always right, or always wrong."""
    headed = await (_with_mtp if kind == MTP else _with_eagle3)(folder, right=right)
    name, rows, notes = f"{kind}, always {'right' if right else 'wrong'}", [], []
    for where, one in (("alone", headed.alone), ("2 workers, 10 ms", headed.split)):
        setups = {NONE: Setup(plan=one), kind: Setup(plan=replace(one, draft=headed.draft))}
        task = Task(name=name, prompt=[*token_ids(64), 20], targets=((kind, None),))
        async with running(setups) as (sides, asker):
            rounds = plan.rounds(full=12, quick=5, full_s=120.0, quick_s=40.0)
            seen = await _in_turns(asker, sides, task, rounds)
        target = at_least(1.5 if right and one.workers else 0.97)
        rows.append(ratio_row(f"{name}: {where}", speeds(seen, decode_speed, kind, NONE), target))
        notes.append(f"{name}, {where}: {rounds.note()}; {_agreement(seen)}; {_accepted(seen)}")
    return rows, "; ".join(notes)


async def _with_mtp(folder: Path, *, right: bool) -> Headed:
    with engine_lab(build.at_hand().libraries, folder) as lab:
        model = stepping_models.write_with_head(lab, "qwen35", right=right, sizes=_HEAD_SIZES).path
    base = replace(await base_plan(model), context=1024)
    draft = DraftSpec(head_depth=MTP_DRAFT_MAX, head_layer=len(base.facts.layers) - 1, needs_states=True)
    states = StatesSpec(checkpoints=CHECKPOINTS)
    split = replace(over(base, _HEAD_WORKERS, delay_s=_HEAD_DELAY_S).plan, states=states)
    return Headed(alone=base, split=split, draft=draft)


async def _with_eagle3(folder: Path, *, right: bool) -> Headed:
    layers = {"target_layers": list(_READ_LAYERS)}
    with engine_lab(build.at_hand().libraries, folder) as lab:
        model = stepping_models.write(lab, "llama", period=NEVER, sizes=_HEAD_SIZES).path
        head = stepping_models.write_eagle3(lab, right=right, sizes=_HEAD_SIZES, metadata=layers).path
    base = replace(await base_plan(model), context=1024)
    draft = DraftSpec(model=str(head), model_depth=DRAFT_MAX, reads_layers=True)
    split = replace(base, workers=_LAST_LAYERS, delay_s=_HEAD_DELAY_S)
    return Headed(alone=base, split=split, draft=draft)


def _sides(model: Path, random: Path) -> Sequence[tuple[str, DraftSpec]]:
    own = DraftSpec(model=str(model), model_depth=DRAFT_MAX)
    return (
        (NONE, DraftSpec()),
        (TEXT, DraftSpec(text_depth=GUESS_TEXT_MAX)),
        (OWN, own),
        (RANDOM, DraftSpec(model=str(random), model_depth=DRAFT_MAX)),
        (BOTH, replace(own, text_depth=GUESS_TEXT_MAX)),
    )


async def _in_turns(asker: Client, sides: dict[str, Rig], task: Task, rounds: Rounds) -> Seen:
    wanted = {NONE, *(name for name, _ in task.targets)}
    asked = [(name, rig) for name, rig in sides.items() if name in wanted]
    body: dict[str, Any] = {
        "prompt": task.prompt,
        "n_predict": _TOKENS,
        "temperature": task.temperature,
        "seed": 7,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    seen: Seen = defaultdict(list)
    for number in rounds:
        for name, rig in turns(asked, number):
            await quiet()
            seen[name].append(await asker.ask(rig.server, "/completion", body))
    return seen


def _agreement(seen: Seen) -> str:
    """With guesses it has to say what it says without, at temperature 0 and with one seed alike."""
    texts = {answer.document["content"] for answers in seen.values() for answer in answers}
    if len(texts) != 1:
        raise MeshError("guesses changed the text")
    return "texts equal on all sides"


def _accepted(seen: Seen) -> str:
    shares = []
    for name, answers in seen.items():
        drafted = sum(answer.timings.get("draft_n", 0) for answer in answers)
        right = sum(answer.timings.get("draft_n_accepted", 0) for answer in answers)
        if drafted:
            shares.append(f"{name} {right} of {drafted}")
    return f"guesses that were right: {', '.join(shares) or 'none made'}"


_NOTES = (
    "one thread for each process, SmolLM2 split over three workers; the draft runs in the host's process",
    "own draft: the model guesses for itself, always right and as dear as can be; random draft: a tiny model "
    "with random weights, always wrong",
    "MTP head: a generated Qwen3.5 of 12 layers, 512 wide, whose next token is known; its head says that "
    "token, or another one; EAGLE3 head: the same for a generated llama, the host computes 9 of its layers",
    "the figures of the project that this one follows, Qwen2.5-32B with a draft of 0.5B on 2 nodes, 20 ms "
    "round trip, fixed depth: prose 5.3 to 6.2 tok/s (1.17 ×, 56 % right), code 5.3 to 7.3 tok/s (1.38 ×, "
    "75 % right)",
)
