"""What `mesh-llm bench` decides and shows; nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mesh_llm.bench import grid, prompts
from mesh_llm.bench.client import TimedAnswer, TimedStream
from mesh_llm.bench.grid import Cell, CellFound, GridFound, GridSide, GridSpec
from mesh_llm.bench.grid_document import THEIR_SPEEDS, document
from mesh_llm.bench.mesh_document import document as mesh_document
from mesh_llm.bench.mesh_document import hops_per_token
from mesh_llm.bench.mesh_load import (
    QUICK,
    Kept,
    LoadFound,
    LoadSpec,
    Step,
    StepSeen,
    expected_s,
    serving,
    steps,
    together,
)
from mesh_llm.bench.transport import Carried, KindFigures, SizeFigures
from mesh_llm.bench.transport import document as links_document
from mesh_llm.cli.bench_grid import grid as grid_command
from mesh_llm.cli.measuring import command
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.lab.conditions import Conditions
from mesh_llm.lab.split import SplitPlan
from mesh_llm.status_schema import PlanStageStatus, Status, from_document
from tests.support.planning import model

GB = 10**9


def plan(layers: int = 12) -> SplitPlan:
    return SplitPlan(facts=replace(model(layers), files=(Path("/models/m.gguf"),)), libraries={}, workers=())


def answers(*speeds: float) -> list[TimedAnswer]:
    return [
        TimedAnswer(
            document={
                "content": "x",
                "timings": {"predicted_per_second": speed, "prompt_per_second": 10 * speed},
            },
            wall_s=1.0,
        )
        for speed in speeds
    ]


def found(*cells: tuple[int, float, float, float]) -> GridFound:
    """Nodes, milliseconds, our tok/s, stock's."""
    return GridFound(
        cells={
            Cell(nodes=nodes, latency_s=ms / 1000): CellFound(
                seen={
                    GridSide.UNSPLIT: answers(50, 50, 50),
                    GridSide.OURS: answers(ours, ours, ours),
                    GridSide.STOCK: answers(stock, stock, stock),
                },
                ready_s={GridSide.OURS: 1.0, GridSide.STOCK: 2.0},
                delay_ms={GridSide.OURS: ms, GridSide.STOCK: ms},
                loaded_bytes={GridSide.OURS: 250_000, GridSide.STOCK: 98_000_000} if ms else {},
            )
            for nodes, ms, ours, stock in cells
        },
        plan=plan(),
    )


def status(**engine: Any) -> Status:
    return from_document(
        Status,
        {
            "node": {"state": "serving"},
            "model": {"name": "m", "context": 4096, "slots": 2},
            "plan": {"predicted_tok_s": 10.0, "stages": []},
            "engine": {"state": "ready", **engine},
            "api": {"url": "http://127.0.0.1:1"},
        },
    )


# -- prompts ---------------------------------------------------------------------------------------


def test_no_two_prompts_begin_alike_and_each_is_long_enough() -> None:
    made = [prompts.unique(run, number, 500) for run in (1700000000, 1700000001) for number in range(20)]
    assert len({text[:24] for text in made}) == len(made)
    assert min(len(text.split()) for text in made) >= 500


def test_a_prompt_is_the_same_each_time() -> None:
    assert prompts.unique(7, 3, 100) == prompts.unique(7, 3, 100)


# -- the load --------------------------------------------------------------------------------------


def test_lengths_beyond_the_context_are_left_out() -> None:
    lengths = [step.size for step in steps(LoadSpec(rounds=1), 2048 + 4) if step.kind == "prompt"]
    assert lengths == [32, 128, 512, 2048]
    assert [step.size for step in steps(LoadSpec(rounds=1), 2048) if step.kind == "prompt"] == [32, 128, 512]


def test_steps_go_round_by_round() -> None:
    assert [step.round for step in steps(QUICK, 8192)] == [0] * 5 + [1] * 5 + [2] * 5


def test_what_a_step_takes_grows_with_the_prompt_and_the_streams() -> None:
    spec = LoadSpec(decoded=64)
    prompt = Step(kind="prompt", size=1000, round=0)
    assert expected_s(prompt, spec, prompt_tok_s=100, tok_s=10) == pytest.approx(10.4)
    streams = Step(kind="streams", size=4, round=0)
    assert expected_s(streams, spec, prompt_tok_s=32, tok_s=64) == pytest.approx(8.0)


def test_tokens_of_streams_count_from_the_first_of_all() -> None:
    one = TimedStream(arrived_s=(1.0, 2.0), total_s=3.0, text="", timings={"predicted_n": 3})
    two = TimedStream(arrived_s=(1.5, 4.0), total_s=5.0, text="", timings={"predicted_n": 2})
    seen = together([(0.0, one), (0.5, two)])
    assert seen.tok_s == pytest.approx(4 / 4.5)
    assert seen.gap_s == 2.5
    assert seen.first_s == 1.5


