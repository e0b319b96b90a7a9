"""The benches' arithmetic and their tables; no bench is run and nothing is timed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import members, meters, revision
from bench import run as bench_run
from bench.plan import Plan
from bench.prediction import Outcome, Seen, prediction_notes, prediction_summary
from bench.report import Result, Row, Side, added_row, added_share_row, plain_row, ratio_row
from bench.revision import NOW, THEN, Tree
from bench.stats import Target, Verdict, at_least, at_most, below, judge
from mesh_llm.bench.client import TimedAnswer, read_events
from mesh_llm.bench.rigs import measured_delay_ms, moved
from mesh_llm.bench.rounds import Rounds, turns
from mesh_llm.bench.sides import LOCAL, agreement, passive_threads, shares
from mesh_llm.errors import MeshError
from mesh_llm.lab.conditions import Passage
from mesh_llm.results.samples import Sample, differences, ratios


def side(name: str, *values: float, unit: str = "tok/s") -> Side:
    return Side(name=name, sample=Sample(values), unit=unit)


def test_median_and_quartiles_of_an_odd_and_an_even_count() -> None:
    assert Sample((5.0, 1.0, 3.0, 2.0, 4.0)).median == 3.0
    assert Sample((5.0, 1.0, 3.0, 2.0, 4.0)).quartiles == (2.0, 4.0)
    assert Sample((1.0, 2.0, 3.0, 4.0)).median == 2.5
    assert Sample((1.0, 2.0, 3.0, 4.0)).quartiles == (1.75, 3.25)


def test_one_value_is_its_own_quartiles_and_has_no_spread() -> None:
    single = Sample((7.0,))
    assert (single.median, single.quartiles, single.interval, single.spread) == (
        7.0,
        (7.0, 7.0),
        (7.0, 7.0),
        0.0,
    )


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        Sample(())


def test_spread_is_the_distance_of_the_quartiles_over_the_median() -> None:
    assert Sample((90.0, 95.0, 100.0, 105.0, 110.0)).spread == pytest.approx(0.10)
    assert Sample((0.0, 0.0, 0.0)).spread == 0.0
    assert Sample((-1.0, 0.0, 1.0)).spread == float("inf")


def test_the_interval_of_the_median_narrows_with_the_number_of_rounds() -> None:
    assert Sample((3.0, 1.0, 2.0)).interval == (1.0, 3.0)
    assert Sample(tuple(float(n) for n in range(100))).interval == (40.0, 59.0)


def test_ratios_and_differences_are_taken_round_by_round() -> None:
    # The second round was slow for both: pairs agree, ratios of all medians would not.
    assert ratios([100.0, 50.0], [50.0, 25.0]) == Sample((2.0, 2.0))
    assert differences([12.0, 30.0], [10.0, 29.0]) == Sample((2.0, 1.0))


def test_sides_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("values", "spread", "target", "verdict"),
    [
        ((0.97,), 0.0, at_least(0.97), Verdict.MET),
        ((0.96,), 0.0, at_least(0.97), Verdict.MISSED),
        ((3.0,), 0.15, at_most(3.0), Verdict.MET),
        ((3.01,), 0.0, at_most(3.0), Verdict.MISSED),
        ((0.5,), 0.0, below(0.5), Verdict.MISSED),
        ((2.0,), 0.16, at_most(3.0), Verdict.NOISY_MET),
        ((4.0,), 0.16, at_most(3.0), Verdict.NOISY_MISSED),
        ((1.0, 2.0, 4.0), 0.01, at_most(3.0), Verdict.NOISY_MET),
        ((1.0, 2.0, 2.5), 0.01, at_most(3.0), Verdict.MET),
        ((4.0,), 0.01, None, Verdict.REPORTED),
        ((4.0,), 0.16, None, Verdict.NOISY),
    ],
)
def test_verdicts(values: tuple[float, ...], spread: float, target: Target | None, verdict: Verdict) -> None:
    assert judge(Sample(values), spread, target) is verdict


def test_each_side_goes_first_in_turn() -> None:
    assert [turns("abc", number) for number in range(3)] == [list("abc"), list("bca"), list("cab")]
    assert turns("ab", -1) == ["b", "a"]


def test_quick_chooses_the_smaller_number() -> None:
    assert (Plan().choose(full=60, quick=16), Plan(quick=True).choose(full=60, quick=16)) == (60, 16)


def test_rounds_end_when_their_time_is_up_but_never_before_the_first() -> None:
    seconds = iter([0.0, 4.0, 9.0, 11.0])
    cut = Rounds(wanted=9, budget_s=10.0, clock=lambda: next(seconds))
    assert list(cut) == [0, 1, 2]
    assert cut.note() == "rounds: 3 of the 9 planned: time was up, the machine is busy"
    assert list(Rounds(wanted=2, budget_s=0.0, clock=lambda: 0.0)) == [0]
    whole = Rounds(wanted=2, budget_s=1.0, clock=lambda: 0.0)
    assert (list(whole), whole.note()) == ([0, 1], "rounds: 2")


def test_an_added_time_spreads_over_the_other_sides_median() -> None:
    row = added_row(
        "first token",
        (side("gateway", 11.0, 12.0, 11.5, unit="ms"), side("engine", 10.0, 10.0, 10.0)),
        at_most(3.0),
    )
    assert row.figure == Sample((1.0, 2.0, 1.5))
    assert row.spread == pytest.approx(0.05)
    assert row.verdict is Verdict.MET


def test_a_comparison_of_too_few_rounds_proves_nothing() -> None:
    assert (
        ratio_row("decode", (side("node", 2.0), side("wheel", 1.0)), at_least(1.8)).verdict
        is Verdict.NOISY_MET
    )


def test_an_added_share_is_in_per_cent() -> None:
    row = added_share_row(
        "stream", (side("gateway", 101.0, 52.0, 51.5), side("engine", 100.0, 50.0, 50.0)), at_most(2.0)
    )
    assert row.figure.values == pytest.approx((1.0, 4.0, 3.0))
    assert row.verdict is Verdict.NOISY_MISSED


def test_the_worst_window_is_what_counts_where_asked() -> None:
    row = plain_row("CPU", side("node", 0.1, 0.1, 1.4, unit="%"), below(1.0), worst=True)
    assert row.verdict is Verdict.MISSED
    assert row.cells()[3] == "0.1 %, worst 1.4"


def test_what_the_demo_predicts_is_not_counted_as_a_prediction_by_a_usual_model() -> None:
    near, far = Seen(tok_s=100, first_s=1), Seen(tok_s=200, first_s=2)
    outcomes = [
        Outcome(name=name, usual=usual, predicted=near, measured=(near,), again=near, measured_again=(near,))
        for name, usual in (("case", far), ("demo", None))
    ]

    usual = prediction_summary(outcomes)[0].theirs
    assert usual
    assert (usual.name, usual.sample.values) == ("by Q4_K alone, of 2", (0.0,))
    assert prediction_notes(outcomes)[1:] == (
        "case: by Q4_K alone 200.0 tok/s, 2.000 s; after one answer 100.0 tok/s, 1.000 s",
        "demo: after one answer 100.0 tok/s, 1.000 s",
    )


def sample_rows() -> tuple[Row, ...]:
    return (
        ratio_row(
            "decode", (side("node", 98.0, 99.0, 100.0), side("direct", 100.0, 100.0, 100.0)), at_least(0.97)
        ),
        plain_row("RSS", side("node", 49.5, unit="MB"), None, theirs=side("engine|child", 1015.6, unit="MB")),
    )


def sample_result(*, quick: bool) -> Result:
    return Result(
        name="sample",
        title="A sample",
        command="python -m bench.run --only sample",
        facts={"commit": "abc1234-dirty", "hardware": "a CPU, 2 cores"},
        rows=sample_rows(),
        notes=("a note",),
        quick=quick,
    )


def test_the_markdown_of_a_result() -> None:
    assert sample_result(quick=False).markdown() == (
        "# A sample\n"
        "\n"
        "`python -m bench.run --only sample`\n"
        "\n"
        "|  |  |\n"
        "| --- | --- |\n"
        "| commit | abc1234-dirty |\n"
        "| hardware | a CPU, 2 cores |\n"
        "\n"
        "| measure | ours | other side | figure | quartiles | spread | median within | target | verdict |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| decode | node 99.0 (98.5–99.5) tok/s | direct 100.0 (100.0–100.0) tok/s | 0.990 × "
        "| 0.985–0.995 | 1.0% | 0.980–1.000 | ≥ 0.97 × | met |\n"
        "| RSS | node 49.5 MB | engine\\|child 1015.6 MB | 49.5 MB | – | – | – | – | reported |\n"
        "\n"
        "- a note\n"
    )


def test_results_are_written_as_markdown_and_json_and_quick_ones_apart(tmp_path: Path) -> None:
    sample_result(quick=False).write(tmp_path)
    sample_result(quick=True).write(tmp_path)
    names = {"sample.md", "sample.json", "sample.quick.md", "sample.quick.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    document = json.loads((tmp_path / "sample.json").read_text("utf-8"))
    assert document["facts"]["commit"] == "abc1234-dirty"
    row = document["rows"][0]
    assert (row["figure"], row["verdict"], row["target"]) == (0.99, "met", {"sign": "≥", "limit": 0.97})
    assert row["ours"]["values"] == [98.0, 99.0, 100.0]


def test_an_event_arrives_with_its_last_byte() -> None:
    pieces = [
        (0.1, b'data: {"content": "a"}\n\ndata: {"cont'),
        (0.2, b'ent": "b"}\n\n'),
        (0.3, b'data: {"content": "", "stop": true}\n\ndata: [DONE]\n\n'),
    ]
    stream = read_events(pieces, 0.4)
    assert (stream.arrived_s, stream.text, stream.total_s) == ((0.1, 0.2), "ab", 0.4)
    assert stream.gaps_s == pytest.approx([0.1])


# -- the split bench -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "workers", "expected"),
    [(30, 2, (15, 15)), (30, 3, (10, 10, 10)), (30, 4, (7, 7, 8, 8)), (6, 5, (1, 1, 1, 1, 2)), (4, 1, (4,))],
)
def test_layers_are_shared_as_evenly_as_they_go(layers: int, workers: int, expected: tuple[int, ...]) -> None:
    assert shares(layers, workers) == expected


def answers(*texts: str) -> list[TimedAnswer]:
    return [TimedAnswer(document={"content": text}, wall_s=1.0) for text in texts]


def test_stock_may_say_something_else_than_the_engine_alone_and_ours_may_not() -> None:
    same: dict[str, Any] = {LOCAL: answers("a", "a"), "ours, 2": answers("a", "a"), "stock, 2": answers("a")}
    assert agreement(same) == "texts at temperature 0: equal in every round"
    assert agreement(same | {"stock, 2": answers("b")}).endswith("equal in every round, but for stock, 2")
    with pytest.raises(MeshError, match="ours, 2 said something else"):
        agreement(same | {"ours, 2": answers("a", "b")})
    with pytest.raises(MeshError, match="the engine alone said different things"):
        agreement(same | {LOCAL: answers("a", "b")})


def passage(size_bytes: int, median_ms: float = 0.0, chunks: int = 1) -> Passage:
    return Passage(chunks=chunks, size_bytes=size_bytes, median_ms=median_ms, worst_ms=median_ms)


def test_bytes_between_two_readings_and_the_delay_of_lines_that_carried_something() -> None:
    before, after = [passage(10, 9.0), passage(0, chunks=0)], [passage(25, 11.0), passage(7, 10.0)]
    assert moved(before, after) == [15, 7]
    assert measured_delay_ms(before) == 9.0
    assert measured_delay_ms(after) == 10.5
    assert measured_delay_ms([]) == 0.0


def test_buffers_are_found_in_the_engines_log_by_device_and_kind() -> None:
    log = (
        "0.00.1 I load_tensors:          CPU model buffer size =    27.00 MiB\n"
        "0.00.1 I load_tensors:        MESH0 model buffer size =    21.50 MiB\n"
        "0.00.2 I llama_kv_cache:      MESH0 KV buffer size =    15.00 MiB\n"
        "0.00.2 I sched_reserve: RPC1[127.0.0.1:5000] compute buffer size =  1.00 MiB\n"
        "something else entirely\n"
    )
    assert meters.buffers(log) == {
        "CPU": {"model": 27 << 20},
        "MESH0": {"model": round(21.5 * (1 << 20)), "KV": 15 << 20},
        "RPC1[127.0.0.1:5000]": {"compute": 1 << 20},
    }


def test_pages_of_the_named_files_are_counted_and_no_others() -> None:
    smaps = (
        "7f00-7f10 r--s 00000000 08:01 42 /models/a model.gguf\n"
        "Size:                 64 kB\nRss:                  12 kB\nPss:                   6 kB\n"
        "7f10-7f20 rw-p 00000000 00:00 0 \nRss:                 100 kB\n"
        "7f20-7f30 r--s 00000000 08:01 43 /models/other.gguf\nRss:                  40 kB\n"
        "7f30-7f40 r--s 00001000 08:01 42 /models/a model.gguf\nRss:                   4 kB\n"
    )
    assert meters.mapped_bytes(smaps, {"/models/a model.gguf"}) == 16 << 10
    assert meters.mapped_bytes(smaps, set()) == 0


def test_the_environment_of_the_sides_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with passive_threads():
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with passive_threads():
        pass
    assert os.environ["OMP_WAIT_POLICY"] == "active"


# -- two commits -----------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    argv = ["git", *settings, *arguments]
    done = subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of a package named mesh_llm: the first says "old", the second "new"."""
    folder = tmp_path / "repository"
    package = folder / "src" / "mesh_llm"
    package.mkdir(parents=True)
    git(folder, "init", "--quiet")
    for word in ("old", "new"):
        (package / "__init__.py").write_text(f"word = {word!r}\n")
        (package / "__main__.py").write_text("import mesh_llm, sys\nprint(mesh_llm.word, *sys.argv[1:])\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", word)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_another_commit_is_refused_for_a_bench_that_cannot_set_one_up() -> None:
    assert bench_run.chosen(["gateway", "members"], against=True) == ["members", "gateway"]
    with pytest.raises(MeshError, match=r"--against: solo, links cannot .*; idle, members, .* can"):
        bench_run.chosen(["solo", "links", "overhead"], against=True)


