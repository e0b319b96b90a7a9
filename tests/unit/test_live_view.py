"""The live view as lines: what is seen in a wide terminal, in a narrow one, and of what others send."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_llm.cli import tables
from mesh_llm.cli.live_view import Line, LiveState, Size, frame, painted, rows_taken, width_of
from mesh_llm.cli.serve import quit_question
from mesh_llm.status_schema import Status, from_document
from mesh_llm.types import Progress

HOST, MINI = "a" * 64, "b" * 64


def node(id: str, name: str, role: str, **changes: Any) -> dict[str, Any]:
    link: dict[str, Any] = {"kind": "self", "rtt_ms": None, "bytes_per_s": 0}
    if role != "host":
        link = {"kind": "quic", "rtt_ms": 4.23, "bytes_per_s": 12_300}
    return {
        "id": id,
        "name": name,
        "role": role,
        "state": "serving",
        "reason": "",
        "standing": "alive",
        "memory_bytes": 16_000_000_000,
        "lent_bytes": 2_000_000_000,
        "link": link,
        **changes,
    }


def status(*nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "node": {"id": HOST, "name": "desk", "role": "host", "state": "serving", "reason": ""},
        "mesh": {"nodes": list(nodes or (node(HOST, "desk", "host"), node(MINI, "mini", "worker")))},
        "model": {
            "name": "Qwen3-8B",
            "layers": 36,
            "quantisation": "Q4_K_M",
            "context": 8192,
            "slots": 4,
            "draft": None,
        },
        "plan": {
            "mode": "split",
            "host": HOST,
            "head_on_worker": False,
            "predicted_tok_s": 25.0,
            "stages": [
                {"node": HOST, "first": 0, "last": 20},
                {"node": MINI, "first": 20, "last": 36},
            ],
            "excluded": [],
        },
        "engine": {"state": "ready", "decode_tok_s": 23.42, "prompt_tok_s": 310.0},
        "api": {"url": "http://127.0.0.1:9337", "key_needed": False},
        "console": {"url": None},
        **changes,
    }


def seen(document: dict[str, Any], **others: Any) -> LiveState:
    return LiveState(status=from_document(Status, document), **others)


def shown(scene: LiveState, columns: int = 80, rows: int = 24) -> list[str]:
    lines = frame(scene, Size(columns=columns, rows=rows))
    assert all(width_of(line) < columns for line in lines)
    assert len(lines) <= rows
    return [painted(line, colour=False) for line in lines]


def test_a_mesh_in_a_wide_terminal() -> None:
    assert shown(seen(status()), columns=72) == [
        "── desk host serving ─────────────────────────────────────── q quits ──",
        "speed  23.4 tok/s, predicted 25.0 tok/s; prompts 310 tok/s",
        "plan   split over 2 nodes, hosted by desk",
        "model  Qwen3-8B, Q4_K_M, 36 layers, 4 slots of 8192 tokens",
        "api    http://localhost:9337",
        "node  role    state    layers  memory             link  rtt     traffic",
        "desk  host    serving  0-19    2.0 GB of 16.0 GB  self  -       -",
        "mini  worker  serving  20-35   2.0 GB of 16.0 GB  quic  4.2 ms  12 kB/s",
    ]


def test_in_a_narrow_one_columns_are_left_out_before_words_are_cut() -> None:
    assert shown(seen(status()), columns=40) == [
        "── desk host serving ─────── q quits ──",
        "speed  23.4 tok/s, predicted 25.0 tok/…",
        "plan   split over 2 nodes, hosted by d…",
        "model  Qwen3-8B, Q4_K_M, 36 layers, 4…",
        "api    http://localhost:9337",
        "node  role    layers  link  rtt",
        "desk  host    0-19    self  -",
        "mini  worker  20-35   quic  4.2 ms",
    ]
    assert shown(seen(status()), columns=16)[-3:] == ["node  layers", "desk  0-19", "mini  20-35"]


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 20, 39, 200])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 9, 60])
def test_it_fits_into_any_window(columns: int, rows: int) -> None:
    scene = seen(
        status(),
        progress=[Progress(what="Fetching", done=1, total=3, unit="bytes")],
        events=["something", "else"],
        layers=True,
    )
    lines = frame(scene, Size(columns=columns, rows=rows))
    assert 1 <= len(lines) <= max(1, rows)
    assert all(width_of(line) <= max(1, columns - 1) for line in lines)


def test_what_matters_least_goes_first() -> None:
    nodes = [node(HOST, "desk", "host"), *(node(f"{n:064}", f"n{n}", "worker") for n in range(20))]
    scene = seen(status(*nodes), events=["once", "upon"])
    assert shown(scene, rows=30)[-2:] == ["once", "upon"]
    assert shown(scene, rows=28)[-1] == "upon"
    assert shown(scene, rows=12)[5:] == [
        "node  role    state    layers  memory             link  rtt     traffic",
        "desk  host    serving  0-19    2.0 GB of 16.0 GB  self  -       -",
        *(f"n{n}    worker  serving  -       2.0 GB of 16.0 GB  quic  4.2 ms  12 kB/s" for n in range(4)),
        "… and 16 more nodes",
    ]
    assert shown(scene, rows=7)[4:] == ["api    http://localhost:9337", "once", "upon"]
    assert len(shown(scene, rows=2)) == 2
    assert shown(scene, rows=1) == [shown(scene)[0]]


def test_before_the_node_answers() -> None:
    assert shown(LiveState(), columns=40) == ["── mesh-llm starting ─────── q quits ──"]
    assert shown(LiveState(keys=False), columns=40) == ["── mesh-llm starting ──────────────────"]


def test_while_it_waits_the_reason_is_the_first_thing() -> None:
    waiting = {"id": HOST, "name": "desk", "role": "standby", "state": "waiting", "reason": "need 9 GB"}
    document = status(node=waiting, plan=None, engine={"state": "none"}, model=None)
    document["api"]["url"] = None
    assert shown(seen(document), columns=40)[:2] == [
        "── desk standby waiting ──── q quits ──",
        "why  need 9 GB",
    ]


def test_bars() -> None:
    steps = [
        Progress(what="Fetching layers", done=450_000_000, total=1_000_000_000, unit="bytes"),
        Progress(what="Building", done=3, total=4),
        Progress(what="Measuring", done=0, total=0),
    ]
    assert shown(LiveState(progress=steps), columns=80)[1:] == [
        "Fetching layers ━━━━━━━━━━━─────────────  45 %  450 MB of 1.0 GB",
        "Building ━━━━━━━━━━━━━━━━━━──────  75 %",
        "Measuring …",
    ]
    assert shown(LiveState(progress=steps), columns=30)[1:] == [
        "Fetching layers  45 %  450 M…",
        "Building ━━━━━━━━━━────  75 %",
        "Measuring …",
    ]


def test_the_sentence_about_time_and_the_drafts_are_shown_once_there_is_something_to_say() -> None:
    document = status()
    token: dict[str, Any] = {"total_ms": 0.0, "parts": [], "sentence": "nothing measured yet"}
    document["engine"]["token"] = token
    draft = {"name": "Qwen3-0.6B", "depth": 8, "drafted": 0, "accepted": 0, "gain": None}
    document["model"]["draft"] = draft
    assert shown(seen(document)) == shown(seen(status()))
    token |= {"parts": [{"kind": "wire", "node": MINI, "ms": 44.0}], "sentence": "72 % is the link to mini"}
    draft |= {"drafted": 200, "accepted": 150, "gain": 1.5}
    lines = shown(seen(document), columns=100)
    assert "time    72 % is the link to mini" in lines
    assert (
        "drafts  by Qwen3-0.6B and the text: 150 of 200 tokens accepted, last 8 at once, 1.50 x as fast"
        in lines
    )


def test_which_layer_is_where() -> None:
    lines = shown(seen(status(), layers=True), rows=60)
    assert lines[8:11] == ["layer      node", "embedding  desk", "0          desk"]
    assert lines[-2:] == ["35         mini", "head       desk"]


def test_nothing_that_others_send_moves_the_cursor() -> None:
    evil = "x\x1b[2J\x07\r\n\u202e"
    document = status(node(HOST, evil, "host", link={"kind": evil, "rtt_ms": None, "bytes_per_s": 0}))
    document["node"]["reason"] = evil
    document["model"]["name"] = evil
    for line in frame(seen(document), Size(columns=200, rows=50)):
        assert painted(line, colour=False).isprintable()


def test_wide_letters_count_twice() -> None:
    document = status(node(HOST, "机器人" * 4, "host"), node(MINI, "mini", "worker"))
    lines = shown(seen(document), columns=60)
    table = lines[5:]
    assert table[1].startswith("机器人" * 4 + "  host")
    assert table[2].startswith("mini" + " " * 20 + "  worker")
    assert all(width_of(line) < 12 for line in frame(seen(document), Size(columns=12, rows=50)))


def test_colour_is_paint_and_nothing_else() -> None:
    for line in frame(seen(status()), Size(columns=80, rows=24)):
        coloured = painted(line, colour=True)
        plain = painted(line, colour=False)
        assert "\x1b" not in plain
        for code in ("1", "2", "31", "32", "33", "36", "0"):
            coloured = coloured.replace(f"\x1b[{code}m", "")
        assert coloured == plain
    assert "\x1b[32mserving\x1b[0m" in painted(
        frame(seen(status()), Size(columns=80, rows=9))[0], colour=True
    )


def test_what_a_client_has_free_is_of_no_interest() -> None:
    document = status(node(HOST, "desk", "host"), node(MINI, "lap", "client", lent_bytes=0))
    row = "lap   client  serving  20-35   -                  quic  4.2 ms  12 kB/s"
    assert shown(seen(document))[-1] == row


def test_rows_of_a_window_that_has_become_narrower() -> None:
    lines: list[Line] = [[("x" * 79, "")], [], [("x" * 40, "dim"), ("机器", "")]]
    assert [rows_taken(lines, columns) for columns in (80, 79, 44, 40, 10, 1)] == [*(3, 3, 4, 5, 14, 124)]


def test_a_node_that_is_suspected_stands_out() -> None:
    document = status(node(HOST, "desk", "host"), node(MINI, "mini", "worker", standing="suspect"))
    last = frame(seen(document), Size(columns=80, rows=24))[-1]
    assert last[0][1] == "bad"
    assert "suspect" in last[0][0]


def test_a_question_and_a_pause_come_first() -> None:
    own = {"id": HOST, "name": "desk", "role": "standby", "state": "serving", "reason": "", "resting": True}
    document = status(node={**own, "paused": "somebody uses the machine"})
    lines = shown(seen(document, question="q again stops it"), columns=72)
    assert lines[1:3] == ["q again stops it", "paused  somebody uses the machine"]


@pytest.mark.parametrize(
    ("role", "others", "question"),
    [
        ("host", [], ""),
        ("host", [("mini", "worker")], "mini may be using this node"),
        ("worker", [("mini", "host"), ("tablet", "client")], "2 others may be using this node"),
        ("standby", [("mini", "host")], ""),
        ("standby", [("mini", "host"), ("tablet", "client")], "tablet may be using this node"),
    ],
)
def test_whom_a_node_that_quits_would_leave(role: str, others: list[tuple[str, str]], question: str) -> None:
    own = {"id": HOST, "name": "desk", "role": role, "state": "serving", "reason": ""}
    nodes = [node(f"{number}" * 64, *each) for number, each in enumerate(others)]
    document = status(node(HOST, "desk", role), *nodes, node=own)
    asked = quit_question(from_document(Status, document))
    assert asked.partition(":")[0] == question


def test_one_that_is_lost_does_not_count() -> None:
    lost = node(MINI, "mini", "worker", standing="dead")
    assert quit_question(from_document(Status, status(node(HOST, "desk", "host"), lost))) == ""


@pytest.mark.parametrize(
    ("changes", "lent", "text"),
    [
        ({}, 2_000_000_000, "2.0 GB of 16.0 GB"),
        ({"lend": "idle"}, 0, "nothing at present, up to 16.0 GB (--lend idle)"),
        ({"lend": "idle", "resting": True, "paused": "it is hot"}, 0, "nothing: it is hot (--lend idle)"),
        ({"resting": True}, 0, "nothing: the model was unloaded here"),
        (
            {"resting": True, "paused": "it is hot"},
            2_000_000_000,
            "2.0 GB of 16.0 GB, until others have taken over: it is hot",
        ),
    ],
)
def test_what_is_lent_is_one_line(changes: dict[str, Any], lent: int, text: str) -> None:
    own = {"id": HOST, "name": "desk", "role": "host", "state": "serving", "reason": "", **changes}
    document = status(node(HOST, "desk", "host", lent_bytes=lent), node=own)
    assert tables.lends(from_document(Status, document)) == text
