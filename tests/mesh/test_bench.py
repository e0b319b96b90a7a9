"""`mesh-llm bench` against a mesh of two: it asks, tells, can be stopped, and goes on where it was."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_llm.results.document import from_json
from tests.support.command import mesh_llm, start
from tests.support.joining import JoiningNode, lab
from tests.support.node import WAIT_S

BENCH_S = 300.0
"""A minute on two quiet cores: three rounds of six steps."""
SPLIT = ("--ctx-size", "2048", "--parallel", "2", "--layers", "one=0-9,two=10-29", "--hosting", "prefer")


@pytest.fixture(scope="module")
def host(model: Path) -> Iterator[JoiningNode]:
    with lab(model) as nodes:
        one = nodes.start("one", "--model", nodes.model, *SPLIT)
        one.until_said("Invite token: ")
        nodes.join("two", one)
        one.until_status(
            lambda status: status["engine"]["state"] == "ready" and len(status["plan"]["stages"]) == 2,
            what="a plan over both serves",
            within_s=WAIT_S,
        )
        yield one


@pytest.mark.full
def test_a_quick_run_tells_what_the_mesh_does(host: JoiningNode, tmp_path: Path) -> None:
    ended = mesh_llm("bench", "--quick", "--json", "--home", host.home, "-o", tmp_path, within_s=BENCH_S)
    assert ended.status == 0, ended.stderr
    found = from_json(ended.stdout)
    assert [table.title for table in found.tables] == [
        "First token by prompt length",
        "Streams at once",
        "Measured beside predicted",
        "Nodes",
        "Where a token's time goes",
    ]
    first, streams, predicted, nodes, _ = found.tables
    assert [row[0] for row in first.rows] == ["32", "256", "1,024"]
    assert [row[0] for row in streams.rows] == ["1", "4"]
    assert [row[0] for row in nodes.rows] == ["one", "two"]
    assert predicted.rows[0][0] == "decode, one stream"
    assert found.facts["links"].startswith("2 hops and ")
    assert all(len(figure.values) == 3 and min(figure.values) > 0 for figure in found.figures)
    assert "about" in ended.stderr, "how long it takes is said before"
    written = {file.name for file in tmp_path.iterdir()}
    assert {"mesh.json", "mesh.md", "mesh.html"} <= written
    assert "mesh.partial.json" not in written


@pytest.mark.full
def test_it_stops_at_once_and_goes_on_later(host: JoiningNode, tmp_path: Path) -> None:
    partial = tmp_path / "mesh.partial.json"
    with start("bench", "--quick", "--home", host.home, "-o", tmp_path) as running:
        running.until(partial.is_file, what="a step is measured", within_s=WAIT_S)
        running.signal(signal.SIGINT)
        ended = running.wait(within_s=WAIT_S)
    assert ended.status == 130
    assert "Traceback" not in ended.stderr
    before = json.loads(partial.read_text("utf-8"))["seen"]
    assert before
    anew = mesh_llm("bench", "--quick", "--home", host.home, "-o", tmp_path)
    assert (anew.status, partial.is_file()) == (1, True)
    assert "--resume goes on with it" in anew.stderr
    ended = mesh_llm(
        "bench", "--quick", "--resume", "--json", "--home", host.home, "-o", tmp_path, within_s=BENCH_S
    )
    assert ended.status == 0, ended.stderr
    figures = {figure.name: figure.values for figure in from_json(ended.stdout).figures}
    assert figures["first token, 32 tokens"][0] == before["prompt 32 0"]["first_s"]
    assert not partial.exists()
    again = mesh_llm("bench", "--quick", "--resume", "--home", host.home, "-o", tmp_path)
    assert again.status == 1
    assert again.stderr.startswith("Error: there is nothing to go on with")
