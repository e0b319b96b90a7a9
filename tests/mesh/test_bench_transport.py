"""`mesh-llm bench transport NODE`: the links that two running nodes have, and why they lack the others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.command import mesh_llm
from tests.support.joining import Lab, refused, said


@pytest.mark.full
def test_the_links_to_another_node(nodes: Lab) -> None:
    one = nodes.create("one")
    nodes.join("two", one)
    found = said(mesh_llm("bench", "transport", "two", "--sizes", "16384", "--json", "--home", one.home))
    assert found["title"] == "Links to two"
    round_trips, busy, rates, _, meaning = found["tables"]
    for table in (round_trips, busy, rates):
        assert table["columns"] == ["link", "16 KiB"]
        assert [row[0] for row in table["rows"]] == ["local", "quic"]
        assert all(float(cell) > 0 for row in table["rows"] for cell in row[1:])
    assert [row[0] for row in meaning["rows"]] == ["local", "quic"]
    assert [note.split(":")[0] for note in found["notes"]] == ["tcp", "relay", "tcp socket"]
    figures: list[dict[str, Any]] = found["figures"]
    assert all(len(figure["values"]) >= 1 for figure in figures)
    nobody = mesh_llm("bench", "transport", "three", "--json", "--home", one.home)
    assert refused(nobody) == "no other members are called 'three'"