def test_without_names_every_bench_runs_that_can() -> None:
    assert bench_run.chosen(None, against=True) == ["idle", "members", "overhead", "gateway", "mesh"]
    everything = bench_run.chosen(None, against=False)
    assert {"members", "solo"} <= set(everything)
    assert "gpu" not in everything


def test_the_other_commit_is_an_argument() -> None:
    options = bench_run.arguments(["--quick", "--only", "members", "--against", "HEAD~3"])
    assert (options.against, options.only, options.quick) == ("HEAD~3", ["members"], True)
    assert bench_run.arguments([]).against is None


async def test_each_side_runs_its_own_code(repository: Path, scratch: Path) -> None:
    async with revision.pair("HEAD~1", now="new-dirty", root=repository) as trees:
        said = {tree.name: (await tree.run("x", "y")).output for tree in trees.both}
        assert said == {NOW: ("new x y",), THEN: ("old x y",)}
        assert not trees.then.root.is_relative_to(repository)
        commit = git(repository, "rev-parse", "--short", "HEAD~1")
        assert (trees.now.commit, trees.then.commit) == ("new-dirty", commit)
    assert list(scratch.iterdir()) == []
    assert git(repository, "status", "--porcelain", "--untracked-files=no") == ""


async def test_what_is_no_commit_is_refused(repository: Path, scratch: Path) -> None:
    with pytest.raises(MeshError, match="'nonsense': no commit"):
        async with revision.pair("nonsense", now="new", root=repository):
            pytest.fail("it was set up")
    assert list(scratch.iterdir()) == []


