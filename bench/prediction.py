"""What is predicted of plans beside what is measured: models, cuts, delays, threads, quantisations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, plain_row
from bench.stats import at_least, at_most
from mesh_llm.bench import company, rigs
from mesh_llm.bench.client import Client, client
from mesh_llm.bench.facts import default_model
from mesh_llm.bench.rigs import Rig
from mesh_llm.bench.servers import ENVIRONMENT
from mesh_llm.bench.sides import base_plan, shares
from mesh_llm.engine import machine
from mesh_llm.engine.kernel_speed import measured_kernels
from mesh_llm.engine.process import run
from mesh_llm.engine.speed import measured_speed
from mesh_llm.errors import MeshError
from mesh_llm.lab.split import SplitPlan
from mesh_llm.planning.experience import Experience, corrected
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.model_speed import kernels_of
from mesh_llm.planning.predict import predict
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.results.samples import Sample
from mesh_llm.types import LinkFacts, LinkKind, NodeFacts, NodeId, Prediction, Role, Speed, Stage
from tests.support import tiny_gguf
from tests.support.split import token_ids

TITLE = "Predictions beside measurements"

SHORT, LONG = 32, 1000
DECODED = 32
ROUNDS = 3
FIRST_WITHIN, NEXT_WITHIN = 25.0, 15.0
"""Per cent: of a model that never ran here, and of a plan that did."""
_DEMO_S = 240.0
_HOST = NodeId("0" * 64)
_LINK_S = 5e-5
"""Of the round trip over a socket, without a delay line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    """SmolLM2, or the architecture and quantisation of a generated one."""
    workers: int = 0
    delay_ms: float = 0.0
    threads: int = 1
    prompt: int = SHORT

    @property
    def name(self) -> str:
        where = f"{_several(self.workers, 'worker')} at {self.delay_ms:g} ms" if self.workers else "alone"
        return f"{self.model}, {where}, {_several(self.threads, 'thread')}, {self.prompt:,} tokens"


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


CASES = (
    Case(model="SmolLM2"),
    Case(model="SmolLM2", threads=2),
    Case(model="SmolLM2", prompt=LONG),
    Case(model="SmolLM2", workers=1),
    Case(model="SmolLM2", workers=2, delay_ms=5),
    Case(model="SmolLM2", workers=3, delay_ms=10),
    Case(model="SmolLM2", workers=2, prompt=LONG),
    Case(model="llama Q4_0"),
    Case(model="llama Q4_0", threads=2, prompt=LONG),
    Case(model="llama Q4_0", workers=2),
    Case(model="llama Q4_K"),
    Case(model="llama Q4_K", workers=2, delay_ms=10),
    Case(model="llama Q8_0", threads=2),
    Case(model="llama Q8_0", workers=1, delay_ms=5, prompt=LONG),
    Case(model="llama F16"),
    Case(model="llama F16", workers=3),
    Case(model="qwen3 Q4_1", workers=2, delay_ms=5),
    Case(model="qwen3moe Q4_0"),
    Case(model="qwen3moe Q8_0", workers=2, delay_ms=10),
)
"""And the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    tok_s: float
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    name: str
    usual: Seen | None
    """As predicted by what was measured of a usual model, Q4_K, alone; the demo does not predict that."""
    predicted: Seen
    """Before it ran."""
    measured: tuple[Seen, ...]
    again: Seen
    """As predicted after it ran once."""
    measured_again: tuple[Seen, ...]


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    outcomes: list[Outcome] = []
    cases = CASES[:: plan.choose(1, 8)]
    with servers.fresh_home() as folder:
        models = _Models(folder)
        for case in cases:
            print(f"  {case.name}", file=sys.stderr, flush=True)
            outcomes.append(await _outcome(case, await models.plan(case), folder))
        outcomes.append(await _demo(folder))
    rows = [row for outcome in outcomes for row in _rows(outcome)]
    return (*prediction_summary(outcomes), *rows), prediction_notes(outcomes)


class _Models:
    """Written when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def plan(self, case: Case) -> SplitPlan:
        base = await base_plan(self._path(case.model))
        workers = shares(len(base.facts.layers), case.workers) if case.workers else ()
        return replace(base, workers=workers, threads=case.threads, delay_s=case.delay_ms / 1000)

    def _path(self, name: str) -> Path:
        architecture, _, quantisation = name.partition(" ")
        if not quantisation:
            return default_model()
        path = self._folder / f"{architecture}-{quantisation}.gguf"
        if not path.exists():
            # Layers as wide as those of a model with half a billion parameters.
            sizes: Any = {"feed_forward": 2816, "heads": 16, "kv_heads": 4, "head_size": 64}
            sizes |= {"experts": 8, "experts_used": 2, "expert_feed_forward": 768}
            tiny_gguf.write(
                path,
                architecture,
                layers=8,
                hidden=1024,
                vocabulary=4096,
                quantisation=quantisation,
                **sizes,
            )
        return path