def test_what_was_measured_is_kept_and_taken_up_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "new", {"model": "a"})
    step, seen = Step(kind="prompt", size=32, round=0), StepSeen(first_s=0.5, tok_s=0.0, predicted_s=0.4)
    kept.add(step, seen)
    again = Kept(tmp_path / "new", {"model": "a"})
    again.resume()
    assert (again.run, again.seen) == (kept.run, {step.key: seen})
    with pytest.raises(MeshError, match="of another model"):
        Kept(tmp_path / "new", {"model": "b"}).resume()
    with pytest.raises(MeshError, match="a stopped measurement is in"):
        Kept(tmp_path / "new", {"model": "b"}).begin()
    again.done()
    Kept(tmp_path / "new", {"model": "a"}).begin()
    with pytest.raises(MeshError, match="nothing to go on with"):
        Kept(tmp_path / "new", {"model": "a"}).resume()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"about": {}}', '{"about": {}, "run": 1, "seen": {"x": {"y": 1}}}']
)
def test_a_damaged_file_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "mesh.partial.json").write_text(content)
    with pytest.raises(MeshError, match="is damaged"):
        Kept(tmp_path, {}).resume()


def test_a_mesh_that_does_not_serve_is_one_sentence() -> None:
    with pytest.raises(MeshError, match="does not serve a model yet: its state is waiting"):
        serving({"node": {"state": "waiting"}})


def test_hops_go_from_worker_to_worker_or_by_the_host() -> None:
    assert hops_per_token(status()) == 0
    assert hops_per_token(status(stages=[{"node": "a", "pushes": True}])) == 2
    assert hops_per_token(status(stages=[{"node": "a", "pushes": True}, {"node": "b", "pushes": True}])) == 3
    assert hops_per_token(status(stages=[{"node": "a", "pushes": False}, {"node": "b", "pushes": True}])) == 4


def test_what_a_plan_needs_is_told_as_planned_and_not_as_measured() -> None:
    told = status()
    stage = from_document(PlanStageStatus, {"node": "a", "first": 0, "last": 12, "need_bytes": 90_000_000})
    assert told.plan
    told = replace(told, plan=replace(told.plan, stages=(stage,)))

    found = mesh_document(
        LoadFound(steps={}, left_out=(), before=told, after=told), command="mesh-llm bench", facts={}
    )

    nodes = next(table for table in found.tables if table.title == "Nodes")
    assert dict(zip(nodes.columns, nodes.rows[0], strict=True))["planned memory"] == "90 MB"


@pytest.mark.parametrize(
    ("predicted", "cells"),
    [
        ((0.5, 0.4, 0.6), ("1 s", "0.5 s", "0.4–0.6 s", "-50 %")),
        ((None, None, None), ("1 s", "–", "–", "–")),
    ],
)
def test_predictions_are_told_with_their_range_for_prompts_of_the_same_length(
    predicted: tuple[float | None, ...], cells: tuple[str, ...]
) -> None:
    told = status()
    assert told.plan
    told = replace(told, plan=replace(told.plan, predicted_tok_s_low=8.0, predicted_tok_s_high=12.5))
    middle_s, low_s, high_s = predicted
    seen = {
        Step(kind="prompt", size=512, round=0): StepSeen(
            first_s=1.0,
            tok_s=0.0,
            prompt_tok_s=600.0,
            predicted_s=middle_s,
            predicted_low_s=low_s,
            predicted_high_s=high_s,
        ),
        Step(kind="streams", size=1, round=0): StepSeen(first_s=0.1, tok_s=8.0),
    }

    made = mesh_document(LoadFound(steps=seen, left_out=(), before=told, after=told), command="c", facts={})

    table = next(table for table in made.tables if table.title == "Measured beside predicted")
    assert table.rows == (
        ("decode, one stream", "8 tok/s", "10 tok/s", "8–12.5 tok/s", "+25 %"),
        ("first token, 512 tokens", *cells),
    )
    assert bool(table.note) is (predicted[0] is None)


def test_a_command_is_told_without_the_folder_of_its_results() -> None:
    assert command(["bench", "grid", "-o", "/tmp/x", "--quick"]) == "mesh-llm bench grid --quick"
    assert command(["bench", "--output=/tmp/x"]) == "mesh-llm bench"
    assert command(["lab", "chaos", "--out", "/tmp/x"]) == "mesh-llm lab chaos"


# -- links -----------------------------------------------------------------------------------------


