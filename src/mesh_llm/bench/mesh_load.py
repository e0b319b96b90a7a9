"""A running mesh under load, through its API alone: prompts of many lengths, then several streams at once.

Every step is one request, or one lot of requests at once. What each showed is kept as it comes, so that a run
that was stopped can go on later. Nothing of the mesh is changed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from mesh_llm.bench import prompts
from mesh_llm.bench.client import Client, TimedStream
from mesh_llm.bench.servers import Server
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.status_schema import Status, from_document
from mesh_llm.types import Progress, ProgressSink

SHORT_TOKENS = 32
"""Of prompts whose reading is not what is measured."""
_FIRST_TOKENS = 4
"""Asked for where only the first counts: half a letter is held back until its other half has come."""
_SETTLE_S = 1.5
"""An engine tells of its links once a second."""
_PARTIAL = "mesh.partial.json"

Tell = Callable[[str], None]
Look = Callable[[], Awaitable[dict[str, Any]]]
"""The status document of the node that is asked."""


@frozen
class LoadSpec:
    lengths: tuple[int, ...] = (32, 128, 512, 2048, 8192, 32768)
    """Tokens of a prompt, as far as the context goes."""
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rounds: int = 3
    decoded: int = 64
    step_s: float = 180.0
    """A step that is expected to take longer is left out."""
    total_s: float = 1800.0
    """When this time is up, the rest is left out."""


QUICK = LoadSpec(lengths=(32, 256, 1024), streams=(1, 4), decoded=24, step_s=15.0, total_s=120.0)


@frozen
class Step:
    kind: str
    """`prompt`: one of `size` tokens; `streams`: so many at once."""
    size: int
    round: int

    @property
    def key(self) -> str:
        return f"{self.kind} {self.size} {self.round}"

    @property
    def text(self) -> str:
        if self.kind == "prompt":
            return f"first token, {self.size:,} tokens"
        return f"{self.size} stream{'' if self.size == 1 else 's'}"


@frozen
class StepSeen:
    """What one step showed."""

    first_s: float
    """Until the first token; of several streams, the median."""
    tok_s: float
    """All tokens of all streams, over the time between the first token and the last."""
    prompt_tok_s: float = 0.0
    gap_s: float = 0.0
    """The longest between two tokens of one stream."""
    predicted_s: float | None = None
    """Until the first token, as the node predicted for a prompt of that length."""
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    """Between these it is most likely."""


@frozen
class LoadFound:
    steps: dict[Step, StepSeen]
    left_out: tuple[str, ...]
    before: Status
    after: Status
    """After one answer that nobody else disturbed: it tells where a token's time goes."""


