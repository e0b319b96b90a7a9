"""`mesh-llm bench grid`, `speculation` and `compare` with tiny generated models; nothing is left running."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from mesh_llm.results.document import from_json
from tests.support import tiny_gguf
from tests.support.command import mesh_llm, start

GRID_S = 240.0
"""Twenty seconds on two quiet cores: three engines, four workers, six answers."""


@pytest.fixture(scope="module")
def worded(smollm2: Path, libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with a tokenizer that makes few tokens of a text."""
    path = tmp_path_factory.mktemp("worded") / "worded.gguf"
    return tiny_gguf.write(path, "llama", layers=4, tokenizer=smollm2)


@pytest.mark.full
def test_the_smallest_grid_has_all_sides_and_the_published_figures(worded: Path, tmp_path: Path) -> None:
    options = ("--model", worded, "--nodes", "3", "--latency", "0,5", "--rounds", "1")
    ended = mesh_llm("bench", "grid", *options, "-o", tmp_path, "--json", within_s=GRID_S)
    assert ended.status == 0, ended.stderr
    found = from_json(ended.stdout)
    speeds, starts, spread = found.tables
    stock = any("stock" in column for column in speeds.columns)
    assert stock or "stock ggml-rpc is left out" in ended.stderr
    assert speeds.columns[:6] == (
        "nodes",
        "latency",
        "ours, tok/s",
        "vs baseline",
        "ours + drafts, tok/s",
        "vs baseline",
    )
    assert [row[:2] for row in speeds.rows] == [("1", "–"), ("3", "0 ms"), ("3", "5 ms")]
    assert [row[-2:] for row in speeds.rows[1:]] == [("60.2", "1.00 ×"), ("30.1", "0.50 ×")]
    assert len(spread.rows) == 2 * (2 + stock) + stock
    sent = {row[2]: float(row[4].removesuffix(" MB")) for row in starts.rows if row[1] == "5 ms"}
    assert 0 < sent["ours"] == pytest.approx(sent["ours + drafts"], rel=0.5)
    if stock:
        # All weights but the host's go over stock's links, and none over ours.
        assert sent["stock ggml-rpc"] > worded.stat().st_size / 3e6 > sent["ours"]
    assert any("not measured here" in note for note in found.notes)
    assert any("equal on all sides" in note for note in found.notes)
    assert {"grid.json", "grid.md", "grid.html"} <= {file.name for file in tmp_path.iterdir()}

    compared = mesh_llm("bench", "compare", tmp_path / "grid.json", tmp_path / "grid.json", "--json")
    assert compared.status == 0, compared.stderr
    document = json.loads(compared.stdout)["grid"]
    assert document["differ"] == 0
    assert len(document["changes"]) == len(found.figures)


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_grid_leaves_nothing_running(
    worded: Path, number: signal.Signals, status: int
) -> None:
    options = ("--model", worded, "--nodes", "2", "--latency", "0")
    with start("bench", "grid", *options) as running:
        running.until(lambda: "2 nodes, 0 ms" in running.stderr, what="a cell begins", within_s=GRID_S)
        children = psutil.Process(running.process.pid).children(recursive=True)
        running.signal(number)
        ended = running.wait(within_s=GRID_S)
    assert ended.status == status
    assert "Traceback" not in ended.stderr
    assert children
    assert [child.pid for child in children if child.is_running()] == []


@pytest.mark.full
def test_speculation_tells_of_every_kind_of_text(worded: Path) -> None:
    options = ("--model", worded, "--nodes", "2", "--latency", "0", "--quick", "--json")
    ended = mesh_llm("bench", "speculation", *options, within_s=GRID_S)
    assert ended.status == 0, ended.stderr
    (table,) = from_json(ended.stdout).tables
    kinds = ("prose", "code, edited", "JSON, edited")
    assert [row[:2] for row in table.rows] == [
        (kind, side) for kind in kinds for side in ("without", "from the text")
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("grid", "--nodes", "3,x"), 2, "--nodes 3,x: give numbers"),
        (("grid", "--nodes", "1"), 2, "--nodes: give counts between 2 and 9"),
        (("grid", "--latency", "-3"), 2, "--latency -3 is not a delay"),
        (("grid", "--model", "no-such-model"), 1, "no-such-model"),
        (("--resume",), 2, "--resume needs the folder"),
        (("--home", "/nowhere"), 1, "no node is running on /nowhere"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], status: int, said: str) -> None:
    ended = mesh_llm("bench", *arguments)
    assert ended.status == status
    assert ended.stderr.startswith("Error: ")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
