"""The grid as a document: one table, theirs beside ours, and curves over latency."""

from __future__ import annotations

from mesh_llm.bench.grid import Cell, CellFound, GridFound, GridSide
from mesh_llm.bench.sides import decode_speed, prefill_speed
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series
from mesh_llm.results.samples import Sample

THEIRS = "llama.cpp RPC on an M4 Max (theirs)"
THEIR_SPEEDS = {
    **{(3, 0): 60.2, (3, 5): 30.1, (3, 10): 21.4, (3, 20): 12.6, (3, 30): 9.4},
    **{(4, 0): 57.1, (4, 5): 21.8, (4, 10): 15.7, (4, 20): 8.0},
    **{(5, 0): 52.8, (5, 5): 18.4},
}
"""tok/s by nodes and milliseconds, as published by the project that this one follows: GLM-4.7-Flash Q4_K_M on
one M4 Max, stock RPC over TCP, compute commands alone delayed. Another machine and another model: only the
shares of their own baseline (3 nodes, no delay) can be set beside ours."""
_THEIR_BASELINE = THEIR_SPEEDS[3, 0]
_THEIR_LOADING = (
    "theirs, a model of 17 GB over WiFi: stock RPC 16.88 GB in more than 14 minutes, their changed RPC "
    "0 bytes in 9 s"
)


def document(found: GridFound, *, command: str, facts: dict[str, str]) -> Document:
    sides = _sides(found)
    plan = found.plan
    model = (
        f"{plan.facts.files[0].name}, {plan.facts.size_bytes / 1e6:.0f} MB, {len(plan.facts.layers)} layers"
    )
    return Document(
        name="grid",
        title="Nodes by latency on one machine: ours, stock ggml-rpc, and the engine alone",
        command=command,
        facts={**facts, "model": model},
        tables=(_speeds(found, sides), _starts(found, sides), _spread(found, sides)),
        plots=(*_speed_plots(found, sides), *_share_plots(found, sides)),
        figures=tuple(_figures(found, sides)),
        notes=(*found.notes, f"{THEIRS}: {_THEIR_NOTE}"),
    )


_THEIR_NOTE = (
    "published figures of the project that this one follows, not measured here: GLM-4.7-Flash Q4_K_M, 3 to 5 "
    "nodes on one machine, compute commands alone delayed; only their shares of their own baseline compare"
)


def _sides(found: GridFound) -> list[GridSide]:
    seen = {side for cell in found.cells.values() for side in cell.seen}
    return [side for side in GridSide if side in seen and side is not GridSide.UNSPLIT]


def _as_measured(cell: CellFound, side: GridSide) -> GridSide:
    """Where nothing is slowed down, stock is asked once for both ways to slow it down."""
    return GridSide.STOCK if side is GridSide.COMPUTE and side not in cell.seen else side


def _sample(cell: CellFound, side: GridSide) -> Sample:
    return Sample.of([decode_speed(answer) for answer in cell.seen[_as_measured(cell, side)]])


def _prefill(cell: CellFound, side: GridSide) -> Sample:
    return Sample.of([prefill_speed(answer) for answer in cell.seen[_as_measured(cell, side)]])


def _unsplit(found: GridFound) -> Sample:
    return Sample.of(
        [value for cell in found.cells.values() for value in _sample(cell, GridSide.UNSPLIT).values]
    )


def _baseline(found: GridFound, side: GridSide) -> float:
    """The fewest nodes without delay, as in their table; the least delay where none was asked for."""
    return _sample(found.cells[min(found.cells, key=_order)], side).median


def _order(cell: Cell) -> tuple[float, int]:
    return cell.latency_s, cell.nodes


def _milliseconds(cell: Cell) -> float:
    return round(1000 * cell.latency_s, 3)


def _speeds(found: GridFound, sides: list[GridSide]) -> ResultTable:
    columns = ["nodes", "latency"]
    for side in sides:
        columns += [f"{side}, tok/s", "vs baseline"]
    both = GridSide.OURS in sides and GridSide.STOCK in sides
    columns += ["ours / stock"] if both else []
    columns += ["theirs, tok/s", "vs baseline"]
    rows = [("1", "–", f"{_unsplit(found).median:.1f} (unsplit)", *["–"] * (len(columns) - 3))]
    for cell, seen in found.cells.items():
        row = [str(cell.nodes), f"{_milliseconds(cell):g} ms"]
        for side in sides:
            median = _sample(seen, side).median
            row += [f"{median:.1f}", f"{median / _baseline(found, side):.2f} ×"]
        if both:
            row.append(f"{_sample(seen, GridSide.OURS).median / _sample(seen, GridSide.STOCK).median:.2f} ×")
        theirs = THEIR_SPEEDS.get((cell.nodes, round(_milliseconds(cell))))
        row += [f"{theirs:.1f}", f"{theirs / _THEIR_BASELINE:.2f} ×"] if theirs else ["–", "–"]
        rows.append(tuple(row))
    return ResultTable(
        title="Decode",
        columns=tuple(columns),
        rows=tuple(rows),
        note="vs baseline: of the same side with the fewest nodes and the least delay; theirs: see the notes",
    )


