"""Messages and facts as documents: what is written can be read, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from mesh_llm.defaults import MEMBER_BUCKETS
from mesh_llm.errors import MalformedMessage
from mesh_llm.lab.simulate.signing import seal
from mesh_llm.membership.fact_documents import (
    MEMBER_FACTS_BYTES,
    facts_from_document,
    facts_to_document,
    plan_from_document,
    plan_to_document,
    settings_from_document,
    settings_to_document,
)
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import (
    ENTRY_LIMIT,
    NODES_LIMIT,
    Ack,
    Compare,
    Entry,
    GuestMessage,
    Hears,
    Leave,
    Message,
    Ping,
    Summary,
    Update,
    Want,
    from_document,
    to_document,
)
from mesh_llm.membership.outbox import MEMBER_MESSAGE_BYTES, updates
from mesh_llm.membership.record import Record, read_record, record_text, told
from mesh_llm.membership.record_table import RecordTable
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.types import (
    Address,
    Demand,
    Device,
    DeviceKind,
    Exclusion,
    Fingerprint,
    HeldModel,
    HeldPart,
    HostingMode,
    Kernel,
    KernelSpeed,
    LentDevice,
    LinkFacts,
    LinkKind,
    Mode,
    NodeFacts,
    NodeId,
    Plan,
    Prediction,
    Role,
    ServingPlan,
    Speed,
    Stage,
    State,
)

ANN, BEN = NodeId("a" * 64), NodeId("b" * 64)
HUGE = (1 << 53) - 1

PLAN = Plan(
    mode=Mode.SPLIT,
    host=ANN,
    stages=(
        Stage(node=ANN, first=0, last=10, weight_bytes=5, need_bytes=6, share=0.25),
        Stage(node=BEN, first=10, last=40, weight_bytes=7, need_bytes=8, share=0.75),
    ),
    context=4096,
    slots=4,
    head_on_worker=True,
    need_bytes=14,
    have_bytes=20,
    predicted=Prediction(tok_s=12.5, first_token_s=0.5, prompt_tok_s=900.0),
    excluded=(Exclusion(node=NodeId("c" * 64), reason="too slow a link: 80 ms"),),
    reason="the fewest that hold it",
    moved="moved from cay to make room for coder, at the price of reading 7.0 GB",
)
SETTINGS = MeshSettings(
    version=3,
    model="smollm2",
    fingerprint=Fingerprint("f" * 64),
    alias="größe",
    context=2048,
    split=True,
    tensor_split=(3.0, 0.0, 1.5),
    layers=(("ann", 0, 10), ("ben", 10, 40)),
)
SHORT_PLAN = replace(PLAN, excluded=())
"""Whoever hosts another model than the default one tells reasons only to those who ask."""
FACTS = NodeFacts(
    name="Büro-PC",
    role=Role.NODE,
    version="1.2.3",
    engine="2026.10",
    splits=False,
    plain_lan=True,
    resting=True,
    paused="the machine runs on battery",
    address=Address(direct=("192.0.2.7:4000", "[2001:db8::1]:4001"), relay="https://relay.example:8443/"),
    machine="m1",
    memory_bytes=HUGE,
    machine_memory_bytes=2,
    max_memory_bytes=0,
    devices=(
        LentDevice(
            name="CUDA0",
            bytes=HUGE,
            layers=3,
            speed=Speed(read_bytes_per_s=1.0, flops_per_s=2.0, attention_per_s=3.0),
        ),
        LentDevice(name="CPU", bytes=7, experts_bytes=5),
    ),
    gpus=(Device(name="CUDA0", description="H", kind=DeviceKind.GPU, free_bytes=1, total_bytes=2),),
    gpu_layers=0,
    cpu_moe=3,
    hosting=HostingMode.NEVER,
    speed=Speed(
        read_bytes_per_s=4e10,
        flops_per_s=1e12,
        attention_per_s=1e11,
        kernels=(
            KernelSpeed(
                kernel=Kernel(kind="q4_1", width=576, rows=1536), read_bytes_per_s=1.5e9, flops_per_s=9e9
            ),
            KernelSpeed(
                kernel=Kernel(kind="q8_0", width=64, rows=32, experts=8, used=2),
                read_bytes_per_s=1e9,
                flops_per_s=2e9,
            ),
        ),
    ),
    cores=8,
    cpu_library="0123456789abcdef",
    builds=True,
    threads=4,
    machine_threads=16,
    models=(
        HeldModel(fingerprint=Fingerprint("f" * 64), name="smollm2", size_bytes=100),
        HeldModel(fingerprint=Fingerprint("e" * 64), name="embedder", size_bytes=10, encodes=True),
    ),
    part=HeldPart(fingerprint=Fingerprint("e" * 64), spans=((0, 4), (9, 12))),
    links=((BEN, LinkFacts(kind=LinkKind.QUIC, rtt_s=0.01)),),
    state=State.SERVING,
    reason="because",
    lent_bytes=9,
    serving=ServingPlan(epoch=4, plan=PLAN),
    also_parts=(HeldPart(fingerprint=Fingerprint("d" * 64), spans=((1, 2),)),),
    also_serving=(ServingPlan(epoch=5, plan=SHORT_PLAN, fingerprint=Fingerprint("d" * 64)),),
    replicas=(ServingPlan(epoch=7, plan=SHORT_PLAN, fingerprint=Fingerprint("d" * 64), replica=1),),
    crowded=(5, 7),
    failing=(Fingerprint("a" * 64),),
    starting=(ServingPlan(epoch=6, plan=SHORT_PLAN, settings_version=2, fingerprint=Fingerprint("c" * 64)),),
    demand=(
        Demand(fingerprint=Fingerprint("d" * 64), wanted=True, reason="because", hopeless=True),
        Demand(fingerprint=Fingerprint("e" * 64), idle_since=7, goes_for=Fingerprint("d" * 64)),
    ),
)
PLAIN = NodeFacts(name="n", role=Role.CLIENT, version="1")


def through_json(document: object) -> object:
    return json.loads(json.dumps(document))


def a_record(node: NodeId = ANN, facts: NodeFacts = FACTS, standing: Standing = Standing.ALIVE) -> Record:
    left = standing is Standing.LEFT
    record = Record(
        node=node, incarnation=1_700_000_000_000, sequence=2, standing=standing, facts=facts, left=left
    )
    return replace(record, signed=seal(record_text(record)))


MESSAGES: list[Message] = [
    Ping(number=1, incarnation=HUGE, digest=(1 << 64) - 1, hears=5, keep=True),
    Ack(number=1, incarnation=0, digest=0),
    Ack(number=1, incarnation=0, digest=0, ask=True),
    Hears(nodes=(ANN, BEN)),
    Update(
        records=(
            told(a_record()),
            told(a_record(BEN, PLAIN, Standing.SUSPECT)),
            told(a_record(BEN, PLAIN, Standing.DEAD)).hint(),
        )
    ),
    Compare(buckets=((0, 77), (MEMBER_BUCKETS - 1, 1))),
    Summary(buckets=(1, 2), entries=(Entry(node=ANN, incarnation=4, standing=Standing.SUSPECT, sequence=5),)),
    Want(nodes=(BEN,)),
    Leave(record=told(a_record(BEN, PLAIN, Standing.LEFT))),
    GuestMessage(name="laptop", version="1", state=State.SERVING, reason="because"),
    GuestMessage(name="x", version="1", state=State.SERVING, reason="", wanted=(Fingerprint("d" * 64),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_went(message: Message) -> None:
    assert from_document(through_json(to_document(message))) == message


def test_a_record_is_what_was_signed() -> None:
    for record in (a_record(), a_record(BEN, PLAIN, Standing.DEAD), a_record(BEN, PLAIN, Standing.LEFT)):
        assert read_record(told(record)) == record
    wrong = [
        replace(told(a_record()), node=BEN),
        replace(told(a_record()), incarnation=5),
        replace(told(a_record()), sequence=3),
        replace(told(a_record()), standing=Standing.LEFT),
        replace(told(a_record()), signed=seal("[]")),
        replace(told(a_record()), signed=seal("{" * 100_000)),
        replace(told(a_record()), signed=seal('{"id":1}')),
    ]
    for told_wrong in wrong:
        with pytest.raises(MalformedMessage):
            read_record(told_wrong)


@pytest.mark.parametrize("facts", [FACTS, PLAIN], ids=["all", "least"])
def test_facts_come_back_as_they_went(facts: NodeFacts) -> None:
    assert facts_from_document(through_json(facts_to_document(facts))) == facts


def test_defaults_are_not_sent() -> None:
    assert facts_to_document(PLAIN) == {"name": "n", "role": "client", "version": "1"}


def test_every_field_of_the_facts_is_sent() -> None:
    names = set(NodeFacts.__dataclass_fields__)
    assert {name for name in names if getattr(FACTS, name) == getattr(PLAIN, name)} == set()
    assert set(facts_to_document(FACTS)) == names


def test_plans_and_settings_come_back_as_they_went() -> None:
    waiting = replace(PLAN, mode=Mode.WAITING, host=None, stages=(), predicted=None, excluded=())
    assert "moved" not in plan_to_document(replace(PLAN, moved=""))
    for plan in (PLAN, waiting, replace(PLAN, moved="")):
        assert plan_from_document(through_json(plan_to_document(plan))) == plan
    bare = replace(SETTINGS, context=None, tensor_split=None, layers=None)
    for settings in (SETTINGS, bare, replace(bare, digest="0f" * 32)):
        assert settings_from_document(through_json(settings_to_document(settings))) == settings


def test_stages_on_several_devices_come_back_and_older_versions_read_one() -> None:
    gpu = replace(PLAN.stages[1], last=25, share=0.375, device="CUDA0")
    memory = replace(PLAN.stages[1], first=25, share=0.375, device="CPU")
    plan = replace(PLAN, stages=(PLAN.stages[0], gpu, memory))
    document: dict[str, Any] = plan_to_document(plan)

    assert plan_from_document(through_json(document)) == plan
    older = plan_from_document(through_json({**document, "devices": None}))
    assert older.stages == (PLAN.stages[0], replace(PLAN.stages[1], weight_bytes=14, need_bytes=16))
    twice = {**document, "devices": [*document["devices"], document["devices"][-1]]}
    with pytest.raises(MalformedMessage):
        plan_from_document(twice)


def test_a_newer_version_may_say_more() -> None:
    document = {**facts_to_document(PLAIN), "mood": {"good": True}}
    assert facts_from_document(document) == PLAIN


def test_what_would_be_refused_is_not_written() -> None:
    wild = replace(
        FACTS,
        name="\x1b[2J" + "x" * 1000,
        reason="a\nb",
        address=Address(direct=("nonsense", "192.0.2.7:4000")),
        models=tuple(
            HeldModel(fingerprint=Fingerprint(str(n)), name="y" * 500, size_bytes=n) for n in range(999)
        ),
        links=tuple((NodeId(f"{n:064x}"), LinkFacts(kind=LinkKind.QUIC, rtt_s=0.1)) for n in range(999)),
        serving=ServingPlan(
            epoch=1,
            plan=replace(
                PLAN,
                excluded=tuple(Exclusion(node=NodeId(f"{n:064x}"), reason="ü" * 900) for n in range(999)),
            ),
        ),
    )
    document = facts_to_document(wild)
    assert len(json.dumps(document)) < MEMBER_FACTS_BYTES * 1.1
    read = facts_from_document(through_json(document))
    assert read.name == "?[2J" + "x" * 124
    assert read.reason == "a?b"
    assert read.address == Address(direct=("192.0.2.7:4000",))
    assert read.serving is not None
    assert read.serving.plan.key == PLAN.key
    assert read.models


def test_updates_are_cut_into_messages_of_bounded_size() -> None:
    fat = replace(
        FACTS,
        models=tuple(
            HeldModel(fingerprint=Fingerprint("f"), name="n" * 128, size_bytes=1) for _ in range(64)
        ),
    )
    records = [told(a_record(NodeId(f"{n:064x}"), fat if n % 2 else PLAIN)) for n in range(600)]
    batches = updates(records)
    assert [record for batch in batches for record in batch.records] == records
    for batch in batches:
        assert len(json.dumps(to_document(batch))) <= MEMBER_MESSAGE_BYTES
        assert from_document(through_json(to_document(batch))) == batch


def test_summaries_and_lists_are_of_bounded_size() -> None:
    records_table = RecordTable()
    for n in range(3000):
        records_table.put(a_record(NodeId(f"{n:064x}"), PLAIN))
    summaries = records_table.summaries(range(MEMBER_BUCKETS), ENTRY_LIMIT)
    assert sum(len(summary.entries) for summary in summaries) == 3000
    assert sorted(bucket for summary in summaries for bucket in summary.buckets) == list(
        range(MEMBER_BUCKETS)
    )
    messages: list[Message] = [*summaries, records_table.compare(), Want(nodes=(ANN,) * NODES_LIMIT)]
    for message in messages:
        assert len(json.dumps(to_document(message))) <= MEMBER_MESSAGE_BYTES
        assert from_document(through_json(to_document(message))) == message


def deep(levels: int) -> object:
    document: object = 1
    for _ in range(levels):
        document = [document]
    return document


HOSTILE: list[Any] = [
    None,
    True,
    1,
    "ping",
    [],
    {},
    {"kind": None},
    {"kind": "explode"},
    {"kind": ["ping"]},
    {"kind": "ping"},
    {**{f"f{n}": 0 for n in range(200)}, "kind": "leave", "i": 1},
    *(
        {"kind": "ping", "n": 1, "i": 1, "d": 1, "h": 1, "k": True, **wrong}
        for wrong in (
            {"n": -1},
            {"n": True},
            {"n": 1.0},
            {"n": 1 << 60},
            {"i": "1"},
            {"i": float("nan")},
            {"d": 1 << 64},
            {"h": None},
            {"k": 1},
        )
    ),
    {"kind": "hears", "nodes": "a" * 64},
    {"kind": "hears", "nodes": ["a" * 63]},
    {"kind": "hears", "nodes": ["A" * 64]},
    {"kind": "hears", "nodes": ["a" * 64 + "\n"]},
    {"kind": "hears", "nodes": ["a" * 64] * 100_000},
    {"kind": "hears", "nodes": deep(50)},
    {"kind": "want", "nodes": {"0": "a" * 64}},
    {"kind": "leave", "i": -5},
    {"kind": "compare", "buckets": [[MEMBER_BUCKETS, 1]]},
    {"kind": "compare", "buckets": [[-1, 1]]},
    {"kind": "compare", "buckets": [[0]]},
    {"kind": "compare", "buckets": [[0, 1]] * (MEMBER_BUCKETS + 1)},
    {"kind": "compare", "buckets": [[True, 1]]},
    {"kind": "summary", "buckets": [0], "entries": [["a" * 64, 1, "alive"]]},
    {"kind": "summary", "buckets": [0], "entries": [["a" * 64, 1, "undead", 1]]},
    {"kind": "summary", "buckets": [0], "entries": [["a" * 64, 1, ["alive"], 1]]},
    {"kind": "summary", "buckets": [0], "entries": [["a" * 64, 1, "alive", 1]] * (ENTRY_LIMIT + 1)},
    {"kind": "update", "records": [{"id": "a" * 64, "i": 1, "s": 0}]},
    {"kind": "update", "records": [{"id": "a" * 64, "i": 1, "s": 0, "is": "dead"}] * 1000},
    {"kind": "update", "records": [{"id": "a" * 64, "i": 1, "s": 0, "text": deep(100)}]},
    {"kind": "update", "records": [{"id": "a" * 64, "i": 1, "s": 0, "is": "left"}]},
    {"kind": "update", "records": [{"id": "a" * 64, "i": 1, "s": 0, "text": "{}", "signature": ""}]},
    {
        "kind": "update",
        "records": [
            {"id": "a" * 64, "i": 1, "s": 0, "text": '{"x":"\ud800"}', "signature": "", "credential": ""}
        ],
    },
    {"kind": "leave", "record": {"id": "a" * 64, "i": 1, "s": 0}},
    {"kind": "guest", "name": "\x1b[2J", "version": "1", "state": "serving", "reason": ""},
    {"kind": "update", "records": [{"id": 5, "i": 1, "s": 0, "is": "dead"}]},
]


@pytest.mark.parametrize("document", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_message_is_refused(document: object) -> None:
    with pytest.raises(MalformedMessage):
        from_document(document)


BAD_FACTS: list[dict[str, object]] = [
    {"name": 5},
    {"name": "n" * 129},
    {"name": "\x1b[2J"},
    {"name": "\ud800"},
    {"name": None},
    {"role": "king"},
    {"role": 1},
    {"version": []},
    {"splits": 1},
    {"memory_bytes": -1},
    {"memory_bytes": 1.5},
    {"memory_bytes": float("inf")},
    {"memory_bytes": 1 << 53},
    {"max_memory_bytes": -1},
    {"gpu_layers": -1},
    {"hosting": "sometimes"},
    {"state": "odd"},
    {"reason": "x" * 401},
    {"address": []},
    {"address": {"direct": ["192.0.2.1"]}},
    {"address": {"direct": ["192.0.2.1:0"]}},
    {"address": {"direct": ["192.0.2.1:99999"]}},
    {"address": {"direct": ["example.org:80"]}},
    {"address": {"direct": ["0.0.0.0:80"]}},
    {"address": {"direct": ["224.0.0.1:80"]}},
    {"address": {"direct": ["::1:80"]}},
    {"address": {"direct": ["192.0.2.1:80"] * 17}},
    {"address": {"direct": [None]}},
    {"address": {"relay": "file:///etc/passwd"}},
    {"address": {"relay": 5}},
    {"gpus": [{}] * 17},
    {"gpus": [{"name": "x"}]},
    {"models": [{"fingerprint": "f", "name": "n", "size_bytes": -1}]},
    {"models": [5]},
    {"models": {}},
    {"links": [{"node": "x", "kind": "quic", "rtt_s": 0.1}]},
    {"links": [{"node": ANN, "kind": "pigeon", "rtt_s": 0.1}]},
    {"links": [{"node": ANN, "kind": "quic", "rtt_s": float("nan")}]},
    {"links": [{"node": ANN, "kind": "quic", "rtt_s": -0.1}]},
    {"links": [{"node": ANN, "kind": "quic", "rtt_s": True}]},
    {"speed": {"read": "fast", "flops": 1}},
    {"speed": {"read": 10**400, "flops": 1}},
    {"serving": {"epoch": 1}},
    {"serving": {"epoch": -1, "plan": plan_to_document(PLAN)}},
]


@pytest.mark.parametrize("wrong", BAD_FACTS, ids=range(len(BAD_FACTS)))
def test_bad_facts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        facts_from_document({**facts_to_document(PLAIN), **wrong})


BAD_KERNELS: list[object] = [
    7,
    [["q4_0", 64, 64, 1, 1, 1.0]],
    [["q4_0", 0, 64, 1, 1, 1.0, 1.0]],
    [["q4_0", 1 << 60, 64, 1, 1, 1.0, 1.0]],
    [["q4_0", 64, 64, 1, 1, -1.0, 1.0]],
    [["q4_0", 64, 64, 1, 1, float("nan"), 1.0]],
    [["\x1b[2J", 64, 64, 1, 1, 1.0, 1.0]],
    [["q4_0", 64, 64, 1, 1, 1.0, 1.0]] * 25,
]


@pytest.mark.parametrize("kernels", BAD_KERNELS, ids=range(len(BAD_KERNELS)))
def test_bad_speeds_of_kernels_are_refused(kernels: object) -> None:
    speed = {"read": 1.0, "flops": 1.0, "attention": 1.0, "kernels": kernels}
    with pytest.raises(MalformedMessage):
        facts_from_document({**facts_to_document(PLAIN), "speed": speed})


def bad_plans() -> list[dict[str, object]]:
    stage = {"node": ANN, "first": 0, "last": 1, "weight_bytes": 0, "need_bytes": 0, "share": 0.5}
    return [
        {"mode": "both"},
        {"host": "me"},
        {"stages": [stage, stage]},
        {"stages": [{**stage, "first": 5}]},
        {"stages": [{**stage, "share": 1.5}]},
        {"stages": [{**stage, "share": float("nan")}]},
        {"stages": [stage] * 65},
        {"context": -1},
        {"slots": 1 << 40},
        {"head_on_worker": "yes"},
        {"predicted": {"tok_s": float("inf"), "first_token_s": 1}},
        {"excluded": [{"node": ANN}]},
        {"reason": "a\x00b"},
    ]


@pytest.mark.parametrize("wrong", bad_plans(), ids=range(len(bad_plans())))
def test_bad_plans_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        plan_from_document({**plan_to_document(PLAN), **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": -1},
        {"slots": "4"},
        {"context": 0.5},
        {"split": None},
        {"tensor_split": [1, float("nan")]},
        {"tensor_split": [-1]},
        {"tensor_split": [True]},
        {"tensor_split": [1] * 1000},
        {"layers": [["ann", 5, 1]]},
        {"layers": [["ann", 5]]},
        {"layers": [[5, 0, 1]]},
        {"layers": "all"},
        {"digest": ""},
        {"digest": "0f" * 31},
        {"digest": "0F" * 32},
        {"digest": 7},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        settings_from_document({**settings_to_document(SETTINGS), **wrong})


def test_whatever_is_done_to_a_message_it_is_read_or_refused() -> None:
    random = Random(5)
    values: list[object] = [
        None,
        True,
        -1,
        0,
        1 << 70,
        1e300,
        float("nan"),
        "",
        "x" * 5000,
        [],
        {},
        [[]],
        deep(30),
    ]

    def damaged(document: Any) -> Any:
        if isinstance(document, dict) and document and random.random() < 0.9:
            key = random.choice(list(document))
            return {**document, key: damaged(document[key])}
        if isinstance(document, list) and document and random.random() < 0.9:
            at = random.randrange(len(document))
            return [*document[:at], damaged(document[at]), *document[at + 1 :]]
        return random.choice(values)

    refused = 0
    for _ in range(5000):
        document = damaged(to_document(random.choice(MESSAGES)))
        try:
            message = from_document(document)
        except MalformedMessage:
            refused += 1
        else:
            assert from_document(through_json(to_document(message))) == message
    assert refused > 3000
