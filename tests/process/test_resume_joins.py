"""Answers of every dialect whose engine is killed in the middle: the same text as from the tokens so far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.sampling import sampled

TOKENS = 48
CUT = 12
"""Events, after which the engine is killed."""
USER = {"role": "user", "content": "Tell me of a fox."}
EXACT: dict[str, Any] = {"temperature": 0, "cache_prompt": False, "stream": True}
"""A prompt that is computed in other batches may end in another text."""


@pytest.fixture(scope="module")
def node(smollm2: Path) -> Iterator[NodeProcess]:
    with temporary_home() as home, NodeProcess(*SMALL, home=home, model=smollm2) as node:
        yield node.until_ready()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    path: str
    body: dict[str, Any]
    limit: str
    """What it calls the largest number of tokens."""

    def __str__(self) -> str:
        return self.path.strip("/").replace("/", "_")

    def prompt(self, node: NodeProcess) -> str:
        if "prompt" in self.body:
            return str(self.body["prompt"])
        return str(node.ask("/apply-template", {"messages": [USER]}).json()["prompt"])


FORMS = [
    Form(path="/v1/chat/completions", body={"messages": [USER]}, limit="max_tokens"),
    Form(path="/v1/completions", body={"prompt": "Once upon a time"}, limit="max_tokens"),
    Form(path="/completion", body={"prompt": "Once upon a time"}, limit="n_predict"),
    Form(path="/v1/messages", body={"messages": [USER]}, limit="max_tokens"),
    Form(path="/v1/responses", body={"input": [USER]}, limit="max_output_tokens"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    pieces: list[str]
    at_seam: list[int]
    """How many pieces had come when another engine went on."""
    last: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def piece_of(data: dict[str, Any]) -> str:
    """What an event adds to the text, in whichever dialect."""
    match data:
        case {"choices": [{"delta": delta}]}:
            return str(delta.get("content") or "")
        case {"choices": [{"text": text}]}:
            return str(text)
        case {"type": "content_block_delta", "delta": delta}:
            return str(delta.get("text", ""))
        case {"type": "response.output_text.delta", "delta": delta}:
            return str(delta)
        case {"tokens": _, "content": content}:
            return str(content)
    return ""


def asked(node: NodeProcess, form: Form, *, kill: bool, **more: Any) -> Seen:
    pieces: list[str] = []
    seams: list[int] = []
    last: dict[str, Any] = {}
    engine = node.engine() if kill else None
    with node.stream(form.path, {**EXACT, **form.body, form.limit: TOKENS, **more}) as stream:
        while line := stream.response.readline().decode():
            if line.startswith(": mesh-llm resumed"):
                seams.append(len(pieces))
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            assert "error" not in data, data
            last = data
            if piece := piece_of(data):
                pieces.append(piece)
            if engine is not None and len(pieces) == CUT:
                engine.kill()
                engine = None
    return Seen(pieces=pieces, at_seam=seams, last=last)


def cut(node: NodeProcess, form: Form, **more: Any) -> Seen:
    """An answer that two engines made; where this machine stands still the first may make all of it."""
    for _ in range(3):
        node.until_state("serving")
        seen = asked(node, form, kill=True, **more)
        if seen.at_seam:
            return seen
        node.until_state("serving")
    raise AssertionError("the answer always ended before its engine was killed")


def from_its_tokens(node: NodeProcess, form: Form, beginning: str, **more: Any) -> tuple[str, str]:
    """What follows the prompt and a beginning of the answer, by their tokens alone, and why it ends."""
    text = form.prompt(node) + beginning
    prompt, whole = (
        node.ask("/tokenize", {"content": content, "parse_special": True}).json()["tokens"]
        for content in (form.prompt(node), text)
    )
    body = {**EXACT, "stream": False, "prompt": whole, "n_predict": TOKENS - len(whole) + len(prompt), **more}
    answer = node.ask("/completion", body).json()
    return str(answer["content"]), str(answer["stop_type"])


@pytest.mark.parametrize("form", sampled(FORMS, FORMS[0]), ids=str)
def test_goes_on_from_the_tokens_so_far(node: NodeProcess, form: Form) -> None:
    undisturbed = asked(node, form, kill=False)
    assert not undisturbed.at_seam

    seen = cut(node, form)

    (at,) = seen.at_seam
    beginning = "".join(seen.pieces[:at])
    assert undisturbed.text.startswith(beginning)
    following, _ = from_its_tokens(node, form, beginning)
    assert seen.text == beginning + following


def test_a_stop_sequence_counts_behind_the_seam(node: NodeProcess) -> None:
    chat = FORMS[0]
    words = asked(node, chat, kill=False).text.split(" ")
    stop = " ".join(words[-8:-6])

    seen = cut(node, chat, stop=[stop])

    (at,) = seen.at_seam
    beginning = "".join(seen.pieces[:at])
    following, why = from_its_tokens(node, chat, beginning, stop=[stop])
    assert seen.text == beginning + following
    assert stop not in seen.text
    assert seen.last["choices"][0]["finish_reason"] == {"word": "stop", "limit": "length"}[why]


def ollama_lines(node: NodeProcess, *, kill: bool) -> list[str]:
    engine = node.engine() if kill else None
    asked_for = {"messages": [USER], "options": {"temperature": 0, "num_predict": TOKENS}}
    lines: list[str] = []
    with node.stream("/api/chat", asked_for) as stream:
        while line := stream.response.readline().decode():
            lines.append(line)
            if engine is not None and len(lines) == CUT:
                engine.kill()
                engine = None
    return lines


def test_ollamas_lines_go_on(node: NodeProcess) -> None:
    node.until_state("serving")
    undisturbed = [json.loads(line) for line in ollama_lines(node, kill=False)]
    for _ in range(3):
        node.until_state("serving")
        lines = ollama_lines(node, kill=True)
        # Where another engine goes on, the next line begins with a space.
        if any(line.startswith(" ") for line in lines):
            break
    else:
        raise AssertionError("the answer always ended before its engine was killed")

    *parts, last = (json.loads(line) for line in lines)
    words = [part["message"]["content"] for part in parts]
    assert words[:CUT] == [part["message"]["content"] for part in undisturbed[:CUT]]
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert last["eval_count"] == undisturbed[-1]["eval_count"] == TOKENS
    assert last["prompt_eval_count"] == undisturbed[-1]["prompt_eval_count"]