async def _outcome(case: Case, plan: SplitPlan, folder: Path) -> Outcome:
    """Its speeds are measured anew, right before: what others do on this machine changes by the minute."""
    cache = folder / "speed" / case.name
    speed = await measured_speed(plan.libraries, plan.device, plan.threads, cache=cache)
    if speed is None:
        raise MeshError("this machine's speed could not be measured")
    kernels = await measured_kernels(
        plan.libraries, plan.device, plan.threads, kernels_of(plan.facts), cache=cache
    )
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(rigs.ours(plan))
        asker = await stack.enter_async_context(client())
        measured = [seen async for seen in _asked(asker, rig, case)]
    told = _predicted(case, plan, replace(speed, kernels=kernels))
    return Outcome(
        name=case.name,
        usual=_seen(_predicted(case, plan, speed)),
        predicted=_seen(told),
        measured=tuple(measured),
        again=_seen(corrected(told, _experience(told, measured[0]))),
        measured_again=tuple(measured[1:]),
    )


def _experience(told: Prediction, seen: Seen) -> Experience:
    experience = Experience().with_token(told.tok_s / seen.tok_s)
    return experience.with_first_token(seen.first_s / told.first_token_s)


async def _asked(asker: Client, rig: Rig, case: Case) -> Any:
    for number in range(ROUNDS + 1):
        await company.quiet()
        body = {
            "prompt": token_ids(case.prompt, seed=number),
            "n_predict": DECODED,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
        }
        stream = await asker.stream(rig.server, "/completion", body)
        # The first answer also lays out weights.
        if number:
            # Not events: tokens that are half a letter come with the other half.
            spent_s, count = stream.total_s - stream.first_s, stream.timings["predicted_n"]
            yield Seen(tok_s=(count - 1) / spent_s, first_s=stream.first_s)


def _predicted(case: Case, plan: SplitPlan, speed: Speed) -> Prediction:
    """By the code that plans; every stage is a node of this machine, with threads of its own."""
    nodes = [_HOST, *(NodeId(f"{index + 1:064x}") for index in range(case.workers))]
    link = LinkFacts(kind=LinkKind.LOCAL, rtt_s=2 * plan.delay_s + _LINK_S)
    memory = machine.available_memory()
    snapshot = Snapshot(
        nodes=tuple(
            Candidate(
                id=node,
                facts=NodeFacts(
                    name=node[-4:],
                    role=Role.NODE,
                    version="",
                    machine="here",
                    memory_bytes=memory,
                    machine_memory_bytes=memory,
                    speed=speed,
                    threads=plan.threads,
                    machine_threads=machine.threads(),
                    links=tuple((other, link) for other in nodes if other != node),
                ),
            )
            for node in nodes
        )
    )
    found = predict(
        plan.facts,
        tuple(_stages(plan, nodes)),
        snapshot,
        host=_HOST,
        settings=CacheSettings(context=plan.context, slots=1),
        prompt_tokens=case.prompt,
    )
    if found is None:
        raise MeshError(f"nothing could be predicted of {case.name}")
    return found


def _seen(found: Prediction) -> Seen:
    return Seen(tok_s=found.tok_s, first_s=found.first_token_s)


def _stages(plan: SplitPlan, nodes: list[NodeId]) -> Iterator[Stage]:
    count = len(plan.facts.layers)
    spans = list(zip(nodes[1:], plan.workers, strict=True)) or [(_HOST, count)]
    first = 0
    for node, layers in spans:
        yield Stage(
            node=node, first=first, last=first + layers, weight_bytes=0, need_bytes=0, share=layers / count
        )
        first += layers