class Kept:
    """What was measured so far, in a file beside the results, where they go to a folder."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self._path = folder / _PARTIAL if folder is not None else None
        self._about = about
        self.run = int(time.time())
        self.seen: dict[str, StepSeen] = {}

    def begin(self) -> None:
        """Refuse to write over what a stopped measurement has left."""
        if self._path is not None and self._path.is_file():
            raise MeshError(
                f"a stopped measurement is in {self._path.parent}",
                hint=f"--resume goes on with it; to begin anew, choose another folder or remove {self._path}",
            )

    def resume(self) -> None:
        if self._path is None or not self._path.is_file():
            raise MeshError(
                "there is nothing to go on with: no stopped measurement is in that folder",
                hint="name its folder with -o, or start without --resume",
            )
        try:
            document = json.loads(self._path.read_text("utf-8"))
            same = document["about"] == self._about
            self.run = int(document["run"])
            self.seen = {str(key): StepSeen(**each) for key, each in document["seen"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise MeshError(
                f"{self._path} is damaged", hint="remove it, and start without --resume"
            ) from error
        if not same:
            raise MeshError(
                "the stopped measurement is of another model, plan or length",
                hint=f"start with the options that it had, or without --resume once {self._path} is removed",
            )

    def add(self, step: Step, seen: StepSeen) -> None:
        self.seen[step.key] = seen
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = {key: asdict(each) for key, each in self.seen.items()}
            text = json.dumps({"about": self._about, "run": self.run, "seen": known})
            waiting = self._path.with_suffix(".new")
            waiting.write_text(text, "utf-8")
            waiting.replace(self._path)

    def done(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def serving(document: dict[str, Any]) -> Status:
    """The status of a node whose mesh answers; raises with a sentence where it does not."""
    status = from_document(Status, document)
    if (
        status.model is None
        or status.plan is None
        or status.api.url is None
        or status.engine.state != "ready"
    ):
        why = status.node.reason or f"its state is {status.node.state}"
        raise MeshError(
            f"the mesh does not serve a model yet: {why}", hint="mesh-llm status --watch shows when"
        )
    return status


def about(status: Status, spec: LoadSpec) -> dict[str, Any]:
    """What has to be the same for a measurement to go on."""
    assert status.model is not None and status.plan is not None
    stages = [[stage.node, stage.first, stage.last] for stage in status.plan.stages]
    return {"model": status.model.fingerprint, "stages": stages, "spec": json.loads(json.dumps(asdict(spec)))}


def steps(spec: LoadSpec, context: int) -> list[Step]:
    """Round by round, so that a run whose time is up has seen every size about as often."""
    lengths = [length for length in spec.lengths if fits(length, context)]
    found = []
    for number in range(spec.rounds):
        found += [Step(kind="prompt", size=length, round=number) for length in lengths]
        found += [Step(kind="streams", size=count, round=number) for count in spec.streams]
    return found


def fits(length: int, context: int) -> bool:
    return length + _FIRST_TOKENS <= context


def expected_s(step: Step, spec: LoadSpec, *, prompt_tok_s: float, tok_s: float) -> float:
    """No more than a guess: streams at once are taken to gain nothing."""
    if step.kind == "prompt":
        return step.size / prompt_tok_s + _FIRST_TOKENS / tok_s
    return step.size * (SHORT_TOKENS / prompt_tok_s + spec.decoded / tok_s)


@frozen
class AskedMesh:
    """Where to ask, and what is known of it."""

    client: Client
    server: Server
    look: Look
    tell: Tell
    progress: ProgressSink
    clock: Callable[[], float] = field(default=time.monotonic)


async def measure(spec: LoadSpec, kept: Kept, asked: AskedMesh) -> LoadFound:
    before = serving(await asked.look())
    assert before.model is not None
    context = before.model.context or SHORT_TOKENS + spec.decoded
    todo = steps(spec, context)
    await _warm_up(spec, kept, asked)
    after = serving(await asked.look())
    asked.tell(_duration(todo, spec, kept, after))
    left_out = {
        f"{length:,} tokens: more than the context holds"
        for length in spec.lengths
        if not fits(length, context)
    }
    deadline = asked.clock() + spec.total_s
    for number, step in enumerate(todo):
        if step.key in kept.seen:
            continue
        asked.progress(Progress(what=step.text, done=number, total=len(todo)))
        if asked.clock() > deadline:
            left_out.add(f"{step.text}, round {step.round + 1}: the time was up")
        elif expected_s(step, spec, **_speeds(after)) > spec.step_s:
            left_out.add(f"{step.text}: it would take longer than {spec.step_s:.0f} s")
        else:
            kept.add(step, await _measure(step, number, spec, kept.run, asked))
    asked.progress(Progress(what="mesh", done=len(todo), total=len(todo)))
    known = {step: kept.seen[step.key] for step in todo if step.key in kept.seen}
    return LoadFound(steps=known, left_out=tuple(sorted(left_out)), before=before, after=after)


async def _warm_up(spec: LoadSpec, kept: Kept, asked: AskedMesh) -> None:
    """One answer alone: weights are laid out, and the node learns where a token's time goes."""
    await _stream(asked, await _prompt(asked, kept.run, 0, SHORT_TOKENS), spec.decoded)
    await asyncio.sleep(_SETTLE_S)


