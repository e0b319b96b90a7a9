"""In which steps the next engine reads an answer that it is to continue."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from mesh_llm.gateway.resume_cut import Cut
from mesh_llm.gateway.resume_replay import REPLAY_TOKENS, replay
from mesh_llm.gateway.sse import make
from mesh_llm.gateway.text_request import TextRequest

PROMPT = "Once upon a time"


def request(**more: object) -> TextRequest:
    body = {"prompt": PROMPT, "stream": True, "temperature": 0, **more}
    found = TextRequest.read("POST", "/v1/completions", json.dumps(body).encode())
    assert found is not None
    return found


def told(count: int) -> list[bytes]:
    return [make({"choices": [{"text": "w", "index": 0, "finish_reason": None}]}) for _ in range(count)]


def cut_of(generation: TextRequest, events: list[bytes], tokens: int) -> Cut:
    said = generation.dialect.said(events)
    body = generation.continued(said)
    assert body is not None
    return Cut(events=len(events), said=said, body=body, tokens=tokens)


@pytest.mark.parametrize("each", [1, 3])
def test_each_step_is_shorter_than_a_tile(each: int) -> None:
    """`each`: tokens of an event; a letter may take several."""
    generation, events = request(max_tokens=500), told(200)
    asked = replay(generation, events, cut_of(generation, events, each * 200))
    lengths = [each * (len(body["prompt"]) - len(PROMPT)) for body in asked]
    assert lengths[0] == 0
    assert all(0 < longer - shorter <= REPLAY_TOKENS < 64 for shorter, longer in pairwise(lengths))
    assert each * 200 - lengths[-1] <= REPLAY_TOKENS
    assert all(
        (body["max_tokens"], body["n_predict"], body["cache_prompt"]) == (1, 1, True) for body in asked
    )


def test_where_the_dice_decide_nothing_is_read_before() -> None:
    generation, events = request(temperature=0.7), told(200)
    assert replay(generation, events, cut_of(generation, events, 200)) == []


def test_a_first_word_is_read_with_the_rest() -> None:
    generation, events = request(), told(1)
    [asked] = replay(generation, events, cut_of(generation, events, 1))
    assert asked["prompt"] == PROMPT
