"""Whether an answer whose mesh loses a worker, its host or its engine ends with the undisturbed text."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.plan import Plan
from bench.report import Row, Side, plain_row
from bench.stats import Target, at_least
from mesh_llm.bench.rounds import Rounds
from mesh_llm.errors import MeshError
from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from mesh_llm.results.samples import Sample
from tests.support import processors
from tests.support.processors import OtherProcessor
from tests.support.recovery import AFTER, MOMENTS, VICTIMS, kills, recovering_mesh

TITLE = "Answers that are continued, beside the undisturbed ones"

_BUDGET_S = 3600.0
"""For each way to run: a kill takes four to twenty seconds."""
_QUICK_S = 120.0


@dataclass(slots=True)
class _Tally:
    same: int = 0
    same_numbers: int = 0
    resumed: int = 0
    late: int = 0
    """Answers that were over when the blow fell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a mesh runs, and what is killed in it."""

    name: str
    drafts: bool = False
    heirs: tuple[str, ...] = ()
    other: Callable[[], OtherProcessor] | None = None
    """The heir's processor, where it is another one."""
    victims: Sequence[str] = VICTIMS
    streams: int = 1
    target: Target | None = None
    share: int = 1
    """Of the rounds: one in so many, where a rate is reported and not proven."""
    tallies: dict[tuple[str, str], _Tally] = field(default_factory=lambda: defaultdict(_Tally))


def _ways() -> tuple[_Way, ...]:
    return (
        _Way(name="with drafts", drafts=True, target=at_least(100)),
        _Way(name="without drafts", target=at_least(100)),
        _Way(name="three at once", streams=3, share=4),
        _Way(name="heir with two threads", heirs=("--threads", "2"), victims=("host",), share=4),
        *_other_processors(),
    )


def _other_processors() -> Iterator[_Way]:
    if processors.can_build_avx2():
        yield _Way(name="heir with AVX2 alone", other=processors.with_avx2, victims=("host",), share=4)
    engines_own = processors.without_library
    yield _Way(name="heir with the engine's own CPU code", other=engines_own, victims=("host",), share=4)


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    ways, notes = _ways(), []
    for way in ways:
        budget_s = _QUICK_S if plan.quick else _BUDGET_S
        other = way.other() if way.other else None
        code = (_code_note(way.name, other),) if other else ()
        rounds = Rounds(wanted=-(-(plan.count or plan.choose(50, 1)) // way.share), budget_s=budget_s)
        stop = threading.Event()
        try:
            await asyncio.to_thread(_run, way, other, rounds, stop)
        finally:
            # Whoever ends the bench waits for no more than one answer.
            stop.set()
        notes.append(f"{way.name}: {rounds.note()}, each with one kill of every kind")
        notes += code
    rows = [
        _row(way, victim, moment, tally) for way in ways for (victim, moment), tally in way.tallies.items()
    ]
    early, late = (f"{least} to {most}" for least, most in (MOMENTS["early"], MOMENTS["late"]))
    return tuple(rows), (
        *notes,
        "three nodes on this machine, one thread each, the model split over all; a worker's node, the host's "
        f"node or the engine is killed (SIGKILL) at token {early} (early) or {late} (late) of an answer at "
        f"temperature 0, which has {AFTER} more; whoever was killed is started again",
        "three at once: compared with the answers to the same three questions that nothing happens to",
        "numbers: the chance of every token, to the last bit; nothing is drafted for those who ask for them",
        "the question of every fifth round has more than 450 tokens; engines remember prompts as usual",
    )


def _code_note(name: str, other: OtherProcessor) -> str:
    usual, others = processors.features(None), processors.features(other)
    if usual == others:
        raise MeshError(f"{name}: it is the CPU code of this machine", hint="leave this way out")
    return (
        f"{name}: it computes with {' '.join(others)}; the host that is killed, to which the plan returns "
        f"each time, and the third node, which never hosts, with {' '.join(usual)}; compared with the "
        "undisturbed answer of the same plan"
    )


def _run(way: _Way, other: OtherProcessor | None, rounds: Rounds, stop: threading.Event) -> None:
    model = models_folder() / catalog.load().find("smollm2").files[0]
    with recovering_mesh(model, drafts=way.drafts, heirs=way.heirs, other=other, slots=way.streams) as mesh:
        for number in rounds:
            for kill in kills(range(number, number + 1), victims=way.victims, streams=way.streams):
                if stop.is_set():
                    return
                tally = way.tallies[kill.victim, kill.moment]
                for recovered in mesh.recovered(kill):
                    if not recovered.was_resumed:
                        tally.late += 1
                        continue
                    tally.resumed += 1
                    tally.same += recovered.is_same
                    tally.same_numbers += recovered.has_same_numbers
                    told = f"{way.name}, {kill.victim}, {kill.moment}: {recovered}"
                    print(told, file=sys.stderr, flush=True)


def _row(way: _Way, victim: str, moment: str, tally: _Tally) -> Row:
    counts = f"{tally.same} of {tally.resumed}"
    counts += "" if way.drafts else f", the same numbers {tally.same_numbers}"
    counts += f", {tally.late} too late" if tally.late else ""
    share = 100 * tally.same / tally.resumed if tally.resumed else 0.0
    side = Side(name=counts + ":", sample=Sample.of([share]), unit="%", digits=0)
    return plain_row(f"{way.name}: {victim} killed {moment}, the same text", side, way.target)
