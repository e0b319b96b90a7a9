"""Models on demand in a mesh with a node that does not know of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, lab
from tests.support.waiting import until

OLD_NODE = """
import sys
from mesh_llm.peers.model_demand import Demands, ModelDemand
Demands.tell = lambda self: None
Demands.told_of = lambda self, fingerprint: iter(())
ModelDemand.settings = property(lambda self: None)
from mesh_llm.cli.entry import main
sys.exit(main())
"""
"""It neither tells nor reads demand, and takes every model for a pinned one, as older versions do."""


def answer(node: JoiningNode) -> tuple[int, str]:
    reply = node.ask("/v1/completions", {**TEXT, "model": "coder"})
    return reply.status, reply.json()["choices"][0]["text"] if reply.status == 200 else ""


@pytest.mark.full
def test_an_old_node_takes_a_model_on_demand_for_a_pinned_one(model: Path, tmp_path: Path) -> None:
    coder = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=8)
    with lab(model) as nodes:
        owner = nodes.create("owner")
        old = nodes.join(
            "old", owner, models=nodes.folder / "empty", program=(sys.executable, "-c", OLD_NODE)
        )
        loaded = mesh_llm("load", coder, "--on-demand", *PLAN, "--home", owner.home)
        assert loaded.status == 0, loaded.stderr
        status, text = answer(owner)
        assert status == 200
        # Whichever of both hosts it, the other one's clients are answered, too.
        until(lambda: answer(old) == (200, text), within_s=60, what="the old node answers")
