"""Each oracle refuses a log in which what it watches for has happened, and no other oracle does."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_llm.lab.chaos import oracles, report
from mesh_llm.lab.chaos.oracles import judge
from mesh_llm.lab.chaos.pauses import pauses
from mesh_llm.lab.chaos.records import Record
from mesh_llm.results.document import from_json, to_json

TEXT = "A fox is a small animal."
MB = 1 << 20


def run_record() -> Record:
    asked = {
        "seed": 1,
        "minutes": 2.0,
        "command": "mesh-llm lab chaos",
        "left_out": {"fill-disk": "no limits"},
    }
    return {"kind": "run", "at": -20.0, **asked}


def answer(**changes: Any) -> Record:
    whole = {
        "number": 1,
        "via": "client",
        "question": "fox",
        "form": "chat",
        "outcome": "done",
        "status": 200,
    }
    times = {"at": 10.0, "pieces": [10.5, 11.0, 11.5], "ended": 11.6}
    return {
        "kind": "answer",
        **whole,
        **times,
        "text": TEXT,
        "seams": [],
        "resumed": 0,
        "error": "",
        **changes,
    }


def fault(at: float, phase: str = "begin", *, node: str = "two", number: int = 0) -> Record:
    return {"kind": "fault", "at": at, "phase": phase, "number": number, "fault": "kill-node", "node": node}


def member(at: float, phase: str, *, name: str = "two") -> Record:
    return {"kind": "member", "at": at, "phase": phase, "name": name, "id": f"id-{name}"}


def status(at: float, *members: str, name: str = "one", stages: tuple[str, ...] = ()) -> Record:
    listed = {f"id-{each}": "alive" for each in members}
    said = {"state": "serving", "members": listed, "stages": [f"id-{each}" for each in stages]}
    return {"kind": "status", "at": at, "name": name, **said}


def told(at: float, text: str, *, name: str = "one") -> Record:
    return {"kind": "told", "at": at, "name": name, "text": text}


def usage(at: float, **held: int) -> Record:
    usual = {"rss_bytes": 100 * MB, "descriptors": 50, "threads": 20}
    return {"kind": "usage", "at": at, "name": "one", "role": "node", "pid": 7, **usual, **held}


def settled(**changes: Any) -> Record:
    return {"kind": "settled", "at": 140.0, "whole": True, "why": "", "wrong": [], **changes}


def log_of(*records: Record, end: Record | None = None) -> list[Record]:
    reference = {"kind": "reference", "at": -5.0, "question": "fox", "text": TEXT, "took_s": 1.5}
    return [run_record(), reference, *records, end or settled()]


LOSS = (
    fault(20.0),
    told(22.6, "lost: two was lost: it no longer answers"),
    told(22.7, "plan proposed epoch=6 mode=solo stages=1: fits"),
)
RESUMED = told(35.2, "request resumed elsewhere events=3 node=one cause=two was lost", name="client")
AGAIN = told(24.2, "request resumed elsewhere events=3 node=one cause=two was lost", name="client")
SERVING = told(35.0, "plan serving epoch=6 mode=solo")
STILL = answer(at=19.0, pieces=[19.5, 36.0, 36.1], ended=36.2, seams=[1])

WRONG: dict[str, list[Record]] = {
    "altered": log_of(answer(text="A fox is is a small animal.")),
    "lost": log_of(answer(outcome="error", text="A fox", error='{"code": "not_resumed"}')),
    "waits": log_of(answer(pieces=[10.5, 11.0, 190.0], ended=190.1)),
    "still": log_of(*LOSS, SERVING, RESUMED, STILL),
    "orphans": log_of(
        *({"kind": "orphan", "at": at, "pid": 9, "command": "worker"} for at in (30.0, 40.0, 55.0))
    ),
    "growth": log_of(*(usage(at, rss_bytes=(100 + 2 * at) * MB) for at in range(0, 120, 6))),
    "disk": log_of({"kind": "disk", "at": 100.0, "name": "one", "bytes": 60 * MB}),
    "ghosts": log_of(member(5.0, "started"), member(20.0, "gone"), status(50.0, "one", "two")),
    "revoked": log_of(member(20.0, "revoked"), status(50.0, "one", "two")),
    "settled": log_of(end=settled(whole=False, why="two of four run")),
}


def test_every_oracle_has_a_log_that_it_refuses() -> None:
    assert set(WRONG) == set(oracles.ORACLES)


@pytest.mark.parametrize("name", WRONG)
def test_an_oracle_refuses_what_it_watches_for(name: str) -> None:
    assert [finding.oracle for finding in judge(WRONG[name])] == [name]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([answer()], id="an answer like any other"),
        pytest.param([answer(outcome="left", text="A fox")], id="a client that leaves"),
        pytest.param(
            [fault(10.2, node="two"), answer(via="two", outcome="broken", text="A fox"), fault(12.0, "end")],
            id="its own node was killed",
        ),
        pytest.param([*LOSS, told(24.0, "plan serving epoch=6"), AGAIN, STILL], id="it is being read again"),
        pytest.param([answer(pieces=[30.0, 30.1], ended=30.2)], id="nobody was lost"),
        pytest.param(
            [{"kind": "orphan", "at": at, "pid": 9, "command": "worker"} for at in (30.0, 36.0)],
            id="a child that ends soon",
        ),
        pytest.param(
            [usage(at, rss_bytes=(100 + at % 30) * MB) for at in range(0, 120, 6)], id="memory strays"
        ),
        pytest.param([member(20.0, "gone"), status(25.0, "one", "two")], id="gone a moment ago"),
        pytest.param(
            [member(20.0, "gone"), member(25.0, "started"), status(60.0, "one", "two")], id="it came back"
        ),
        pytest.param([member(20.0, "revoked"), status(50.0, "one")], id="revoked and out"),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(records: list[Record]) -> None:
    assert judge(log_of(*records)) == []


def test_more_than_one_letter_is_no_text_of_a_client_that_left() -> None:
    assert [each.oracle for each in judge(log_of(answer(outcome="left", text="A dog")))] == ["altered"]


@pytest.mark.parametrize(
    ("vector", "found"),
    [
        ("[[0.600006, -0.8]]", []),
        ("[[0.6, -0.79]]", ["altered"]),
        ("[[0.6]]", ["altered"]),
        ("[]", ["altered"]),
    ],
)
def test_vectors_may_be_rounded_otherwise_and_no_more(vector: str, found: list[str]) -> None:
    reference = {"kind": "reference", "at": -4.0, "question": "v", "text": "[[0.6, -0.8]]", "took_s": 0.1}
    given = answer(question="v", form="embeddings", text=vector, pieces=[11.0])
    assert [each.oracle for each in judge(log_of(reference, given))] == found
    as_text = answer(question="v", form="chat", text="[[0.600006, -0.8]]", pieces=[11.0])
    assert [each.oracle for each in judge(log_of(reference, as_text))] == ["altered"]


def test_a_run_that_was_broken_off_has_not_settled() -> None:
    assert [each.oracle for each in judge(log_of(answer())[:-1])] == ["settled"]


def test_where_the_time_of_a_pause_went() -> None:
    [pause] = pauses(
        log_of(
            *LOSS,
            told(25.0, "plan failed epoch=6: two was lost"),
            told(27.0, "plan proposed epoch=7 mode=solo stages=1: fits"),
            told(31.0, "plan serving epoch=7 mode=solo"),
            told(31.1, "plan failed epoch=5: it had served before"),
            told(31.5, "request resumed elsewhere events=3 node=one cause=two", name="client"),
            told(31.6, "request resumed elsewhere events=9 node=one cause=two", name="client"),
            answer(at=19.0, pieces=[19.5, 34.0, 34.1], ended=34.2, seams=[1]),
        )
    )
    assert pause.fault == "kill-node two"
    assert pause.parts == pytest.approx(
        {
            "detection": 2.6,
            "waiting for a plan": 0.1,
            "failed plans": 4.3,
            "loading": 4.0,
            "reaching": 0.6,
            "computing": 2.9,
        }
    )
    assert pause.failures == ("two was lost",)
    assert pause.length_s == pytest.approx(14.5)
    assert pause.still_s == pytest.approx(11.6)


def test_an_answer_that_is_lost_twice_before_its_next_word() -> None:
    [pause] = pauses(
        log_of(
            *LOSS,
            told(25.0, "plan serving epoch=6 mode=solo"),
            told(25.5, "request resumed elsewhere events=3 node=one cause=two", name="client"),
            fault(28.0, node="one", number=1),
            told(26.0, "plan broken epoch=5: another one, which drains"),
            told(30.0, "lost: one was lost: it no longer answers"),
            told(30.4, "engine lost url=http://one:6 error=EngineLost why=one was lost", name="client"),
            told(30.5, "plan proposed epoch=7 mode=solo stages=1: fits"),
            told(33.0, "plan serving epoch=7 mode=solo"),
            told(33.5, "request resumed elsewhere events=3 node=two cause=one", name="client"),
            answer(at=19.0, pieces=[19.5, 36.0, 36.1], ended=36.2, seams=[1, 1]),
        )
    )
    assert pause.losses == 2
    assert pause.parts == pytest.approx(
        {
            "detection": 2.6 + 2.0,
            "waiting for a plan": 0.1 + 0.5,
            "failed plans": 0.0,
            "loading": 2.3 + 2.5,
            "reaching": 0.5 + 0.5,
            "computing": 0.5 + 2.5 + 2.5,
        }
    )


@pytest.mark.parametrize(("fault_s", "losses"), [(24.0, 2), (26.0, 1)])
def test_a_plan_on_its_way_that_a_further_fault_ends_is_another_loss(fault_s: float, losses: int) -> None:
    [pause] = pauses(
        log_of(
            *LOSS,
            fault(fault_s, node="one", number=1),
            told(25.0, "plan failed epoch=6: one was lost"),
            told(27.0, "plan proposed epoch=7 mode=solo stages=1: fits"),
            told(35.0, "plan serving epoch=7 mode=solo"),
            RESUMED,
            STILL,
        )
    )
    assert pause.losses == losses
    assert pause.fault == "kill-node two"


def test_a_slow_answer_of_one_engine_was_being_computed() -> None:
    [pause] = pauses(log_of(*LOSS, SERVING, answer(at=19.0, pieces=[36.0, 36.1], ended=36.2)))
    assert pause.still_s == 0.0
    assert pause.fault == ""


def test_a_report_of_a_run() -> None:
    dropped = told(23.7, "plan dropped epoch=6: another one is better: fits on two")
    better = told(23.8, "plan proposed epoch=7 mode=solo stages=1: fits on two")
    serving = told(35.0, "plan serving epoch=7 mode=solo")
    records = log_of(*LOSS, dropped, better, serving, RESUMED, STILL, usage(20.0))
    document = report.document(records, judge(records), {"machine": "2 cores"})
    assert from_json(to_json(document)) == document
    tables = {table.title: table for table in document.tables}
    assert ("still", "No answer stands still for long while some node can hold the model.", "1") in tables[
        "What has to hold"
    ].rows
    assert tables["What has to hold"].note.endswith(
        "stood still for longer than that: 1, the longest for 15.2 s; the longest pause, with what computing "
        "took: 16.5 s"
    )
    assert tables["Answers"].rows == (("chat", "1", "1", "0", "0", "1"),)
    assert tables["The longest pauses"].rows[0][:6] == (
        "16.5",
        "15.2",
        "20",
        "fox via client",
        "1",
        "kill-node two",
    )
    why = "another one is better: fits on two"
    assert tables["The longest pauses"].rows[0][-1] == why
    assert tables["Why plans failed before they served"].rows == ((why, "1", "1.0"),)
    [still] = [each for each in judge(records) if each.oracle == "still"]
    assert still.text.endswith(f"; plans failed: {why}")
    assert "left out: fill-disk: no limits" in document.notes
