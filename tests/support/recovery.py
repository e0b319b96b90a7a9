"""Answers whose mesh loses something in the middle of them, beside the answers that nothing happens to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_llm.engine.build import library
from tests.support.faults import Client, Outcome
from tests.support.mesh import Agreed, MeshProcesses
from tests.support.node import NodeProcess, temporary_home
from tests.support.processors import OtherProcessor, libraries_in

NAMES = ("one", "two", "three")
VICTIMS = ("worker", "host", "engine")
MOMENTS = {"early": (2, 8), "late": (100, 120)}
"""Pieces that have come when the blow falls, at least and at most."""
AFTER = 32
"""Tokens that an answer has after that."""
WHOLE_S = 90.0
QUESTIONS = (
    "Tell me of a fox.",
    "List five colours.",
    "Write a short poem on rivers and the sea.",
    "Count from one to a hundred, in words.",
    " ".join(f"Note {number}: the weather was fine." for number in range(45)) + " Now tell me of a fox.",
)
"""The last one has more than 450 tokens, and more than 512 with the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    victim: str
    moment: str
    questions: tuple[int, ...]
    """Asked at once."""
    at: int
    """Pieces of the first one's answer that have come."""

    @classmethod
    def draw(cls, victim: str, moment: str, number: int, *, streams: int = 1) -> Kill:
        """Other questions each time, and the same moments in every run."""
        at = random.Random(f"{victim} {moment} {number}").randint(*MOMENTS[moment])
        questions = tuple((number + index) % len(QUESTIONS) for index in range(streams))
        return cls(victim=victim, moment=moment, questions=questions, at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One answer, and what it would have been."""

    outcome: Outcome
    expected: Outcome
    """It may be longer."""
    chances: list[float]
    expected_chances: list[float]

    @property
    def was_resumed(self) -> bool:
        return bool(self.outcome.at_seam)

    @property
    def is_same(self) -> bool:
        return self.outcome.done and self.differs_at == len(self.outcome.pieces)

    @property
    def has_same_numbers(self) -> bool:
        return self.is_same and _common(self.chances, self.expected_chances) == len(self.chances)

    @property
    def differs_at(self) -> int:
        """The first piece that differs; their number where none does."""
        return _common(self.outcome.pieces, self.expected.pieces)

    def __str__(self) -> str:
        words = "same text" if self.is_same else f"another text from piece {self.differs_at} on"
        numbers = f"same numbers for {_common(self.chances, self.expected_chances)} of {len(self.chances)}"
        seen = self.outcome
        return f"{words}, {numbers}, resumed at {seen.at_seam}, {seen.longest_s:.1f} s, {seen.error}"


class Listener(Client):
    """Hears how likely each token was, where it asks: numbers that tell of the smallest difference."""

    def __init__(
        self, node: NodeProcess, body: dict[str, Any], *, at: int | None = None, do: Callable[[], None]
    ) -> None:
        super().__init__(node, body, at=at, do=do)
        self.chances: list[float] = []
        self.drafted = 0
        """Tokens that the last engine guessed ahead."""

    def _hear(self, data: dict[str, Any]) -> None:
        self.drafted += data.get("timings", {}).get("draft_n", 0)
        for choice in data["choices"]:
            told = (choice.get("logprobs") or {}).get("content") or ()
            self.chances += [each["logprob"] for each in told]
        super()._hear(data)


def body_of(question: str, tokens: int, *, chances: bool) -> dict[str, Any]:
    """To an end that is the same for every answer; prompts may be found in the engine's cache, as usual.

    Nothing is drafted for those who ask for the tokens' `chances`.
    """
    asked = {"logprobs": True, "top_logprobs": 1} if chances else {}
    return {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        **asked,
    }


@dataclass(slots=True)
class RecoveringMesh:
    """Three nodes with a stage each. Whoever was killed is started again before the next blow."""

    mesh: MeshProcesses
    drafts: bool
    other: OtherProcessor | None = None
    """Of the second node, which takes over from the first; the third one never hosts."""
    _expected: dict[tuple[object, ...], list[Listener]] = field(default_factory=dict)

    def whole(self) -> Agreed:
        for name in NAMES:
            if name not in self.mesh.nodes:
                self.mesh.restart(name)
        plan = self.mesh.serving(host=NAMES[0] if self.other else None, within_s=WHOLE_S)
        self._check_code()
        return plan

    def undisturbed(self, kill: Kill, plan: Agreed) -> list[Listener]:
        """The answers to its questions, at least as long as they will be."""
        # Where processors differ, it matters who computes what.
        key = (kill.moment, kill.questions, self.other and plan.stages)
        if key not in self._expected:
            node = self.mesh.nodes[plan.host]
            tokens = MOMENTS[kill.moment][1] + AFTER
            bodies = [self._body(question, tokens) for question in kill.questions]
            clients = [Listener(node, body, do=lambda: None) for body in bodies]
            _hear_out(clients)
            assert not any(client.outcome.at_seam for client in clients), clients
            self._expected[key] = clients
        return self._expected[key]

    def _body(self, question: int, tokens: int) -> dict[str, Any]:
        return body_of(QUESTIONS[question], tokens, chances=not self.drafts)

    def recovered(self, kill: Kill) -> list[Recovered]:
        plan = self.whole()
        expected = self.undisturbed(kill, plan)
        now = self.whole()
        assert self.other is None or now.stages == plan.stages, f"{plan} became {now}"
        struck = self._struck(now, kill)
        return [
            Recovered(
                outcome=client.outcome,
                expected=other.outcome,
                chances=client.chances,
                expected_chances=other.chances,
            )
            for client, other in zip(struck, expected, strict=True)
        ]

    def _struck(self, plan: Agreed, kill: Kill) -> list[Listener]:
        lost = {"worker": plan.workers[-1], "host": plan.host, "engine": None}[kill.victim]
        asked = self.mesh.nodes[plan.workers[0] if lost == plan.host else plan.host]
        strike = self.mesh.nodes[lost].process.kill if lost else self.mesh.nodes[plan.host].engine().kill
        bodies = [self._body(question, kill.at + AFTER) for question in kill.questions]
        first = Listener(asked, bodies[0], at=kill.at, do=strike)
        clients = [first, *(Listener(asked, body, do=lambda: None) for body in bodies[1:])]
        try:
            _hear_out(clients)
        finally:
            if lost:
                self.mesh.kill(lost)
        if self.other is not None and lost == NAMES[0]:
            self.mesh.serving(host=NAMES[1], within_s=WHOLE_S)
            self._check_code()
        return clients

    def _check_code(self) -> None:
        """Every node computes as its processor would."""
        if self.other is None:
            return
        usual = library("cpu").path.resolve()
        for name in self.mesh.nodes:
            expected = self.other.library if name == NAMES[1] else usual
            pids = self.mesh.computing(name)
            assert pids, f"nothing computes on {name}"
            assert libraries_in(pids) == {expected} - {None}, name


@contextmanager
def recovering_mesh(
    model: Path,
    *,
    drafts: bool,
    heirs: Sequence[str] = (),
    other: OtherProcessor | None = None,
    slots: int = 1,
) -> Iterator[RecoveringMesh]:
    """`heirs`: how all nodes but the first are started.

    With `other` the first one always hosts, and its only heir has a processor of that kind.
    """
    options = ("--parallel", str(slots), *(() if drafts else ("--no-draft",)))
    hosting = (("--hosting", "prefer"), (), ("--hosting", "never")) if other else ((), (), ())
    with temporary_home() as folder, MeshProcesses(folder, model) as mesh:
        mesh.create(NAMES[0], "--split", *options, *hosting[0])
        mesh.join(NAMES[1], *heirs, *hosting[1], env=other.env if other else None)
        mesh.join(NAMES[2], *heirs, *hosting[2])
        yield RecoveringMesh(mesh, drafts, other)


def kills(numbers: range, *, victims: Sequence[str] = VICTIMS, streams: int = 1) -> Iterator[Kill]:
    """Of each kind, in turns."""
    for number, victim, moment in itertools.product(numbers, victims, MOMENTS):
        yield Kill.draw(victim, moment, number, streams=streams)


def _hear_out(clients: Sequence[Listener]) -> None:
    for client in clients:
        client.start()
    for client in clients:
        client.finished()


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many are the same, from the first on."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
