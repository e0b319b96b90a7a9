"""Several models in a mesh with a node that knows of one."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import tiny_gguf
from tests.support.command import mesh_llm
from tests.support.joining import PLAN, TEXT, JoiningNode, lab
from tests.support.waiting import until

OLD_NODE = """
import sys
from mesh_llm.membership.checked_fields import Fields
items = Fields.items
Fields.items = lambda self, name, limit, read: () if name == "others" else items(self, name, limit, read)
from mesh_llm.cli.entry import main
sys.exit(main())
"""
"""It reads what older versions knew of the settings: the default model."""


def text_of(node: JoiningNode, model: str) -> str:
    reply = node.ask("/v1/completions", {**TEXT, "model": model})
    return str(reply.json()["choices"][0]["text"]) if reply.status == 200 else ""


def test_an_old_node_answers_with_the_default_model_and_others_have_both(model: Path, tmp_path: Path) -> None:
    coder = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=8)
    with lab(model) as nodes:
        owner = nodes.create("owner")
        old = nodes.join(
            "old", owner, models=nodes.folder / "empty", program=(sys.executable, "-c", OLD_NODE)
        )
        client = nodes.start("client", "--join", owner.token(role="client"), "--client").until_ready()
        loaded = mesh_llm("load", coder, *PLAN, "--home", owner.home)
        assert loaded.status == 0, loaded.stderr
        until(lambda: text_of(client, "coder"), within_s=60, what="the second model is served")
        texts = {name: {text_of(node, name) for node in (owner, client)} for name in ("tiny", "coder")}
        assert [len(found) for found in texts.values()] == [1, 1]
        assert texts["tiny"] != texts["coder"]
        assert [each["name"] for each in old.status()["models"]] == ["tiny"]
        # As in every mesh of one model, any name means it.
        assert {text_of(old, name) for name in ("tiny", "coder")} == texts["tiny"]
