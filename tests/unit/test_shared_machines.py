"""What is left of a machine where several nodes compute on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine import machine
from mesh_llm.local.hardware import equipped
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.predict import predict
from mesh_llm.planning.shared_machines import nodes_beside, shared, threads_of
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import NodeId, Prediction, Role, Stage
from tests.support.planning import gpu, mesh, model, node, speed

WIDE = model()


@pytest.mark.parametrize(
    ("cores", "nodes", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 3, 1), (1, 9, 1)]
)
def test_every_node_gets_as_many_threads_and_one_at_least(cores: int, nodes: int, threads: int) -> None:
    assert threads_of(cores, nodes) == threads
    assert shared(speed(40), cores, nodes) == speed(40 * threads / cores)


def test_who_shares_no_cores_has_all_that_was_measured() -> None:
    assert shared(speed(40), 0, 3) == speed(40)


def test_threads_are_shared_unless_they_are_given_or_a_gpu_computes(tmp_path: Path) -> None:
    plain, given = NodeConfig(home=tmp_path), NodeConfig(home=tmp_path, threads=1)

    assert equipped(plain, {}, None, (), None).facts()["cores"] == machine.threads()
    assert equipped(given, {}, None, (), None).facts()["cores"] == 0
    assert equipped(plain, {}, None, (gpu(8),), None).facts()["cores"] == 0


def test_only_nodes_that_are_there_and_compute_count() -> None:
    nodes = [
        node("a", machine="m"),
        node("b", machine="m"),
        node("c", machine="m", role=Role.CLIENT),
        node("d", machine="m", alive=False),
        node("e", machine="n"),
        node("f", machine=""),
        node("g", machine=""),
    ]

    assert nodes_beside(mesh(*nodes)) == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 1, "f": 1, "g": 1}


def halves(*nodes: Candidate) -> Prediction:
    stages = [
        Stage(node=NodeId(name), first=first, last=first + 20, weight_bytes=0, need_bytes=0, share=0.5)
        for name, first in (("a", 0), ("b", 20))
    ]
    found = predict(
        WIDE,
        stages,
        mesh(*nodes, rtt_ms=0),
        host=NodeId("a"),
        settings=CacheSettings(context=4096, slots=1),
    )
    assert found
    return found


def pair(**facts: Any) -> Prediction:
    return halves(node("a", 64, machine="m", **facts), node("b", 64, machine="m", **facts))


def test_a_token_takes_as_long_as_the_threads_that_run_need() -> None:
    own_threads, sharing = pair(), pair(cores=8)

    assert sharing.tok_s == pytest.approx(own_threads.tok_s / 2, rel=0.01)


def test_prompts_have_the_whole_machine_once_both_stages_are_at_work() -> None:
    own_threads, sharing = pair(), pair(cores=8)
    # But for the head's 0.4 GB: at 40 GB/s, and at half of that.
    alone = own_threads.first_token_s - 0.4 / 40

    # Four batches: the first one passes each half at half the speed, then all of it is busy.
    assert sharing.first_token_s - 0.4 / 20 == pytest.approx(alone * 5 / 4, rel=0.01)