def test_links_are_told_with_their_spread_and_what_is_missing() -> None:
    sizes = (
        SizeFigures(size=64, idle_s=(0.001, 0.002, 0.003), busy_s=(0.004,), bytes_s=(5e6,)),
        SizeFigures(size=16 << 20, idle_s=(1.0,), busy_s=(), bytes_s=(20e6,)),
    )
    kinds = [KindFigures(kind="quic", sizes=sizes), KindFigures(kind="tcp", missing="no plain LAN")]
    told = links_document(
        kinds, where="to two", carried=Carried(name="m", hidden=16), command="bench", facts={}
    )
    tables = {table.title: (table.columns[1:], table.rows) for table in told.tables}

    assert tables["Round trip, ms"] == (("64 B", "16 MiB"), (("quic", "2.000", "1000.000"),))
    assert tables["Round trip, ms, with a busy link beside it"][1] == (("quic", "4.000", "–"),)
    assert tables["Throughput, MB/s"][1] == (("quic", "5.0", "20.0"),)
    spread = tables["Spread: the middle half of round trips, ms"][1]
    assert spread == (("quic", "1.500–2.500", "1000.000–1000.000"),)
    meaning = tables["What that means for m: 64 bytes a token and hop"][1]
    assert meaning == (("quic", "1.000 ms", "2.00 ms", "3.00 ms", "5.00 ms", "1.6 ms"),)
    assert told.notes == ("tcp: no plain LAN",)
    [round_trips, _] = [plot.series[0] for plot in told.plots]
    assert (round_trips.low, round_trips.y, round_trips.high) == ((1.5, 1000), (2, 1000), (2.5, 1000))


# -- the grid --------------------------------------------------------------------------------------


def test_cells_are_every_count_with_every_latency_once() -> None:
    spec = GridSpec(model=Path("m"), nodes=(5, 3, 3), latencies_s=(0.01, 0.0))
    assert [(cell.nodes, cell.latency_s) for cell in spec.cells] == [(3, 0.0), (3, 0.01), (5, 0.0), (5, 0.01)]


@pytest.mark.parametrize("nodes", [(), (1,), (3, 10)])
def test_counts_of_nodes_have_bounds(nodes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="between 2 and 9"):
        GridSpec(model=Path("m"), nodes=nodes)


def test_every_link_of_a_cell_is_as_bad_as_was_asked_for() -> None:
    spec = GridSpec(model=Path("m"), jitter_s=0.003, bytes_s=5e6, loss=0.02)
    for side in (GridSide.OURS, GridSide.STOCK):
        setup = grid.setup(side, plan(12), Cell(nodes=3, latency_s=0.01), spec)
        assert setup.plan.link == Conditions(delay_s=0.01, jitter_s=0.003, bytes_s=5e6, loss=0.02)
    # A link cannot stray by more than its own delay.
    near = grid.setup(GridSide.OURS, plan(12), Cell(nodes=3, latency_s=0.001), spec)
    assert near.plan.link.jitter_s == 0.001


@pytest.fixture
def spec_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., GridSpec]:
    """What `bench grid` would measure with these options."""
    asked: list[GridSpec] = []

    async def measure(spec: GridSpec, **_: Any) -> None:
        asked.append(spec)
        raise MeshError("that is enough")

    def spec(*options: str) -> GridSpec:
        file = tmp_path / "m.gguf"
        file.touch()
        done = CliRunner().invoke(grid_command, ["--model", str(file), *options])
        assert isinstance(done.exception, MeshError), done.output
        return asked.pop()

    monkeypatch.setattr(grid, "measure", measure)
    return spec


def test_a_quick_grid_has_an_end_on_a_busy_machine(spec_of: Callable[..., GridSpec]) -> None:
    quick, whole = spec_of("--quick"), spec_of()
    assert [(cell.nodes, cell.latency_s) for cell in quick.cells] == [(3, 0), (3, 0.01), (5, 0), (5, 0.01)]
    assert len(quick.cells) * quick.cell_s <= 120
    assert quick.cell_s < whole.cell_s
    assert quick.sides == (GridSide.OURS, GridSide.STOCK)


def test_options_of_links_reach_the_grid_in_its_units(spec_of: Callable[..., GridSpec]) -> None:
    asked = spec_of("--latency", "10", "--jitter", "3", "--bandwidth", "5", "--loss", "2")
    assert asked.link(0.01) == Conditions(delay_s=0.01, jitter_s=0.003, bytes_s=5e6, loss=0.02)


def test_the_host_is_a_node_and_layers_are_spread_evenly() -> None:
    cell = Cell(nodes=5, latency_s=0.02)
    setup = grid.setup(GridSide.OURS, plan(12), cell, GridSpec(model=Path("m")))
    assert setup.plan.workers == (2, 2, 3, 3)  # the first two are the host's
    assert setup.plan.link == Conditions(delay_s=0.02)
    assert not setup.stock
    assert grid.setup(GridSide.STOCK, plan(12), cell, GridSpec(model=Path("m"))).stock
    drafts = grid.setup(GridSide.DRAFTS, plan(12), cell, GridSpec(model=Path("m"), draft=Path("d.gguf")))
    assert (drafts.plan.draft.model, drafts.plan.draft.text_depth > 0) == ("d.gguf", True)