async def test_a_commit_that_would_run_another_ones_code_is_refused(repository: Path, scratch: Path) -> None:
    git(repository, "mv", "src", "elsewhere")
    git(repository, "commit", "--quiet", "--message", "moved")
    git(repository, "mv", "elsewhere", "src")
    # The installed package is imported instead: nothing would have failed.
    with pytest.raises(MeshError, match=r"then \(.*\) would not run its own code: .* from /.*mesh_llm"):
        async with revision.pair("HEAD", now="new", root=repository):
            pytest.fail("it was set up")
    assert list(scratch.iterdir()) == []


async def test_the_tree_is_removed_when_the_bench_is_cancelled(repository: Path, scratch: Path) -> None:
    inside = asyncio.Event()

    async def bench() -> None:
        async with revision.checkout("HEAD~1", root=repository) as then:
            assert (then.root / "src" / "mesh_llm" / "__init__.py").read_text() == "word = 'old'\n"
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(bench(), name="bench")
    async with asyncio.timeout(60):
        await inside.wait()
        assert len(list(scratch.iterdir())) == 1
        task.cancel()
        await asyncio.wait((task,))
    assert task.cancelled()
    assert list(scratch.iterdir()) == []


def test_programs_of_a_tree_find_its_package_first(tmp_path: Path) -> None:
    tree = Tree(name=THEN, root=tmp_path, commit="abc1234")
    assert tree.environment == {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path}"}
    assert tree.command("--port", "0") == [sys.executable, "-P", "-m", "mesh_llm", "--port", "0"]
    assert tree.holds(str(tmp_path / "src" / "mesh_llm" / "__init__.py"))
    assert not tree.holds(str(tmp_path.parent / "mesh_llm" / "__init__.py"))


