"""Nodes, children and engines that die: the rest serves on, and takes them back when they return."""

from __future__ import annotations

import pytest

from tests.support.mesh import HEAL_S, SPARE_EPOCHS, MeshProcesses
from tests.support.waiting import until

KNOWN_S = 15.0
"""Three seconds on a machine that is not busy with others."""
EPOCHS = 3 + SPARE_EPOCHS
"""New plans that one loss may cost: without the lost one, and with it again."""


@pytest.mark.full
def test_killed_worker_node(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    lost = before.workers[0]

    trio.kill(lost)
    until(lambda: trio.nobody_lists(lost), within_s=KNOWN_S, what="everybody knows of the loss")
    after = trio.serving()

    assert lost not in {name for name, _, _ in after.stages}
    assert after.host == before.host
    assert before.epoch < after.epoch <= before.epoch + EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_killed_host_node(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()

    trio.kill(before.host)
    after = trio.serving()

    assert after.host in before.workers
    assert before.epoch < after.epoch <= before.epoch + EPOCHS
    assert trio.chat() == text


@pytest.mark.full
def test_killed_worker_child(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()
    child = trio.worker_child(before.workers[-1])

    child.kill()
    after = trio.serving(above=before.epoch)

    assert after.host == before.host
    assert before.epoch < after.epoch <= before.epoch + EPOCHS
    assert trio.worker_child(before.workers[-1]).pid != child.pid
    assert trio.chat() == text


@pytest.mark.full
def test_killed_engine(trio: MeshProcesses) -> None:
    before, text = trio.serving(), trio.chat()

    trio.nodes[before.host].engine().kill()
    after = trio.serving(above=before.epoch)

    assert (after.host, after.stages) == (before.host, before.stages)
    assert before.epoch < after.epoch <= before.epoch + EPOCHS
    assert trio.chat() == text
    until(lambda: trio.engines() == [after.engine], within_s=HEAL_S, what="one engine is left")
