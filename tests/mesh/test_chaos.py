"""`mesh-llm lab chaos`: real nodes, real faults, and a log in which nothing is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mesh_llm.errors import MeshError
from mesh_llm.lab.chaos import oracles, records
from mesh_llm.lab.chaos.mesh import chaos_mesh
from mesh_llm.lab.chaos.pauses import pauses
from mesh_llm.lab.chaos.questions import EMBEDDINGS
from mesh_llm.lab.chaos.records import Asked, ChaosLog, Record
from mesh_llm.lab.chaos.run import run
from mesh_llm.lab.chaos.schedule import KINDS, Fault, draw
from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Running

SEED = 24
ASKED = ("json", "tools", "tokens")
"""Of a model that answers nonsense: what has no given form is not continued to the letter, as its tokens are
not those that a text is split into."""
STILL_S = 60.0
"""Generous: machines that others use take their time. `mesh-llm lab chaos` itself allows ten seconds."""


def check(found: Sequence[Record]) -> None:
    """Nothing is wrong, and no answer stood still for minutes."""
    assert [each for each in oracles.judge(found) if each.oracle != "still"] == []
    assert [each for each in pauses(found) if each.still_s > STILL_S] == []


def phases(found: Sequence[Record]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for each in oracles.of_kind(found, "fault"):
        told.setdefault(each["fault"], []).append(each["phase"])
    return told


def run_with(model: Path, file: Path, faults: tuple[Fault, ...], *, minutes: float) -> list[Record]:
    asked = Asked(seed=SEED, minutes=minutes, model=str(model), clients=2, faults=faults)
    log = ChaosLog(file)
    try:
        return asyncio.run(run(asked, log, tell=lambda _: None, only=ASKED))
    finally:
        log.close()


async def test_nothing_is_started_before_all_compute_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that came later would change words."""

    async def ensure(wanted: Sequence[str], progress: object) -> None:
        raise MeshError(f"{', '.join(wanted)} comes first")

    monkeypatch.setattr("mesh_llm.engine.build.ensure", ensure)
    with pytest.raises(MeshError, match="cpu comes first"):
        async with chaos_mesh(tmp_path, ChaosLog(None), model=None, embeddings=False, tell=lambda _: None):
            pytest.fail("nodes were started")


@pytest.mark.full
def test_a_few_faults(model: Path, tmp_path: Path) -> None:
    faults = (
        Fault(at_s=0.5, kind="jump-clock", node="one", for_s=2.0, amount=3600.0),
        Fault(at_s=0.6, kind="fill-disk", node="three", for_s=2.0),
        Fault(at_s=1.0, kind="kill-engine", node="two"),
        Fault(at_s=2.0, kind="kill-node", node="two", for_s=0.5),
    )
    found = run_with(model, tmp_path / "log", faults, minutes=0.1)
    check(found)
    assert phases(found) == {each.kind: ["begin", "end"] for each in faults}
    assert len(oracles.of_kind(found, "answer")) > 1
    # What is on the disk is enough to judge it, and to do it again.
    assert records.asked(records.read(tmp_path / "log")).faults == faults


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_fault(model: Path, tmp_path: Path, kind: str) -> None:
    fault = Fault(at_s=1.0, kind=kind, node=KINDS[kind].nodes[-1], for_s=KINDS[kind].for_s[0], amount=0.02)
    found = run_with(model, tmp_path / "log", (fault,), minutes=0.1)
    check(found)
    assert phases(found) == {kind: ["begin", "end"]}


@pytest.mark.full
def test_vectors_are_the_same_whatever_happens(libraries: dict[str, Path], tmp_path: Path) -> None:
    """Of a model that answers nothing else, split over all nodes."""
    path = tmp_path / "embedder.gguf"
    model = tiny_gguf.write(path, "bert", layers=8, hidden=128, feed_forward=512, context=1024)
    faults = (
        Fault(at_s=1.0, kind="kill-engine", node="two"),
        Fault(at_s=3.0, kind="kill-node", node="two", for_s=0.5),
    )
    asked = Asked(seed=SEED, minutes=0.1, model=str(model), clients=2, faults=faults, embeddings=True)
    found = asyncio.run(run(asked, ChaosLog(None), tell=lambda _: None))
    check(found)
    assert phases(found) == {each.kind: ["begin", "end"] for each in faults}
    assert {each["question"] for each in oracles.of_kind(found, "reference")} == set(EMBEDDINGS)
    assert "done" in {each["outcome"] for each in oracles.of_kind(found, "answer")}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_minutes(smollm2: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--minutes", "2", "--seed", str(SEED), "--model", str(smollm2), "--log", str(log), "--json")
    with Running([*MESH_LLM, "lab", "chaos", *options]) as chaos:
        ended = chaos.wait(within_s=600)
    found = records.read(log)
    check(found)
    assert len(records.asked(found).faults) == len(draw(seed=SEED, minutes=2))
    assert json.loads(ended.stdout)["name"] == "chaos"
