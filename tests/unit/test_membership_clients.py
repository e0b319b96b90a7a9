"""What a client's messages are worth."""

from __future__ import annotations

from mesh_llm.membership.clients import from_client
from mesh_llm.membership.link import digest_of
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import Hears, Leave, Ping, Update
from mesh_llm.membership.record import Record
from mesh_llm.types import (
    Fingerprint,
    HeldModel,
    MeshSettings,
    Mode,
    NodeFacts,
    NodeId,
    Role,
    ServingPlan,
)
from tests.support.planning import plan_of

CLIENT, NODE = NodeId("c" * 64), NodeId("a" * 64)
PLAN = plan_of(mode=Mode.SOLO, host=CLIENT, reason="send me your prompts")
BOASTS = NodeFacts(
    name="laptop",
    role=Role.NODE,
    version="1",
    engine="2026",
    memory_bytes=1 << 40,
    machine="m",
    models=(HeldModel(fingerprint=Fingerprint("f"), name="m", size_bytes=1),),
    serving=ServingPlan(epoch=10**9, plan=PLAN),
    settings=MeshSettings(version=10**9, model="evil", fingerprint=Fingerprint("f"), alias="evil"),
)


def record(node: NodeId, standing: Standing = Standing.ALIVE, facts: NodeFacts | None = BOASTS) -> Record:
    return Record(node=node, incarnation=5, sequence=2, standing=standing, facts=facts)


def test_a_client_says_nothing_about_others() -> None:
    told = Update(records=(record(NODE, Standing.DEAD, None), record(NODE), record(CLIENT)))

    heard = from_client(CLIENT, told)

    assert isinstance(heard, Update)
    assert [entry.node for entry in heard.records] == [CLIENT]


def test_a_client_neither_hosts_nor_lends_nor_sets_anything() -> None:
    heard = from_client(CLIENT, Update(records=(record(CLIENT),)))

    assert isinstance(heard, Update)
    assert heard.records[0].facts == NodeFacts(name="laptop", role=Role.CLIENT, version="1")


def test_a_client_vouches_for_nobody() -> None:
    ping = Ping(number=1, incarnation=5, digest=7, hears=digest_of((NODE,)), keep=True)

    assert from_client(CLIENT, Hears(nodes=(NODE,))) == Hears(nodes=())
    assert from_client(CLIENT, ping) == Ping(
        number=1, incarnation=5, digest=7, hears=digest_of(()), keep=True
    )


def test_a_client_may_leave() -> None:
    assert from_client(CLIENT, Leave(incarnation=5)) == Leave(incarnation=5)
    gone = Update(records=(record(CLIENT, Standing.LEFT, None),))
    assert from_client(CLIENT, gone) == gone
