"""Everything that can die, at every moment of every kind of answer: the client gets its text, or an error."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.faults import (
    TOKENS,
    Client,
    Outcome,
    body_of,
    continued,
    events_at_seams,
    undisturbed,
)
from tests.support.mesh import Agreed, MeshProcesses
from tests.support.node import ENDLESS, NodeProcess
from tests.support.series import Scrape
from tests.support.waiting import until

VICTIMS = ("engine", "worker child", "worker node", "host node")
FAULTS = ("kill", "stop")
MOMENTS = ("queued", "prefill", "first", "middle", "end")
FORMS = ("stream", "whole", "tools", "schema")
SAMPLE = 6
SEED = 4
MOMENT_S = 60.0
REFUSALS = {"not_resumed", "engine_lost"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    victim: str
    fault: str
    moment: str
    form: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.moment}-{self.form}".replace(" ", "_")


def cases() -> list[object]:
    """A sample for every run, the same each time; all of them with the long tests."""
    every = [
        Case(victim=victim, fault=fault, moment=moment, form=form)
        for victim, fault, moment, form in itertools.product(VICTIMS, FAULTS, MOMENTS, FORMS)
    ]
    sample = set(random.Random(SEED).sample(every, SAMPLE))
    return [
        pytest.param(case, id=str(case), marks=() if case in sample else pytest.mark.full) for case in every
    ]


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    """For the nodes of this module's mesh: a template that knows of tools."""
    template = (Path(__file__).parent.parent / "clients" / "tools.jinja").read_text()
    return ("--engine-set", f"chat_template={template}")


