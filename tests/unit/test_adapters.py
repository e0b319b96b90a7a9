"""LoRA adapters: which files are some for a model, how settings carry them, who computes with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig, parse_scaled
from mesh_llm.errors import LinkRefused, MalformedMessage, MeshError, ModelError, UsageError
from mesh_llm.home import Home
from mesh_llm.local.own_settings import refuse_changes
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import Adapter, SideFile
from mesh_llm.models.adapters import check_adapter
from mesh_llm.planning.decide import decide
from mesh_llm.types import Fingerprint, HeldModel
from mesh_llm.worker.lending import Terms
from tests.support.planning import mesh, model, node, reasons, settings

STYLE = Adapter(file=SideFile(name="style", size_bytes=10, digest="ab" * 32), scale=0.5)
QUERY = "blk.0.attn_q.weight"
BASE = {"metadata": {"general.architecture": "llama"}, "tensors": [[QUERY, "f32", [64, 32], 0, 0]]}
LORA = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
GOOD = {f"{QUERY}.lora_a": [64, 4], f"{QUERY}.lora_b": [4, 32], "blk.0.attn_norm.weight": [64]}


def document(shapes: dict[str, list[int]], **metadata: str) -> dict[str, Any]:
    tensors = [[name, "f32", shape, 0, 0] for name, shape in shapes.items()]
    return {
        "metadata": LORA | {key.replace("_", "."): value for key, value in metadata.items()},
        "tensors": tensors,
    }


def test_an_adapter_for_the_model() -> None:
    check_adapter(Path("a.gguf"), document(GOOD), BASE)


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        (document(GOOD, general_type="model"), "this is not a LoRA adapter"),
        (document(GOOD, adapter_type="other"), "this is not a LoRA adapter"),
        (document(GOOD, general_architecture="qwen3"), "it is for qwen3, and the model is llama"),
        (document({"blk.0.attn_q.weight": [64, 4]}), "blk.0.attn_q.weight is no tensor of a LoRA adapter"),
        (document({"blk.7.attn_q.weight.lora_a": [64, 4]}), "the model has no tensor blk.7.attn_q.weight"),
        (document({f"{QUERY}.lora_a": [64, 4]}), f"its {QUERY} does not fit the model's"),
        (document({**GOOD, f"{QUERY}.lora_a": [32, 4]}), f"its {QUERY} does not fit the model's"),
        (document({**GOOD, f"{QUERY}.lora_b": [4]}), f"its {QUERY} does not fit the model's"),
    ],
)
def test_what_the_engine_would_refuse_is_told_before(adapter: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^--lora a.gguf: {sentence}$") as told:
        check_adapter(Path("a.gguf"), adapter, BASE)
    assert told.value.hint


def test_scales() -> None:
    assert parse_scaled("/a:b.gguf:-0.5") == (Path("/a:b.gguf"), -0.5)
    for scale in ("inf", "nan", "1001"):
        with pytest.raises(UsageError, match=r"^--lora-scaled /dev/null|^--lora /dev/null"):
            NodeConfig(home=Path(), lora=(parse_scaled(f"/dev/null:{scale}"),))


def test_settings_carry_them() -> None:
    made = settings(adapters=(STYLE, replace(STYLE, scale=-1.0)))
    assert settings_from_document(settings_to_document(made)) == made
    assert "adapters" not in settings_to_document(settings())
    assert made.engine_key != settings().engine_key
    good: dict[str, Any] = {"name": "style", "size_bytes": 10, "digest": "ab" * 32, "scale": 0.5}
    for wrong in ({**good, "scale": 1e9}, {**good, "scale": True}, {**good, "digest": "../x"}, "style"):
        with pytest.raises(MalformedMessage):
            settings_from_document({**settings_to_document(made), "adapters": [wrong]})
    with pytest.raises(MalformedMessage):
        settings_from_document({**settings_to_document(made), "adapters": [good] * 17})


def test_whoever_joins_may_repeat_them_and_not_change_them(tmp_path: Path) -> None:
    file = tmp_path / "style.gguf"
    file.write_bytes(b"GGUF")
    made = settings(adapters=(STYLE,))
    refuse_changes(NodeConfig(home=tmp_path, lora=((file, 0.5),)), made, Home(tmp_path))
    with pytest.raises(MeshError, match=r"^only owners of the mesh can set --lora; it is style:0.5$"):
        refuse_changes(NodeConfig(home=tmp_path, lora=((file, 1.0),)), made, Home(tmp_path))


def test_a_node_without_the_adapter_has_no_part_and_is_told_why() -> None:
    held = (HeldModel(fingerprint=Fingerprint(STYLE.file.digest), name="style", size_bytes=10),)
    lacking = node("a")
    having = node("b")
    having = replace(having, facts=replace(having.facts, models=(*having.facts.models, *held)))
    plan = decide(mesh(lacking, having), model(), settings(adapters=(STYLE,)), current=None)
    assert reasons(plan)["a"].startswith("lacks the LoRA adapter style: copy style.gguf to its models folder")
    assert "b" not in reasons(plan) or "adapter" not in reasons(plan)["b"]


def test_a_lease_names_at_most_so_many() -> None:
    asked = {"epoch": 1, "fingerprint": "f", "first": 0, "last": 1, "need_bytes": 1}
    assert Terms.read(asked).adapters == ()
    assert Terms.read({**asked, "adapters": ["ab"]}).adapters == ("ab",)
    for wrong in ("ab", ["ab"] * 17):
        with pytest.raises(LinkRefused):
            Terms.read({**asked, "adapters": wrong})
