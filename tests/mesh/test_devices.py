"""A worker that lends several devices: each is a stage of its own, and the text is the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny_gguf
from tests.support.joining import PLAN, TEXT, JoiningNode, Lab
from tests.support.lone_engine import lone_engine
from tests.support.stand_ins import COMMAND

SMALL_GPUS = (*COMMAND, "5000000,5000000")
"""Each holds some of the 25 layers: the rest is for main memory."""
SMALL_FOR_EXPERTS = (*COMMAND, "9500000")
"""Four layers of the mixture below take 11.0 MB with scratch memory, 3.1 of it experts."""
WITHOUT_SWIGLU = (*COMMAND, "GLU")
PLACES = ["GPU0", "GPU1", "CPU"]


def text_of(node: JoiningNode) -> str:
    reply = node.ask("/v1/completions", TEXT)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


def serves(status: dict[str, Any], *, above: int = 0) -> bool:
    plan = status["plan"]
    on = [stage["device"] for stage in plan["stages"]] if plan else []
    return status["node"]["state"] == "serving" and on == [None, *PLACES] and plan["epoch"] > above


def computed(status: dict[str, Any]) -> bool:
    return all(stage["compute_ms"] > 0 for stage in status["engine"]["stages"])


def worker_children(node: JoiningNode) -> list[psutil.Process]:
    name = "mesh_llm.engine.children.worker"
    return [child for child in node.descendants() if name in child.cmdline()]


def test_devices_of_a_worker_are_stages(nodes: Lab, model: Path, libraries: dict[str, Path]) -> None:
    with lone_engine(model, libraries) as engine:
        expected = engine.ask("/v1/completions", TEXT).json()["choices"][0]["text"]
    one = nodes.start("one", "--model", model, *PLAN, "--layers", "one=0-4,two=5-29")
    one.until_said("Waiting for more peers")
    two = nodes.join("two", one, "--hosting", "never", program=SMALL_GPUS)

    before = one.until_status(serves, what="it serves over all devices")

    assert text_of(one) == text_of(two) == expected
    stages = before["plan"]["stages"]
    assert [stage["first"] for stage in stages] == [0, *(stage["last"] for stage in stages[:-1])]
    assert [stage["node"] == before["plan"]["host"] for stage in stages] == [True, False, False, False]
    seen = one.until_status(computed, what="each device has computed")["engine"]["stages"]
    assert [(stage["device"], stage["pushes"]) for stage in seen] == [(place, True) for place in PLACES]
    (lender,) = [node for node in before["mesh"]["nodes"] if node["name"] == "two"]
    assert lender["devices"] == PLACES

    children = worker_children(two)
    assert len(children) == len(PLACES)
    children[1].kill()
    one.until_status(lambda status: serves(status, above=before["plan"]["epoch"]), what="it serves again")
    assert text_of(one) == expected


@pytest.mark.full
def test_an_op_that_a_worker_does_not_know_is_named(nodes: Lab, model: Path) -> None:
    one = nodes.start("one", "--model", model, *PLAN, "--layers", "one=0-27,two=28-29")
    one.until_said("Waiting for more peers")
    two = nodes.join("two", one, "--hosting", "never", program=WITHOUT_SWIGLU)

    cost = "the host does, in at least 4 more hops for each token"
    warning = f"two does not compute SWIGLU (ffn_swiglu-28, 2 layers): {cost}"
    one.until_said(warning)
    status = two.until_status(lambda status: status["engine"]["warnings"], what="two is told, too")
    assert status["engine"]["warnings"] == [warning]


@pytest.mark.full
def test_experts_lie_beside_a_gpu_that_is_too_small_for_them(
    nodes: Lab, libraries: dict[str, Path], tmp_path: Path
) -> None:
    mixture = tiny_gguf.write(tmp_path / "mixture.gguf", "qwen3moe", layers=6, hidden=256)
    with lone_engine(mixture, libraries) as engine:
        expected = engine.ask("/v1/completions", TEXT).json()["choices"][0]["text"]
    one = nodes.start("one", "--model", mixture, *PLAN, "--layers", "one=0-1,two=2-5")
    one.until_said("Waiting for more peers")
    small = ("--hosting", "never", "--device", "GPU0", "--cpu-moe")
    two = nodes.join("two", one, *small, program=SMALL_FOR_EXPERTS)
    two.until_said("experts in main memory")

    one.until_status(lambda status: status["node"]["state"] == "serving", what="it serves")
    assert text_of(one) == expected