class References:
    """What is answered when nothing happens; each is asked for once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], Outcome] = {}

    def get(self, node: NodeProcess, form: str, *, long: bool) -> Outcome:
        if (form, long) not in self._known:
            self._known[form, long] = undisturbed(node, body_of(form, long=long))
        return self._known[form, long]


@pytest.fixture(scope="module")
def references() -> References:
    return References()


@pytest.mark.parametrize("case", cases())
def test_fault(trio: MeshProcesses, references: References, case: Case) -> None:
    plan = trio.serving()
    asking = asked_node(plan, case)
    node = trio.nodes[asking]
    long = case.moment == "prefill"
    body = body_of(case.form, long=long)
    reference = references.get(node, case.form, long=long)
    pieces = references.get(node, "stream", long=long) if case.form == "whole" else reference
    logged = len(events_at_seams(node.logs()))

    with Strike(trio, plan, case) as strike:
        outcome = struck(trio, plan, node, case, body, strike, total=len(reference.pieces))
        seams = outcome.at_seam
        if case.form == "whole":
            # The first event says who speaks, each of the others is a piece.
            seams = [max(0, told - 1) for told in events_at_seams(node.logs())[logged:]]
        if case.form in ("tools", "schema"):
            check_shaped(outcome, reference)
        else:
            check_text(node, body, outcome, reference, pieces.pieces, seams)


def asked_node(plan: Agreed, case: Case) -> str:
    """Anybody but the one that dies: through the host, or through another node."""
    if case.victim == "host node":
        return plan.workers[0]
    if case.victim == "worker node":
        return plan.host if case.form in ("stream", "tools") else plan.workers[0]
    return plan.host if case.form in ("stream", "schema") else plan.workers[0]


class Strike:
    """Does the deed when called, once; leaving the block clears up."""

    def __init__(self, trio: MeshProcesses, plan: Agreed, case: Case) -> None:
        self._trio = trio
        self._plan = plan
        self._name = plan.host if case.victim == "host node" else plan.workers[-1]
        self._fault = case.fault
        self._whole_node = case.victim.endswith("node")
        if case.victim == "engine":
            self._child = trio.nodes[plan.host].engine()
        elif case.victim == "worker child":
            self._child = trio.worker_child(plan.workers[-1])

    def __enter__(self) -> Strike:
        return self

    def __call__(self) -> None:
        if self._whole_node:
            if self._fault == "kill":
                self._trio.nodes[self._name].signal(signal.SIGKILL)
            else:
                self._trio.freeze([self._name])
        else:
            self._child.send_signal(signal.SIGKILL if self._fault == "kill" else signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        if self._whole_node:
            if self._fault == "kill":
                self._trio.kill(self._name)
            else:
                self._trio.thaw([self._name])
        else:
            with suppress(psutil.NoSuchProcess):
                self._child.send_signal(signal.SIGCONT)
        if self._fault == "kill":
            # An answer may have been whole by then. The next test is not to find the plan as it was.
            until(self._is_noticed, within_s=MOMENT_S, what="somebody notices")

    def _is_noticed(self) -> bool:
        agreed = self._trio.agreed()
        return agreed is None or (agreed.epoch, agreed.engine) != (self._plan.epoch, self._plan.engine)


def struck(
    trio: MeshProcesses,
    plan: Agreed,
    node: NodeProcess,
    case: Case,
    body: dict[str, object],
    strike: Strike,
    *,
    total: int,
) -> Outcome:
    """Ask, strike at the moment of the case, and hear the client out."""
    host = trio.nodes[plan.host]
    if case.moment == "queued":
        with blocked(node) as blocker:
            client = Client(node, body, do=lambda: None)
            client.start()
            until(lambda: queued(host), within_s=MOMENT_S, what="it waits for its turn")
            strike()
            blocker.close()
            return client.finished()
    at = {"prefill": 0, "first": 1, "middle": max(1, total // 2), "end": max(1, total)}[case.moment]
    if body.get("stream"):
        client = Client(node, body, at=at, do=strike)
        client.start()
        return client.finished()
    client = Client(node, body, do=lambda: None)
    client.start()
    wanted = {"prefill": 0, "first": 1, "middle": TOKENS // 2, "end": TOKENS - 2}[case.moment]
    until(lambda: decoded(host) >= wanted or not client.is_alive(), within_s=MOMENT_S, what="it is answering")
    strike()
    return client.finished()


@contextmanager
def blocked(node: NodeProcess) -> Iterator[ExitStack]:
    """Somebody else has the only slot, until told to let go."""
    with ExitStack() as stack:
        stream = stack.enter_context(node.stream("/v1/completions", ENDLESS))
        stream.next()
        yield stack


def queued(host: NodeProcess) -> bool:
    return Scrape(host.ask("/metrics").body).value("mesh_llm_gateway_queue_waiting") >= 1


def decoded(host: NodeProcess) -> int:
    """Tokens of the answer under way; -1 where there is none."""
    [slot] = host.ask("/slots").json()
    return max(token["n_decoded"] for token in slot["next_token"]) if slot["is_processing"] else -1


# -- what may come of it ---------------------------------------------------------------------------


def check_shaped(outcome: Outcome, reference: Outcome) -> None:
    if outcome.error is None:
        assert outcome.done
        assert (outcome.text, outcome.finish) == (reference.text, reference.finish)
        return
    assert outcome.error["code"] in REFUSALS, outcome.error
    assert not outcome.done
    assert outcome.finish in ([], ["error"])
    assert reference.text.startswith(outcome.text)


def check_text(
    node: NodeProcess,
    body: dict[str, object],
    outcome: Outcome,
    reference: Outcome,
    pieces: list[str],
    seams: list[int],
) -> None:
    """No piece lost, doubled or altered: each part follows from what was there before it."""
    assert outcome.error is None, outcome.error
    assert outcome.done
    assert outcome.finish == ["length"]
    assert outcome.usage is not None
    assert reference.usage is not None
    assert outcome.usage["prompt_tokens"] == reference.usage["prompt_tokens"]
    assert outcome.usage["completion_tokens"] == TOKENS
    begun = [count for count in seams if count > 0]
    if not begun:
        assert outcome.text == reference.text
        return
    assert outcome.text.startswith("".join(pieces[: begun[0]]))
    if len(outcome.pieces) > 1:
        # Of a stream every part is known: between one seam and the next.
        parts = [
            (outcome.pieces[:at], outcome.pieces[at:end]) for at, end in itertools.pairwise([*begun, TOKENS])
        ]
    else:
        beginning = pieces[: begun[0]]
        parts = [(beginning, [outcome.text.removeprefix("".join(beginning))])] if len(begun) == 1 else []
    for before, part in parts:
        follows = continued(node, body, "".join(before))
        assert follows.startswith("".join(part)), (before, follows, part)