async def _demo(folder: Path) -> Outcome:
    """`mesh-llm demo`, as a newcomer runs it, twice."""
    print("  demo", file=sys.stderr, flush=True)
    predicted, measured = await _demo_once(folder)
    again, measured_again = await _demo_once(folder)
    return Outcome(
        name="demo",
        usual=None,
        predicted=predicted,
        measured=(measured,),
        again=again,
        measured_again=(measured_again,),
    )


async def _demo_once(folder: Path) -> tuple[Seen, Seen]:
    """Predicted and measured."""
    finished = await run(
        [str(servers.command()), "demo", "--once", "--json", "--port", "0"],
        timeout_s=_DEMO_S,
        env={**ENVIRONMENT, "MESH_LLM_HOME": str(folder / "home")},
    )
    if finished.status != 0:
        raise MeshError(f"the demo ended with status {finished.status}: {finished.errors[-1:]}")
    told = json.loads("\n".join(finished.output))
    first = told["first_token"]
    if first["measured_s"] is None:
        raise MeshError("the demo measured no first token")
    return (
        Seen(tok_s=told["predicted_tok_s"], first_s=first["predicted_s"]),
        Seen(tok_s=told["decode_tok_s"], first_s=first["measured_s"]),
    )


# -- the table ------------------------------------------------------------------------------------


def _rows(outcome: Outcome) -> list[Row]:
    decode = Sample.of([seen.tok_s for seen in outcome.measured])
    first = Sample.of([seen.first_s for seen in outcome.measured])
    return [
        _row(f"{outcome.name}: decode", outcome.predicted.tok_s, decode, "tok/s", 1),
        _row(f"{outcome.name}: first token", outcome.predicted.first_s, first, "s", 3),
    ]


def _row(name: str, predicted: float, measured: Sample, unit: str, digits: int) -> Row:
    error = _error(predicted, measured.median)
    return Row(
        measure=name,
        ours=Side(name="predicted", sample=Sample((predicted,)), unit=unit, digits=digits),
        theirs=Side(name="measured", sample=measured, unit=unit, digits=digits),
        figure=Sample((error,)),
        unit="%",
        digits=0,
        target=at_most(FIRST_WITHIN),
        judged=abs(error),
    )


def _error(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1)


def _errors(told: Seen, measured: Sequence[Seen]) -> tuple[float, float]:
    """Of decoding and of the first token."""
    return (
        abs(_error(told.tok_s, Sample.of([seen.tok_s for seen in measured]).median)),
        abs(_error(told.first_s, Sample.of([seen.first_s for seen in measured]).median)),
    )


def prediction_summary(outcomes: list[Outcome]) -> list[Row]:
    own = [error for each in outcomes for error in _errors(each.predicted, each.measured)]
    usual = [error for each in outcomes if each.usual for error in _errors(each.usual, each.measured)]
    again = [error for each in outcomes for error in _errors(each.again, each.measured_again)]
    return [
        plain_row(
            f"first prediction: within {FIRST_WITHIN:.0f} % of what is measured, of {len(own)}",
            _share("by the model's own kernels", own, FIRST_WITHIN),
            at_least(90.0),
            theirs=_share(f"by Q4_K alone, of {len(usual)}", usual, FIRST_WITHIN),
        ),
        plain_row(
            f"after one answer: within {NEXT_WITHIN:.0f} %, of {len(again)}",
            _share("by what the plan showed", again, NEXT_WITHIN),
            at_least(90.0),
        ),
    ]


def _share(name: str, errors: Sequence[float], within: float) -> Side:
    share = 100 * sum(error <= within for error in errors) / len(errors)
    return Side(name=name, sample=Sample((share,)), unit="%", digits=0)


def prediction_notes(outcomes: list[Outcome]) -> tuple[str, ...]:
    return (
        "speeds are measured right before each case; measured are medians of the answers that followed",
        *(
            f"{each.name}: {f'by Q4_K alone {_told(each.usual)}; ' if each.usual else ''}"
            f"after one answer {_told(each.again)}"
            for each in outcomes
        ),
    )


def _told(seen: Seen) -> str:
    return f"{seen.tok_s:.1f} tok/s, {seen.first_s:.3f} s"
