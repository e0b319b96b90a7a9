"""What a host tells of its plan: whole where it is right, harmless where it is not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mesh_llm import console, status_schema
from mesh_llm.cli.live_view import LiveState, Size, frame, painted
from mesh_llm.cli.status import show
from mesh_llm.report.history import _checked
from mesh_llm.report.status import plan_status
from mesh_llm.sanitise import refusal
from mesh_llm.status_schema import ServingStatus, Status, from_document, to_document
from mesh_llm.types import Exclusion, Mode, NodeId, Plan, Prediction, Stage

HOST, MINI, LEFT = (NodeId(sign * 64) for sign in "abc")


def told() -> dict[str, Any]:
    """As status.serving has it."""
    plan = Plan(
        mode=Mode.SPLIT,
        host=HOST,
        stages=(
            Stage(node=HOST, first=0, last=20, weight_bytes=2, need_bytes=3, share=0.6),
            Stage(node=MINI, first=20, last=36, weight_bytes=2, need_bytes=3, share=0.4, device="CUDA1"),
        ),
        context=4096,
        slots=2,
        head_on_worker=False,
        need_bytes=6,
        have_bytes=9,
        predicted=Prediction(tok_s=25.0, first_token_s=0.5, prompt_tok_s=900.0),
        excluded=(Exclusion(node=LEFT, reason="too far"),),
        reason="two are faster",
    )
    draft = {"name": "tiny", "depth": 8, "drafted": 4, "accepted": 3, "text_drafted": 1, "text_accepted": 1}
    stage: dict[str, Any] = {"node": MINI, "link": "quic", "pushes": True, "compute_ms": 3.5, "wait_ms": 9.0}
    crossed = {"sent_bytes": 4, "received_bytes": 5, "bytes_per_s": 6, "peak_bytes_per_s": 7}
    stage |= {"device": "CUDA1", "traffic": crossed, "pushed": {**crossed, "received_bytes": 0}}
    part = {"kind": "wire", "node": MINI, "ms": 4.0}
    return {
        "model": {
            "name": "Qwen3-8B",
            "fingerprint": "f" * 64,
            "size_bytes": 5_000_000_000,
            "layers": 36,
            "quantisation": "Q4_K_M",
            "context": 4096,
            "slots": 2,
            "draft": {**draft, "gain": 1.5, "off": None},
            "adapters": ["style"],
        },
        "plan": to_document(plan_status(plan, epoch=3)),
        "engine": {
            "state": "ready",
            "reason": "",
            "pid": 4711,
            "restarts": 0,
            "ready_s": 1.25,
            "buffers": {"model": 5},
            "weights_sent_bytes": 0,
            "weights_resident_bytes": 4,
            "decode_tok_s": 23.4,
            "prompt_tok_s": 310.0,
            "stages": [{**stage, "bytes_per_token": 4096}],
            "token": {
                "total_ms": 40.0,
                "parts": [part, {**part, "node": None}],
                "sentence": "it is the link",
            },
            "warnings": ["mini does not compute it"],
            "lanes": [{"number": 1, "state": "ready", "pid": 4711, "requests": 2, "ends": False}],
        },
    }


def read(document: object) -> dict[str, Any]:
    """As another node shows it."""
    found: dict[str, Any] = to_document(from_document(ServingStatus, document))
    return found


def shown(about: dict[str, Any]) -> str:
    """All that a person sees of it, in the table and in the live view."""
    link = {"kind": "quic", "rtt_ms": 4.0, "bytes_per_s": 12_300, "via": []}
    member: dict[str, Any] = {
        "role": "worker",
        "state": "serving",
        "reason": "",
        "standing": "alive",
        "link": link,
    }
    member |= {"memory_bytes": 9, "lent_bytes": 3}
    document = {
        "node": {"id": MINI, "name": "mini", "role": "worker", "state": "serving", "reason": ""},
        "mesh": {"nodes": [{**member, "id": HOST, "name": "desk"}, {**member, "id": MINI, "name": "mini"}]},
        **about,
        "api": {
            "url": None,
            "first_token": {"measured_s": 0.214, "prompt_tokens": 33, "predicted_s": None},
        },
        "console": {"url": None},
    }
    status = from_document(Status, document)
    show(status)
    lines = frame(LiveState(status=status, layers=True), Size(columns=80, rows=40))
    return "\n".join(painted(line, colour=False) for line in lines)


def test_what_is_right_is_kept() -> None:
    whole = told()
    assert read({**whole, "epoch": 3, "key": "secret"}) == whole
    text = shown(whole)
    assert "23.4 tok/s" in text
    assert "mini CUDA1" in text


def _places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*place, key))


HOSTILE: list[Any] = [
    None,
    "\x1b[2J\r\nElected",
    "x" * 100_000,
    10**4000,
    -1,
    True,
    [],
    {},
    [[[]]] * 1000,
    {"a": "b"},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
def test_whatever_is_told_can_be_shown(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    for place in _places(told()):
        document = copy.deepcopy(told())
        inner: Any = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        about = read(document)
        assert len(json.dumps(about)) < 25_000, place
        seen = shown(about) + capsys.readouterr().out
        assert not {"\x1b", "\r"} & set(seen), place


def test_nothing_at_all_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(read({})).startswith("── mini worker serving")


def test_a_refusal_is_one_short_line() -> None:
    assert refusal({"refused": "no\nroom\x1b[2J"}, "-") == "no?room?[2J"
    assert len(refusal({"refused": "x" * 10_000}, "-")) == 400
    assert refusal({"refused": 7}, "it gave no reason") == "it gave no reason"


@pytest.mark.parametrize("value", [10**400, -1, True, "1", float("inf"), float("nan")])
def test_points_that_are_none(value: object) -> None:
    assert _checked({"t": value}) is None
    assert (_checked({"t": 1, "tok_s": value}) or {})["tok_s"] is None


# -- the page --------------------------------------------------------------------------------------

SCRIPTS = Path(console.__file__).parent / "static"
CALLED = {
    "status": status_schema.Status,
    "plan": status_schema.PlanStatus,
    "engine": status_schema.EngineStatus,
    "model": status_schema.ModelStatus,
    "served": status_schema.ServedModelStatus,
    "replica": status_schema.ReplicaStatus,
    "draft": status_schema.DraftStatus,
    "token": status_schema.TokenStatus,
    "stage": status_schema.PlanStageStatus,
    "node": status_schema.MemberStatus,
}
"""What the page's scripts call the parts of the document."""
CHAIN = re.compile(rf"(?<![\w./])({'|'.join(CALLED)})((?:\??\.[a-z_]\w*)+)(?!\w)")
TAKEN_APART = re.compile(rf"{{([^{{}}]*)}} = ({'|'.join(CALLED)});")


