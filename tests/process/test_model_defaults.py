"""What a model's file and its owner say of sampling, templates and thoughts; a request has the last word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.lone_engine import LoneEngine, lone_engine
from tests.support.node import NodeProcess, temporary_home

OF_THE_FILE = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell a story"}], "max_tokens": 16}
THINKS = (
    "{{ tone }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
"""A template of a model that thinks first, as Qwen3's."""
OPTIONS = (
    *("--seed", "7", "--temp", "1", "--reasoning-budget", "3"),
    *("--chat-template-kwargs", '{"tone": "warm"}', "--engine-set", f"chat_template={THINKS}"),
)


def sampling(engine: LoneEngine, **more: Any) -> dict[str, float]:
    """What an answer was sampled by."""
    used = engine.ask("/completion", {"prompt": "x", "n_predict": 1, **more}).json()["generation_settings"]
    return {"temp": used["temperature"], **{name: used[name] for name in ("top_k", "top_p", "min_p")}}


@pytest.mark.parametrize(
    ("options", "counts"),
    [({}, OF_THE_FILE), ({"temp": 0.25, "top_k": 0}, OF_THE_FILE | {"temp": 0.25, "top_k": 0})],
    ids=["file", "owner"],
)
def test_the_files_sampling_counts_unless_an_owner_or_a_request_says_otherwise(
    options: dict[str, Any], counts: dict[str, float], tmp_path: Path
) -> None:
    general = {f"general.sampling.{name}": value for name, value in OF_THE_FILE.items()}
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "qwen3", layers=1, metadata=general)
    with lone_engine(model, {}, changes=options) as engine:
        assert sampling(engine) == counts
        assert sampling(engine, temperature=0.75, min_p=0.5) == counts | {"temp": 0.75, "min_p": 0.5}


@pytest.fixture(scope="module")
def node(smollm2: Path) -> Iterator[NodeProcess]:
    small = ("--ctx-size", "512", "--parallel", "1", "--threads", "1", "--no-draft")
    with temporary_home() as home, NodeProcess(*small, *OPTIONS, home=home, model=smollm2) as node:
        yield node.until_ready()


def message(node: NodeProcess, **more: Any) -> dict[str, Any]:
    reply = node.ask("/v1/chat/completions", {**CHAT, "cache_prompt": False, **more})
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json()["choices"][0]["message"]
    return found


@pytest.mark.full
def test_the_same_request_has_the_same_answer_by_the_owners_seed(node: NodeProcess) -> None:
    told = message(node)
    assert message(node) == told
    assert message(node, seed=None) == told
    assert message(node, seed=7) == told
    other = message(node, seed=8)
    assert other != told
    assert message(node, seed=8) == other
    assert message(node, seed=-1) not in (told, other)


@pytest.mark.full
def test_the_template_gets_the_owners_arguments_and_a_requests_own(node: NodeProcess) -> None:
    def prompt(**arguments: Any) -> str:
        asked = {**CHAT, "chat_template_kwargs": arguments} if arguments else CHAT
        return str(node.ask("/apply-template", asked).json()["prompt"])

    assert prompt().startswith("warm<|im_start|>")
    assert prompt(tone="cool").startswith("cool<|im_start|>")
    assert prompt(enable_thinking=False).startswith("warm<|im_start|>")
    assert prompt(enable_thinking=False).endswith("</think>\n\n")


@pytest.mark.full
def test_thoughts_are_bounded_and_told_apart(node: NodeProcess) -> None:
    def thoughts(**more: Any) -> tuple[int, str]:
        told = message(node, **more)
        text = told.get("reasoning_content") or ""
        return len(node.ask("/tokenize", {"content": text}).json()["tokens"]), str(told["content"])

    bounded, text = thoughts()
    assert 0 < bounded <= 4
    assert text
    more, _ = thoughts(thinking_budget_tokens=12)
    assert bounded < more
    inline, text = thoughts(reasoning_format="none")
    assert inline == 0
    assert "</think>" in text