def test_now_is_divided_by_then_round_by_round() -> None:
    row = ratio_row(
        "idle", revision.sides({THEN: [2.0, 4.0, 1.0], NOW: [2.4, 4.4, 1.3]}, "ms/s"), at_most(1.3)
    )
    assert row.figure.values == pytest.approx((1.2, 1.1, 1.3))
    assert (row.ours.name, row.theirs and row.theirs.name) == (NOW, THEN)
    assert row.cells()[:4] == ("idle", "now 2.40 (1.85–3.40) ms/s", "then 2.00 (1.50–3.00) ms/s", "1.200 ×")


def test_results_of_two_commits_are_written_apart(tmp_path: Path) -> None:
    for quick in (False, True):
        dataclasses.replace(sample_result(quick=quick), against=True).write(tmp_path)
    names = {f"sample.against{quick}.{kind}" for quick in ("", ".quick") for kind in ("md", "json")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_cpu_time_is_told_for_each_node_and_simulated_second() -> None:
    phases = {phase.name: phase for phase in members.PHASES}
    answer = {"cpu_s": 6.0, "simulated_s": 2.0}
    assert (phases["idle"].figure(answer, 1000), phases["idle"].unit) == (3.0, "ms/s")
    assert (phases["newcomer"].figure(answer, 1000), phases["newcomer"].unit) == (6000.0, "ms")
    assert json.loads(phases["crash"].request(2000)) == {"phase": "crash", "seconds": 10.0, "nodes": 2}
    assert (phases["crash"].nodes(100), phases["idle"].nodes(100)) == (1, 0)


async def test_a_simulated_mesh_answers_phase_by_phase() -> None:
    here = Tree(name=NOW, root=revision.ROOT, commit="this tree")
    async with members.simulation(here, 20) as mesh:
        assert [await mesh.measure(phase) > 0 for phase in members.PHASES] == [True] * 4


async def test_a_simulated_mesh_of_another_tree_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "tree"
    link.mkdir()
    for name in ("src", "tests"):
        (link / name).symlink_to(revision.ROOT / name)
    with pytest.raises(MeshError, match="would be those of"):
        async with members.simulation(Tree(name=THEN, root=link, commit="abc1234"), 4):
            pytest.fail("it was measured")