def _speeds(status: Status) -> dict[str, float]:
    plan, engine = status.plan, status.engine
    assert plan is not None
    return {
        "prompt_tok_s": max(plan.predicted_prompt_tok_s or engine.prompt_tok_s, 1.0),
        "tok_s": max(engine.decode_tok_s or plan.predicted_tok_s, 0.1),
    }


def _duration(todo: list[Step], spec: LoadSpec, kept: Kept, status: Status) -> str:
    waits = [
        seconds
        for step in todo
        if step.key not in kept.seen and (seconds := expected_s(step, spec, **_speeds(status))) <= spec.step_s
    ]
    total_s = min(sum(waits), spec.total_s)
    text = f"{total_s:.0f} s" if total_s < 90 else f"{total_s / 60:.0f} minutes"
    return f"{len(waits)} steps, about {text}, at most {spec.total_s / 60:.0f} minutes; Ctrl-C stops it"


async def _measure(step: Step, number: int, spec: LoadSpec, run: int, asked: AskedMesh) -> StepSeen:
    # Numbers of prompts never meet: those of streams count on from their step's own thousand.
    first = 1000 * (number + 1)
    if step.kind == "prompt":
        found = await _stream(asked, await _prompt(asked, run, first, step.size), _FIRST_TOKENS)
        told = serving(await asked.look()).api.first_token
        # The node tells of the last answer that it passed on: another client's may have come since.
        same = told.prompt_tokens == step.size
        return StepSeen(
            first_s=found.first_s,
            tok_s=0.0,
            prompt_tok_s=float(found.timings.get("prompt_per_second", 0.0)),
            predicted_s=told.predicted_s if same else None,
            predicted_low_s=told.predicted_low_s if same else None,
            predicted_high_s=told.predicted_high_s if same else None,
        )
    texts = [await _prompt(asked, run, first + each, SHORT_TOKENS) for each in range(step.size)]
    began = asked.clock()
    answers = await asyncio.gather(*(_timed(asked, text, spec.decoded, began) for text in texts))
    return together(answers)


def together(answers: list[tuple[float, TimedStream]]) -> StepSeen:
    """`answers`: when each was asked, in seconds since the first was."""
    firsts = sorted(answer.first_s for _, answer in answers)
    began_s = min(at_s + answer.first_s for at_s, answer in answers)
    between_s = max(at_s + answer.total_s for at_s, answer in answers) - began_s
    tokens = sum(int(answer.timings["predicted_n"]) for _, answer in answers)
    gaps = [gap for _, answer in answers for gap in answer.gaps_s]
    return StepSeen(
        first_s=firsts[len(firsts) // 2],
        # The first token is where the time begins, and none of what was made in it.
        tok_s=(tokens - 1) / between_s if between_s > 0 else 0.0,
        gap_s=max(gaps, default=0.0),
    )


async def _timed(
    asked: AskedMesh, prompt: list[int], decoded: int, began: float
) -> tuple[float, TimedStream]:
    at_s = asked.clock() - began
    return at_s, await _stream(asked, prompt, decoded)


async def _stream(asked: AskedMesh, prompt: list[int], decoded: int) -> TimedStream:
    body = {
        "prompt": prompt,
        "n_predict": decoded,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    found = await asked.client.stream(asked.server, "/completion", body)
    if not found.arrived_s or "predicted_n" not in found.timings:
        raise MeshError("an answer of the mesh was cut off: its engine may be lost", hint="mesh-llm status")
    return found


async def _prompt(asked: AskedMesh, run: int, number: int, count: int) -> list[int]:
    """Exactly so many tokens, as numbers."""
    content = prompts.unique(run, number, count)
    answer = await asked.client.ask(asked.server, "/tokenize", {"content": content})
    tokens: list[int] = answer.document["tokens"]
    if len(tokens) < count:
        raise MeshError(f"the model makes only {len(tokens)} tokens of a prompt for {count}")
    return tokens[:count]
