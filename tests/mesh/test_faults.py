"""Everything that can die, at every moment of every kind of answer: the client gets its text, or an error."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
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
    check_shaped,
    check_text,
    continued,
    events_at_seams,
    pieces_at_seams,
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
SAMPLE = (
    # Each thing that can die, early and late, with and without a stream.
    "kill-engine-first-stream",
    "kill-worker_node-first-whole",
    "kill-host_node-middle-stream",
    "kill-worker_child-queued-tools",
)
MORE = (
    "stop-worker_child-middle-whole",
    "kill-engine-middle-whole",
    "kill-worker_node-middle-stream",
    "kill-host_node-first-whole",
    "kill-engine-end-schema",
)
MOMENT_S = 60.0
TRIES = 3
"""For a strike to be in time: an answer takes a second, and the machine may stand still for three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    victim: str
    fault: str
    moment: str
    form: str

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.moment}-{self.form}".replace(" ", "_")


class TooLate(AssertionError):
    """The answer was over when the blow fell: nothing has been tested."""


def cases() -> list[object]:
    """A sample for every run, the same each time, some more where there is time; all of them take an hour."""
    every = [
        Case(victim=victim, fault=fault, moment=moment, form=form)
        for victim, fault, moment, form in itertools.product(VICTIMS, FAULTS, MOMENTS, FORMS)
    ]
    assert {str(case) for case in every}.issuperset(SAMPLE + MORE)
    return [pytest.param(case, id=str(case), marks=marks(str(case))) for case in every]


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name in SAMPLE:
        return []
    return [pytest.mark.full if name in MORE else pytest.mark.long]


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
def test_fault(
    trio: MeshProcesses, heal: Callable[[], MeshProcesses], references: References, case: Case
) -> None:
    for left in reversed(range(TRIES)):
        try:
            check(trio, references, case)
            return
        except TooLate:
            if not left:
                raise
        heal()


def check(trio: MeshProcesses, references: References, case: Case) -> None:
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
            seams = pieces_at_seams(events_at_seams(node.logs())[logged:])
        if case.form in ("tools", "schema"):
            check_shaped(outcome, reference)
        else:
            check_text(
                outcome,
                reference,
                pieces.pieces,
                seams,
                lambda beginning, tokens: continued(node, body, beginning, tokens),
            )
        if case.moment in ("prefill", "first", "middle") and not (seams or outcome.error):
            raise TooLate(f"{case}: no other engine had to go on")


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
            until(lambda: queued(host), within_s=MOMENT_S, what="it waiting for a slot")
            strike()
            blocker.close()
            return client.finished()
    at = {"prefill": 0, "first": 1, "middle": max(1, total // 2), "end": max(1, total)}[case.moment]
    if body.get("stream"):
        client = Client(node, body, at=at, do=strike)
        client.start()
        return client.finished()
    wanted = {"prefill": 0, "first": 1, "middle": TOKENS // 2, "end": TOKENS - 8}[case.moment]
    for _ in range(TRIES):
        client = Client(node, body, do=lambda: None)
        client.start()
        until(
            lambda running=client: decoded(host) >= wanted or not running.is_alive(),  # type: ignore[misc]
            within_s=MOMENT_S,
            what="it is answering",
        )
        if client.is_alive():
            strike()
            if not client.is_alive():
                raise TooLate(f"{case}: the answer ended just before")
            return client.finished()
        client.finished()
    raise TooLate(f"{case}: {TRIES} answers ended before anybody saw them at token {wanted}")


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
