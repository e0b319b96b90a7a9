"""`mesh-llm bench transport` on this machine: every kind of link, each with all its figures."""

from __future__ import annotations

import sys

import pytest

from mesh_llm.results.document import from_json, to_json
from tests.support.command import mesh_llm
from tests.support.joining import refused


@pytest.mark.full
def test_every_kind_on_this_machine(libraries: dict[str, object]) -> None:
    ended = mesh_llm("bench", "transport", "--sizes", "2048", "--hidden", "512", "--json")
    assert ended.status == 0, ended.stderr
    document = from_json(ended.stdout)
    assert to_json(document) == ended.stdout
    kinds = ["unix socket", "tcp socket", "local", "tcp", "quic"]
    if sys.platform == "linux":
        kinds.append("relay")
    for table in document.tables:
        assert [row[0] for row in table.rows] == kinds
    assert document.tables[-1].title.endswith("2,048 bytes a token and hop")
    assert {len(figure.values) > 0 for figure in document.figures} == {True}
    assert len(document.figures) == len(kinds) * 3
    assert {"date", "hardware", "system", "engine", "mesh-llm", "load average"} <= document.facts.keys()
    for plot in document.plots:
        for each in plot.series:
            assert each.low[0] <= each.y[0] <= each.high[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sizes", "x"), "--sizes x: give bytes between 1 and 16777216"),
        (("--model", "x", "--hidden", "5"), "--model has a hidden size of its own: leave out --hidden"),
    ],
)
def test_what_cannot_be_is_told(arguments: tuple[str, ...], sentence: str) -> None:
    assert refused(mesh_llm("bench", "transport", *arguments), status=2) == sentence
