"""Nodes and children that stop without dying, and go on later."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from itertools import combinations

import psutil
import pytest

from tests.support.mesh import CHAT, HEAL_S, SPARE_EPOCHS, MeshProcesses
from tests.support.node import ENDLESS, NodeProcess
from tests.support.waiting import until

SLEEP_S = 15.0
"""A lid that was closed for a moment: longer than anybody waits for a silent node."""
APART_S = 45.0
"""Who is awake has given up a silent node long before; QUIC, on the other side, does so after 30 s without
a word (iroh's setting, measured)."""


@pytest.mark.full
def test_hanging_worker_child_is_replaced(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    child = trio.worker_child(before.workers[0])

    child.suspend()
    until(lambda: not child.is_running(), within_s=40, what="the child that hangs is ended")
    # Its host may not have heard of it yet.
    after = trio.serving(above=before.epoch)

    assert after.host == before.host
    assert before.epoch < after.epoch <= before.epoch + 3 + SPARE_EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_hanging_engine_is_replaced(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    engine = psutil.Process(before.engine)

    engine.suspend()
    until(lambda: not engine.is_running(), within_s=40, what="the engine that hangs is ended")
    after = trio.serving(above=before.epoch)

    assert after.host == before.host
    assert before.epoch < after.epoch <= before.epoch + 3 + SPARE_EPOCHS
    until(lambda: trio.engines() == [after.engine], within_s=HEAL_S, what="one engine is left")
    assert trio.chat() == text


@pytest.mark.full
def test_stopped_worker_node_is_left_out_and_comes_back(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    away = before.workers[0]
    rest = [name for name in trio.nodes if name != away]

    trio.freeze([away])
    try:
        without = trio.serving(among=rest)
        assert trio.chat(rest) == text
    finally:
        trio.thaw([away])
    after = trio.serving()

    assert before.epoch < without.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert without.epoch < after.epoch <= without.epoch + 3 + SPARE_EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_stopped_host_node_stands_back_when_it_goes_on(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    rest = list(before.workers)

    trio.freeze([before.host])
    try:
        without = trio.serving(among=rest)
        assert trio.chat(rest) == text
    finally:
        trio.thaw([before.host])
    after = trio.serving()

    assert before.epoch < without.epoch <= before.epoch + 2 + SPARE_EPOCHS
    assert without.epoch < after.epoch <= without.epoch + 3 + SPARE_EPOCHS
    # The plan that it hosted before has ended, and so has its engine.
    until(lambda: trio.engines() == [after.engine], within_s=40, what="one engine is left")
    assert trio.chat() == text


@pytest.mark.full
def test_stream_does_not_hang_with_a_stopped_host(trio: MeshProcesses) -> None:
    before = trio.serving()
    host, other = trio.nodes[before.host], trio.nodes[before.workers[0]]

    with other.stream("/v1/completions", {**ENDLESS, "max_tokens": 200}) as stream:
        stream.next()
        # The node alone: its engine goes on, and keeps its connections.
        host.signal(signal.SIGSTOP)
        try:
            # Broken off or continued elsewhere; a read that nothing comes to fails the test.
            events = list(stream.data())
            assert events
            after = trio.serving(among=before.workers)
        finally:
            host.signal(signal.SIGCONT)
    assert after.epoch > before.epoch
    trio.serving(above=before.epoch)


@pytest.mark.full
def test_mesh_sleeps_and_wakes(trio: MeshProcesses) -> None:
    sleep_and_wake(trio, SLEEP_S)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_mesh_wakes_one_by_one_and_has_lost_every_connection(trio: MeshProcesses) -> None:
    lost = sleep_and_wake(trio, SLEEP_S, apart_s=APART_S)
    assert lost == {frozenset(pair) for pair in combinations(trio.nodes, 2)}


def sleep_and_wake(trio: MeshProcesses, sleep_s: float, *, apart_s: float = 0.0) -> set[frozenset[str]]:
    """Everybody, and all is well again; the pairs of nodes whose connection was lost by that."""
    before, text = trio.serving(), trio.chat()
    logs = {name: node.home / "logs" / "node.log" for name, node in trio.nodes.items()}
    said = {name: len(path.read_text()) for name, path in logs.items()}

    trio.freeze(trio.nodes)
    # The condition is the time itself: everybody sleeps, and then those who have not woken yet.
    for name, asleep_s in zip(trio.nodes, (sleep_s, apart_s, apart_s), strict=True):
        time.sleep(asleep_s)
        trio.thaw([name])

    # For a moment they say what was true before: a loss may show only now, and the first answers fail.
    for node in trio.nodes.values():
        until(partial(is_answered, node), within_s=HEAL_S, what="an answer")
    after = trio.serving()
    assert before.epoch <= after.epoch <= before.epoch + 3 + SPARE_EPOCHS
    assert trio.chat() == text

    names = {id[:8]: name for name, id in trio.ids.items()}
    # Told by one side at least: the other may first hear of the new connection.
    return {
        frozenset((name, names[id]))
        for name, path in logs.items()
        for id in re.findall(r"peer lost node=(\w+)", path.read_text()[said[name] :])
    }


def is_answered(node: NodeProcess) -> bool:
    reply = node.ask("/v1/chat/completions", CHAT)
    assert reply.status in (200, 502, 503), reply.body
    return reply.status == 200
