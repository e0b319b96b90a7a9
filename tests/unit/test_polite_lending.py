"""When a machine is lent: its user's terms, what it tells of itself, and the user's word."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_llm.config import LendTerms, NodeConfig, parse_lend
from mesh_llm.errors import UsageError
from mesh_llm.local.lending_rules import CALM_S, IDLE_S, LendingState, decided, why_not
from mesh_llm.local.machine_use import MachineUse
from mesh_llm.membership.fact_documents import facts_from_document, facts_to_document
from mesh_llm.node.polite_lending import BY_HAND, PoliteLending
from mesh_llm.node.unload import ModelUnload
from mesh_llm.types import NodeFacts, Role, State

# -- terms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("always", LendTerms()),
        ("idle", LendTerms(idle=True)),
        ("22:00-07:00", LendTerms(hours=((1320, 420),))),
        ("22-7", LendTerms(hours=((1320, 420),))),
        ("12:30-24:00", LendTerms(hours=((750, 1440),))),
        ("idle,22:00-07:00, 12:00-13:00", LendTerms(idle=True, hours=((1320, 420), (720, 780)))),
    ],
)
def test_terms_are_read_and_written(text: str, terms: LendTerms) -> None:
    assert parse_lend(text) == terms
    assert parse_lend(terms.text) == terms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "never",
        "idle,always",
        "always,always",
        "7",
        "7-7",
        "25:00-07:00",
        "24:01-7",
        "7:60-8",
        "-",
        "²-3",
        ",idle",
    ],
)
def test_terms_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is neither always, idle nor hours") as caught:
        parse_lend(text)
    assert "--lend 22:00-07:00" in str(caught.value.hint)


def test_a_lite_client_lends_nothing(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="--lend cannot be used with --client"):
        NodeConfig(home=tmp_path, client=True, lend=LendTerms(idle=True))


# -- rules -----------------------------------------------------------------------------------------

UNUSED = MachineUse(idle_s=IDLE_S)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (UNUSED, ""),
        (MachineUse(), ""),
        (MachineUse(idle_s=IDLE_S - 1), "somebody uses the machine"),
        (replace(UNUSED, on_battery=True), "the machine runs on battery"),
        (replace(UNUSED, heat="cpu has 99 °C"), "the machine is hot: cpu has 99 °C"),
        (replace(UNUSED, gpu_user="a game"), "a game uses the GPU"),
    ],
)
def test_an_idle_machine_is_lent(use: MachineUse, reason: str) -> None:
    assert why_not(LendTerms(idle=True), use, 0) == reason
    assert why_not(LendTerms(), use, 0) == ""


@pytest.mark.parametrize(
    ("minute", "lent"), [(0, True), (419, True), (420, False), (1319, False), (1320, True), (1439, True)]
)
def test_hours_may_go_over_midnight(minute: int, lent: bool) -> None:
    terms = LendTerms(hours=((1320, 420),))
    assert why_not(terms, MachineUse(idle_s=0), minute) == ("" if lent else "it lends at 22:00-07:00 only")
    day = LendTerms(hours=((420, 1320),))
    assert bool(why_not(day, MachineUse(), minute)) is lent


def test_a_reason_pauses_at_once_and_lending_waits_for_calm() -> None:
    state = decided(LendingState(), "hot", now=0)
    assert state.paused == "hot"
    state = decided(state, "", now=10)
    state = decided(state, "", now=10 + CALM_S - 1)
    assert state.paused == "hot"
    assert decided(state, "", now=10 + CALM_S).paused == ""
    # A reason in between begins it all over.
    state = decided(state, "on battery", now=30)
    assert decided(state, "", now=10 + CALM_S).paused == "on battery"


def test_who_lends_all_the_same_does_so_until_the_reason_is_gone() -> None:
    state = decided(LendingState(overruled=True), "hot", now=0)
    assert state.paused == ""
    assert decided(state, "hot", now=1).paused == ""
    assert decided(decided(state, "", now=2), "hot", now=3).paused == "hot"


# -- the node --------------------------------------------------------------------------------------


class Node:
    """What of a node lending concerns, and what it said."""

    def __init__(self, terms: LendTerms, *, company: bool = True) -> None:
        self.facts = NodeFacts(name="desk", role=Role.NODE, version="1", state=State.SERVING)
        self.company = company
        self.said: list[str] = []
        self.woken = 0
        self.lending = cast(Any, SimpleNamespace(closed=None, leases=[], close=self._closed))
        announcements: Any = SimpleNamespace(
            say=lambda kind, text: self.said.append(f"{kind}: {text}"),
            note=lambda event: self.said.append(f"{event.kind}: {event.text}"),
        )
        mesh: Any = self
        self.unload = ModelUnload(mesh, self._wake, self.lending, announcements)
        self.polite = PoliteLending(terms, mesh, self.unload)

    async def _closed(self) -> None:
        pass

    def _wake(self) -> None:
        self.woken += 1

    def has_company(self) -> bool:
        return self.company

    def publish(self, **facts: Any) -> None:
        self.facts = replace(self.facts, **facts)

    def sees(self, use: MachineUse, *, now: float) -> str:
        self.polite._weigh(use, time.gmtime(0), now=now)
        return self.facts.paused


IN_USE = MachineUse(idle_s=1.0)


async def test_a_used_machine_is_paused_and_lent_again() -> None:
    node = Node(LendTerms(idle=True))
    assert node.sees(UNUSED, now=0) == ""
    assert node.sees(IN_USE, now=5) == "somebody uses the machine"
    assert node.facts.resting
    assert node.lending.closed == "this node is paused: somebody uses the machine"
    assert node.sees(UNUSED, now=10) == "somebody uses the machine"
    assert node.sees(UNUSED, now=10 + CALM_S) == ""
    assert (node.facts.resting, node.lending.closed) == (False, None)
    assert node.said == [
        "paused: Paused: somebody uses the machine. Others take over what they can",
        "lending: Lending again",
    ]
    assert node.woken == 2
    await node.unload.close()


async def test_alone_nothing_is_lent_and_nothing_paused() -> None:
    node = Node(LendTerms(idle=True), company=False)
    assert node.sees(IN_USE, now=0) == ""
    node.company = True
    assert node.sees(IN_USE, now=5) == "somebody uses the machine"
    node.company = False
    assert node.sees(IN_USE, now=10) == ""
    await node.unload.close()


async def test_the_users_word_counts_more() -> None:
    node = Node(LendTerms(idle=True))
    assert node.polite.pause() == {"paused": BY_HAND}
    assert node.sees(UNUSED, now=0) == BY_HAND
    assert node.polite.resume() == {"paused": ""}
    assert node.sees(IN_USE, now=5) == ""
    assert node.sees(UNUSED, now=10) == ""
    assert node.sees(IN_USE, now=15) == "somebody uses the machine"
    assert node.polite.resume() == {"paused": ""}
    assert not node.facts.resting
    await node.unload.close()


async def test_a_model_that_was_unloaded_by_hand_stays_so() -> None:
    node = Node(LendTerms(idle=True))
    node.unload.begin()
    assert node.sees(IN_USE, now=0) == ""
    assert node.sees(UNUSED, now=CALM_S + 5) == ""
    assert node.facts.resting
    await node.unload.close()


async def test_a_node_that_starts_is_not_paused_yet() -> None:
    node = Node(LendTerms(idle=True))
    node.publish(state=State.STARTING)
    assert node.sees(IN_USE, now=0) == ""
    await node.unload.close()


async def test_one_that_is_always_lent_does_not_look() -> None:
    await Node(LendTerms()).polite.run()


def test_others_are_told_why() -> None:
    facts = NodeFacts(name="desk", role=Role.NODE, version="1", resting=True, paused="it is hot")
    assert facts_from_document(facts_to_document(facts)) == facts
    document = facts_to_document(facts)
    del document["paused"]
    assert facts_from_document(document).paused == ""