def reads(script: str) -> Iterator[tuple[Any, list[str]]]:
    """Fields that a script reads, one of the other: `status.plan?.mode`, `const { plan } = status;`."""
    for name, chain in CHAIN.findall(script):
        yield CALLED[name], re.findall(r"\w+", chain)
    for names, name in TAKEN_APART.findall(script):
        yield from ((CALLED[name], [each.strip()]) for each in names.split(","))


def unknown(kind: Any, chain: list[str]) -> str:
    """The first of them that the schema lacks."""
    for name in chain:
        if not is_dataclass(kind):
            return ""
        known = get_type_hints(kind)
        # The page adds words of its own to each node; only the document's have an underscore.
        if name not in known:
            return "" if kind is status_schema.MemberStatus and "_" not in name else name
        kind = next((each for each in (known[name], *get_args(known[name])) if is_dataclass(each)), None)
        if "tuple" in str(known[name]):
            return ""
    return ""


def test_the_page_reads_only_what_the_schema_has() -> None:
    scripts = {
        file.name: re.sub(r'"[^"\n]*"', '""', file.read_text("utf-8")) for file in SCRIPTS.glob("*.js")
    }
    found = [(file, *each) for file, text in scripts.items() for each in reads(text)]
    assert len(found) > 60
    assert [(file, chain) for file, kind, chain in found if unknown(kind, chain)] == []


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("say(status.plan?.reason)", ""),
        ("say(status.plan?.cause)", "cause"),
        ("node.memory_byte + node.isAway", "memory_byte"),
        ("const { model, plans } = status;", "plans"),
        ("status.mesh.nodes.map(f)", ""),
        ("response.status.plans", ""),
    ],
)
def test_a_field_that_the_page_makes_up_is_found(script: str, missing: str) -> None:
    assert "".join(unknown(*each) for each in reads(script)) == missing
