"""Which tokenizers fit together, as far as files say it in their settings."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_llm.engine.children.vocabulary import tokenizers_differ

CHAT: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        # Of one family: the base model ends texts with another token, and no text gets one by itself.
        ({"eos_token_id": 0}, None),
        ({"bos_token_id": 0}, None),
        ({"eos_token_id": 0, "add_eos_token": True}, "it has another end token (0 instead of 2)"),
        ({"add_bos_token": True}, "it has another way to start a text (True instead of False)"),
        ({"model": "llama"}, "it has another kind of tokenizer (llama instead of gpt2)"),
    ],
)
def test_only_what_the_engine_minds_is_minded(changes: dict[str, Any], reason: str | None) -> None:
    draft = CHAT | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    assert tokenizers_differ(CHAT, draft) == reason


def test_a_first_token_counts_where_texts_begin_with_it() -> None:
    begins = CHAT | {"tokenizer.ggml.add_bos_token": True}
    reason = "it has another start token (0 instead of 1)"
    assert tokenizers_differ(begins, begins | {"tokenizer.ggml.bos_token_id": 0}) == reason
    silent = {key: value for key, value in CHAT.items() if key != "tokenizer.ggml.add_bos_token"}
    assert tokenizers_differ(silent, silent | {"tokenizer.ggml.bos_token_id": 0}) == reason