def _starts(found: GridFound, sides: list[GridSide]) -> ResultTable:
    alone = Sample.of(
        [value for cell in found.cells.values() for value in _prefill(cell, GridSide.UNSPLIT).values]
    )
    rows = [("1", "–", str(GridSide.UNSPLIT), "–", "–", *_prefill_cells(alone))]
    for cell, seen in found.cells.items():
        for side in [side for side in sides if side in seen.seen]:
            sent = seen.loaded_bytes.get(side)
            rows.append(
                (
                    str(cell.nodes),
                    f"{_milliseconds(cell):g} ms",
                    str(side),
                    f"{seen.ready_s[side]:.1f} s",
                    "–" if sent is None else f"{sent / 1e6:.2f} MB",
                    *_prefill_cells(_prefill(seen, side)),
                )
            )
    return ResultTable(
        title="Start and prompts",
        columns=("nodes", "latency", "side", "start", "sent until ready", "prefill", "quartiles"),
        rows=tuple(rows),
        note=f"sent: over all links, counted where they are slowed down; {_THEIR_LOADING}",
    )


def _prefill_cells(sample: Sample) -> tuple[str, str]:
    first, third = sample.quartiles
    return f"{sample.median:.0f} tok/s", f"{first:.0f}–{third:.0f}"


def _spread(found: GridFound, sides: list[GridSide]) -> ResultTable:
    rows = []
    for cell, seen in found.cells.items():
        for side in [side for side in sides if side in seen.seen]:
            sample = _sample(seen, side)
            first, third = sample.quartiles
            low, high = sample.interval
            rows.append(
                (
                    str(cell.nodes),
                    f"{_milliseconds(cell):g} ms",
                    str(side),
                    f"{sample.median:.1f}",
                    f"{first:.1f}–{third:.1f}",
                    f"{low:.1f}–{high:.1f}",
                    str(len(sample.values)),
                    f"{sample.median / _sample(seen, GridSide.UNSPLIT).median:.2f} ×",
                    f"{seen.delay_ms[side]:.2f} ms" if seen.delay_ms[side] else "–",
                )
            )
    columns = ("nodes", "latency", "side", "tok/s", "quartiles", "median within", "rounds", "of unsplit")
    return ResultTable(title="Spread", columns=(*columns, "measured delay"), rows=tuple(rows))


def _figures(found: GridFound, sides: list[GridSide]) -> list[Figure]:
    unsplit = Figure(
        name="unsplit: decode", unit="tok/s", values=_unsplit(found).values, higher_is_better=True
    )
    return [
        unsplit,
        *(
            Figure(
                name=f"{side}, {cell.nodes} nodes, {_milliseconds(cell):g} ms: {what}",
                unit="tok/s",
                values=sample(seen, side).values,
                higher_is_better=True,
            )
            for what, sample in (("decode", _sample), ("prefill", _prefill))
            for cell, seen in found.cells.items()
            for side in sides
        ),
    ]


def _speed_plots(found: GridFound, sides: list[GridSide]) -> list[Plot]:
    plots = []
    for nodes in sorted({cell.nodes for cell in found.cells}):
        cells = [cell for cell in found.cells if cell.nodes == nodes]
        x = tuple(_milliseconds(cell) for cell in cells)
        alone = _unsplit(found).median
        series = [Series(label=GridSide.UNSPLIT, x=x, y=(alone,) * len(x))]
        for side in sides:
            samples = [_sample(found.cells[cell], side) for cell in cells]
            series.append(
                Series(
                    label=side,
                    x=x,
                    y=tuple(sample.median for sample in samples),
                    low=tuple(sample.quartiles[0] for sample in samples),
                    high=tuple(sample.quartiles[1] for sample in samples),
                )
            )
        plots.append(
            Plot(
                title=f"Decode over {nodes} nodes",
                x_label="latency, one way, ms",
                y_label="tok/s",
                series=tuple(series),
            )
        )
    return plots


def _share_plots(found: GridFound, sides: list[GridSide]) -> list[Plot]:
    """Of its own baseline: here another machine's figures can stand beside ours."""
    plots = []
    for nodes in sorted({cell.nodes for cell in found.cells}):
        cells = [cell for cell in found.cells if cell.nodes == nodes]
        x = tuple(_milliseconds(cell) for cell in cells)
        series = [
            Series(
                label=side,
                x=x,
                y=tuple(_sample(found.cells[cell], side).median / _baseline(found, side) for cell in cells),
            )
            for side in sides
        ]
        theirs = {ms: speed for (count, ms), speed in THEIR_SPEEDS.items() if count == nodes and ms in x}
        if theirs:
            shares = tuple(speed / _THEIR_BASELINE for speed in theirs.values())
            series.append(Series(label=THEIRS, x=tuple(map(float, theirs)), y=shares))
        plots.append(
            Plot(
                title=f"{nodes} nodes: share of the side's own baseline",
                x_label="latency, one way, ms",
                y_label="of the baseline",
                series=tuple(series),
            )
        )
    return plots
