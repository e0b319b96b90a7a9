"""Architectures that the engine does not know: what they are, and what to take instead."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_llm.errors import ModelError
from mesh_llm.models import catalog, unsupported
from mesh_llm.models.unsupported import check_runs, explain, refusal, unknown


def document(architecture: object, known: bool | None) -> dict[str, Any]:
    return {
        "metadata": {"general.architecture": architecture},
        "tensors": [["token_embd.weight"], ["blk.0.attn_v.weight"]],
        "architecture_known": known,
    }


def test_a_projector_in_the_same_file_is_explained() -> None:
    sound = document("gemma3", True)
    sound["tensors"].append(["v.blk.0.attn_q.weight"])

    told = refusal(sound)

    assert told is not None
    assert told.sentence == (
        "its projector is inside the file, as only Ollama has it; the engine takes two files"
    )


def test_glm_of_ollama_is_explained() -> None:
    told = explain("glm4moelite")

    assert told is not None
    assert told.sentence == "glm4moelite is Ollama's own name for GLM-4.7-Flash; upstream calls it deepseek2"
    assert told.hint == "mesh-llm download GLM-4.7-Flash"


def test_names_of_nobody_are_not_explained() -> None:
    assert explain("llama") is None
    assert unknown("hal9000").sentence == "hal9000 is an architecture that this engine does not know"


def test_a_name_that_is_made_to_be_printed_is_not() -> None:
    assert unknown("\x1b[2J" + "x" * 500).sentence.startswith(f"?[2J{'x' * 36} is an architecture")


def test_a_file_of_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        check_runs(document("glm4moelite", False), "sha256-1")

    assert caught.value.message == (
        "sha256-1 cannot be run: glm4moelite is Ollama's own name for GLM-4.7-Flash; "
        "upstream calls it deepseek2"
    )
    assert caught.value.hint == "mesh-llm download GLM-4.7-Flash"


@pytest.mark.parametrize("known", [True, None])
def test_what_the_engine_may_know_is_not_refused(known: bool | None) -> None:
    check_runs(document("glm4moelite", known), "x.gguf")


@pytest.mark.parametrize("architecture", [None, 7, ["llama"]])
def test_what_is_no_name_is_for_others_to_refuse(architecture: object) -> None:
    check_runs(document(architecture, False), "x.gguf")


def test_alternatives_are_in_the_catalog() -> None:
    names = {own.entry for own in unsupported._OLLAMAS.values() if own.entry}

    assert "GLM-4.7-Flash" in names
    assert {name for name in names if catalog.load().get(name) is None} == set()
