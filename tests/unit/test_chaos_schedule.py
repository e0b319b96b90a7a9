"""Faults that are drawn from a seed: the same each time, and never more than the mesh can bear."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from mesh_llm.cli import lab_chaos
from mesh_llm.cli.lab_chaos import chaos
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.lab.chaos import records
from mesh_llm.lab.chaos.records import Asked, ChaosLog
from mesh_llm.lab.chaos.schedule import FIRST_S, KINDS, NODES, RECOVERY_S, Fault, draw, moved_up
from mesh_llm.lab.chaos.shrink import shrunk

SEEDS = range(30)


def test_the_same_seed_draws_the_same_faults() -> None:
    assert draw(seed=5, minutes=10) == draw(seed=5, minutes=10)
    assert draw(seed=5, minutes=10) != draw(seed=6, minutes=10)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_node_is_always_untouched(seed: int) -> None:
    faults = draw(seed=seed, minutes=20)
    for moment in faults:
        down = {
            each.node
            for each in faults
            if KINDS[each.kind].takes_node
            and each.node in NODES
            and each.at_s <= moment.at_s < each.end_s + RECOVERY_S
        }
        assert len(down) < len(NODES)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_node_is_struck_while_it_recovers(seed: int) -> None:
    faults = draw(seed=seed, minutes=20)
    for index, fault in enumerate(faults):
        later = [each for each in faults[index + 1 :] if each.node == fault.node]
        assert all(each.at_s >= fault.end_s + RECOVERY_S for each in later)


def test_every_kind_happens_in_an_hour_and_all_is_over_at_its_end() -> None:
    faults = draw(seed=1, minutes=60)
    assert {each.kind for each in faults} == set(KINDS)
    assert all(FIRST_S <= each.at_s <= each.end_s <= 3600 for each in faults)
    assert all(each.node in KINDS[each.kind].nodes for each in faults)


def test_other_kinds_can_be_left_out() -> None:
    faults = draw(seed=1, minutes=5, kinds=["kill-engine", "cut-node"])
    assert {each.kind for each in faults} == {"kill-engine", "cut-node"}


def test_a_part_begins_at_once() -> None:
    faults = draw(seed=1, minutes=5)[-3:]
    moved = moved_up(faults)
    assert moved[0].at_s == FIRST_S
    assert [each.kind for each in moved] == [each.kind for each in faults]
    assert moved[2].at_s - moved[0].at_s == pytest.approx(faults[2].at_s - faults[0].at_s)
    assert moved_up(()) == ()


def test_a_log_holds_what_a_run_needs_to_be_done_again(tmp_path: Path) -> None:
    asked = Asked(
        seed=3,
        minutes=2.0,
        model=None,
        clients=4,
        faults=draw(seed=3, minutes=2),
        embeddings=True,
        command="mesh-llm lab chaos",
    )
    log = ChaosLog(tmp_path / "log")
    records.write_asked(log, asked, left_out={})
    log.begin()
    log.write("answer", number=1)
    log.close()
    found = records.read(tmp_path / "log")
    assert found == log.records
    assert found[0]["at"] <= found[1]["at"] == 0.0 <= found[2]["at"]
    assert records.asked(found) == asked
    del found[0]["embeddings"]
    assert not records.asked(found).embeddings, "a log of before"


@pytest.mark.parametrize("option", ["minutes", "seed", "every", "model", "clients", "only", "embeddings"])
@pytest.mark.parametrize("choice", ["--replay", "--shrink"])
def test_an_option_that_a_log_decides_is_refused_beside_it(choice: str, option: str) -> None:
    given = {"embeddings": [], "model": ["tiny"], "only": ["kill-engine"]}.get(option, ["2"])
    done = CliRunner().invoke(chaos, [f"--{option}", *given, choice, "log"])
    assert isinstance(done.exception, UsageError)
    assert done.exception.message == f"{choice} and --{option} cannot be used together"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shrink", "log", "--log", "log"], "--shrink and --log cannot be used together"),
        (["--shrink", "log", "--out", "folder"], "--shrink and --out cannot be used together"),
        (["--shrink", "log", "--replay", "log"], "--shrink and --replay cannot be used together"),
        (["--replay", "log", "--runs", "3"], "--replay and --runs cannot be used together"),
        (["--runs", "3"], "--runs is for --shrink"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: list[str], message: str) -> None:
    done = CliRunner().invoke(chaos, given)
    assert isinstance(done.exception, UsageError)
    assert done.exception.message == message


def test_the_faults_that_are_left_are_told_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = draw(seed=3, minutes=5)[:2]
    log = ChaosLog(tmp_path / "log")
    asked = Asked(seed=3, minutes=2.0, model=None, clients=4, faults=faults, embeddings=True)
    records.write_asked(log, asked, left_out={})
    log.write("settled", whole=False, why="two nodes are left", wrong=[])
    log.close()

    async def run(asked: Asked, log: ChaosLog, **_: object) -> list[records.Record]:
        assert asked.embeddings
        records.write_asked(log, asked, left_out={})
        log.write(
            "settled", whole=faults[1].kind not in [each.kind for each in asked.faults], why="", wrong=[]
        )
        return log.records

    monkeypatch.setattr(lab_chaos, "run", run)
    done = CliRunner().invoke(chaos, ["--shrink", str(tmp_path / "log"), "--json"], catch_exceptions=False)
    assert done.exit_code == 1
    assert [each["kind"] for each in json.loads(done.stdout)["faults"]] == [faults[1].kind]


@pytest.mark.parametrize("text", ["", "{}", "not JSON", '{"kind": "run", "format": 0}'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(MeshError, match="is not a log"):
        records.read(tmp_path / "log")


class Runs:
    """Fails where all the guilty ones are among the faults."""

    def __init__(self, guilty: set[Fault]) -> None:
        self._guilty = guilty
        self.count = 0

    async def fails(self, faults: Sequence[Fault]) -> bool:
        self.count += 1
        return self._guilty <= set(faults)


@pytest.mark.parametrize("guilty", [(0,), (17,), (3, 19), (0, 9, 20)])
def test_a_failure_shrinks_to_the_faults_that_cause_it(guilty: tuple[int, ...]) -> None:
    faults = draw(seed=2, minutes=20)
    wanted = {faults[index] for index in guilty}
    runs = Runs(wanted)
    kept = asyncio.run(shrunk(faults, runs.fails, runs=200))
    assert set(kept) == wanted
    assert list(kept) == sorted(kept, key=lambda each: each.at_s)


def test_shrinking_ends_after_so_many_runs() -> None:
    faults = draw(seed=2, minutes=20)
    runs = Runs({faults[0], faults[-1]})
    kept = asyncio.run(shrunk(faults, runs.fails, runs=5))
    assert runs.count == 5
    assert {faults[0], faults[-1]} <= set(kept)
