"""Guessing ahead by kind of text, over workers that are far away: with drafts and without, on one machine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from mesh_llm.bench import texts
from mesh_llm.bench.client import Client, TimedAnswer
from mesh_llm.bench.company import Bystanders, quiet
from mesh_llm.bench.grid import CONTEXT, Tell
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.sides import Setup, decode_speed, passive_threads, plan_alone, running, shares
from mesh_llm.defaults import DRAFT_MAX, GUESS_TEXT_MAX
from mesh_llm.engine import build
from mesh_llm.engine.spec import DraftSpec
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series
from mesh_llm.results.samples import Sample, ratios
from mesh_llm.types import Progress, ProgressSink

TEXTS = {"prose": texts.PROSE, "code, edited": texts.CODE, "JSON, edited": texts.JSON}
WITHOUT, TEXT, MODEL = "without", "from the text", "by a draft model and the text"
_TASK_S = 240.0


@frozen
class SpeculationSpec:
    model: Path
    draft: Path | None = None
    nodes: int = 3
    latency_s: float = 0.010
    rounds: int = 5
    tokens: int = 96


SpeculationFound = dict[str, dict[str, list[TimedAnswer]]]
"""Answers by text, then by side."""


async def measure(spec: SpeculationSpec, *, tell: Tell, progress: ProgressSink) -> SpeculationFound:
    built = await build.ensure(build.STANDARD, progress)
    for error in built.missing.values():
        raise error
    alone = replace(await plan_alone(spec.model, built.libraries), context=CONTEXT)
    if not 1 <= spec.nodes <= len(alone.facts.layers):
        raise UsageError(f"--nodes {spec.nodes}: the model has {len(alone.facts.layers)} layers to spread")
    _, *workers = shares(len(alone.facts.layers), spec.nodes)
    split = replace(alone, workers=tuple(workers), delay_s=spec.latency_s if workers else 0.0)
    setups = {name: Setup(plan=replace(split, draft=draft)) for name, draft in drafts(spec.draft).items()}
    found: SpeculationFound = {}
    with passive_threads():
        async with running(setups) as (sides, asker):
            tell(f"{len(TEXTS)} texts, {len(sides)} sides, {spec.rounds} rounds: some minutes")
            for number, (kind, prompt) in enumerate(TEXTS.items()):
                progress(Progress(what=kind, done=number, total=len(TEXTS)))
                found[kind] = await _ask(asker, sides, prompt, spec)
    progress(Progress(what="speculation", done=len(TEXTS), total=len(TEXTS)))
    return found


def drafts(draft: Path | None) -> dict[str, DraftSpec]:
    text = DraftSpec(text_depth=GUESS_TEXT_MAX)
    found = {WITHOUT: DraftSpec(), TEXT: text}
    if draft is not None:
        found[MODEL] = replace(text, model=str(draft), model_depth=DRAFT_MAX)
    return found


async def _ask(
    asker: Client, sides: dict[str, Rig], prompt: str, spec: SpeculationSpec
) -> dict[str, list[TimedAnswer]]:
    seen: dict[str, list[TimedAnswer]] = defaultdict(list)
    body = {"n_predict": spec.tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    for rig in sides.values():
        await asker.ask(rig.server, "/completion", {**body, "prompt": prompt, "n_predict": 4})
    for number in Rounds(wanted=spec.rounds, budget_s=_TASK_S):
        for name, rig in turns(list(sides.items()), number):
            await quiet()
            seen[name].append(await asker.ask(rig.server, "/completion", {**body, "prompt": prompt}))
    return seen


def document(
    found: SpeculationFound,
    spec: SpeculationSpec,
    *,
    company: Bystanders,
    command: str,
    facts: dict[str, str],
) -> Document:
    where = f"{spec.nodes} nodes, {1000 * spec.latency_s:g} ms one way"
    return Document(
        name="speculation",
        title=f"Decode with drafts and without: {where}",
        command=command,
        facts={**facts, "model": spec.model.name, "draft model": spec.draft.name if spec.draft else "none"},
        tables=(_table(found),),
        plots=(_plot(found, where),),
        figures=tuple(
            Figure(
                name=f"{kind}, {side}: decode", unit="tok/s", values=_speeds(answers), higher_is_better=True
            )
            for kind, sides in found.items()
            for side, answers in sides.items()
        ),
        notes=(
            "the host and its workers share the layers evenly; one thread in each process; temperature 0",
            _agreement(found),
            company.text(),
        ),
    )


def _speeds(answers: list[TimedAnswer]) -> tuple[float, ...]:
    return tuple(decode_speed(answer) for answer in answers)


def _table(found: SpeculationFound) -> ResultTable:
    rows = []
    for kind, sides in found.items():
        plain = _speeds(sides[WITHOUT])
        for side, answers in sides.items():
            sample = Sample(_speeds(answers))
            first, third = sample.quartiles
            gain = ratios(sample.values, plain)
            rows.append(
                (
                    kind,
                    side,
                    f"{sample.median:.1f} tok/s",
                    f"{first:.1f}–{third:.1f}",
                    f"{gain.median:.2f} ×" if side != WITHOUT else "–",
                    _accepted(answers),
                )
            )
    columns = ("text", "drafts", "decode", "quartiles", "of the speed without", "tokens accepted")
    return ResultTable(title="Decode", columns=columns, rows=tuple(rows))


def _accepted(answers: list[TimedAnswer]) -> str:
    drafted = sum(answer.timings.get("draft_n", 0) for answer in answers)
    right = sum(answer.timings.get("draft_n_accepted", 0) for answer in answers)
    return f"{right} of {drafted}" if drafted else "–"


def _plot(found: SpeculationFound, where: str) -> Plot:
    sides = list(next(iter(found.values())))
    return Plot(
        title=f"Decode by kind of text, {where}",
        x_label=", ".join(f"{number}: {kind}" for number, kind in enumerate(found, 1)),
        y_label="tok/s",
        series=tuple(
            Series(
                label=side,
                x=tuple(float(number) for number in range(1, len(found) + 1)),
                y=tuple(Sample(_speeds(kinds[side])).median for kinds in found.values()),
            )
            for side in sides
        ),
    )


def _agreement(found: SpeculationFound) -> str:
    differ = [
        kind
        for kind, sides in found.items()
        if len({answer.document["content"] for answers in sides.values() for answer in answers}) > 1
    ]
    return "texts are equal with drafts and without" + (f", but for {', '.join(differ)}" if differ else "")