def test_links_have_what_was_asked_for_and_never_more_jitter_than_delay() -> None:
    spec = GridSpec(model=Path("m"), latencies_s=(0.0, 0.01), jitter_s=0.005, bytes_s=1e6, loss=0.01)
    assert spec.link(0.01) == Conditions(delay_s=0.01, jitter_s=0.005, bytes_s=1e6, loss=0.01)
    assert spec.link(0.0).jitter_s == 0.0
    with pytest.raises(UsageError, match="loss"):
        GridSpec(model=Path("m"), loss=1.5)


def test_stock_is_asked_once_where_nothing_is_delayed() -> None:
    made = found((3, 0, 40, 20), (3, 10, 20, 8))
    slow = made.cells[Cell(nodes=3, latency_s=0.01)]
    slow.seen[GridSide.COMPUTE] = answers(12, 12, 12)
    slow.ready_s[GridSide.COMPUTE], slow.delay_ms[GridSide.COMPUTE] = 2.0, 10.0
    rows = document(made, command="c", facts={}).tables[0].rows
    assert [row[6:8] for row in rows[1:]] == [("20.0", "1.00 ×"), ("12.0", "0.60 ×")]


def test_hops_of_both_sides() -> None:
    cell = Cell(nodes=5, latency_s=0.0)
    assert (cell.hops(GridSide.OURS), cell.hops(GridSide.STOCK), cell.hops(GridSide.COMPUTE)) == (5, 8, 4)


def test_sides_run_at_once_as_far_as_memory_goes() -> None:
    sides = list(grid.SPLIT_SIDES)
    assert grid.groups(sides, size_bytes=GB, free_bytes=10 * GB) == [sides]
    assert grid.groups(sides, size_bytes=GB, free_bytes=4 * GB) == [sides[:2], sides[2:]]
    assert grid.groups(sides, size_bytes=GB, free_bytes=0) == [[side] for side in sides]


def test_the_table_has_theirs_beside_ours() -> None:
    made = document(found((3, 0, 40, 20), (3, 10, 20, 8)), command="c", facts={})
    table = made.tables[0]
    assert table.columns == (
        *("nodes", "latency", "ours, tok/s", "vs baseline", "stock ggml-rpc, tok/s", "vs baseline"),
        *("ours / stock", "theirs, tok/s", "vs baseline"),
    )
    assert table.rows == (
        ("1", "–", "50.0 (unsplit)", "–", "–", "–", "–", "–", "–"),
        ("3", "0 ms", "40.0", "1.00 ×", "20.0", "1.00 ×", "2.00 ×", "60.2", "1.00 ×"),
        ("3", "10 ms", "20.0", "0.50 ×", "8.0", "0.40 ×", "2.50 ×", "21.4", "0.36 ×"),
    )
    assert "not measured here" in made.notes[-1]
    assert [figure.name for figure in made.figures][:2] == ["unsplit: decode", "ours, 3 nodes, 0 ms: decode"]


def test_starts_are_told_with_what_went_over_links_and_how_prompts_are_read() -> None:
    made = document(found((3, 0, 40, 20), (3, 10, 20, 8)), command="c", facts={})
    table = next(table for table in made.tables if table.title == "Start and prompts")
    assert table.rows == (
        ("1", "–", "unsplit", "–", "–", "500 tok/s", "500–500"),
        ("3", "0 ms", "ours", "1.0 s", "–", "400 tok/s", "400–400"),
        ("3", "0 ms", "stock ggml-rpc", "2.0 s", "–", "200 tok/s", "200–200"),
        ("3", "10 ms", "ours", "1.0 s", "0.25 MB", "200 tok/s", "200–200"),
        ("3", "10 ms", "stock ggml-rpc", "2.0 s", "98.00 MB", "80 tok/s", "80–80"),
    )
    assert "theirs" in table.note
    assert [figure.name for figure in made.figures][-1] == "stock ggml-rpc, 3 nodes, 10 ms: prefill"


def test_their_curve_stands_only_where_shares_are_compared() -> None:
    plots = document(found((3, 0, 40, 20), (3, 10, 20, 8)), command="c", facts={}).plots
    speeds, shares = plots
    assert [series.label for series in speeds.series] == ["unsplit", "ours", "stock ggml-rpc"]
    theirs = shares.series[-1]
    assert "theirs" in theirs.label
    assert theirs.x == (0.0, 10.0)
    assert theirs.y == (1.0, THEIR_SPEEDS[3, 10] / THEIR_SPEEDS[3, 0])
