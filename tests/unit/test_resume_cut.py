"""Where an answer is cut for the next engine."""

from __future__ import annotations

import json

import pytest

from mesh_llm.gateway.dialects.base import Document
from mesh_llm.gateway.resume_cut import GATEWAY_CUT_BACK, Cut, cut_back
from mesh_llm.gateway.text_request import TextRequest

PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "List five colours."}], "stream": True}


def event(delta: Document) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()


def tokens_of(text: str) -> int:
    """A letter each; all line ends at the end of a text are one, as with GPT-2's vocabulary and its heirs."""
    letters = text.rstrip("\n")
    return len(letters) + (letters != text)


async def where(*pieces: str, key: str = "content") -> int:
    """How many pieces are left."""
    generation = TextRequest.read("POST", PATH, json.dumps(BODY).encode())
    assert generation is not None
    told = [event({"role": "assistant", "content": None}), *(event({key: piece}) for piece in pieces)]
    said = generation.dialect.said(told)
    body = generation.continued(said)
    assert body is not None

    async def count(body: Document) -> int:
        return tokens_of(body["messages"][-1].get("reasoning_content") or body["messages"][-1]["content"])

    whole = Cut(events=len(told), said=said, body=body, tokens=await count(body))
    cut = await cut_back(whole, told, generation, count)
    assert cut.said == generation.dialect.said(told[: cut.events])
    assert cut.tokens == await count(cut.body)
    assert cut.body == generation.continued(cut.said)
    return cut.events - 1


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
@pytest.mark.parametrize(
    ("pieces", "left"),
    [
        (["a"], 1),
        (["a", "b"], 2),
        (["a", "\n"], 2),
        (["a", "\n\n"], 2),
        (["a", "\n", "\n"], 2),
        (["a", "\n", "\n", "\n"], 2),
        (["a", "\n", "\n", "b"], 4),
        # A letter of three tokens comes as one piece.
        (["a", "xyz"], 2),
        (["xyz", "\n", "\n"], 2),
    ],
)
async def test_the_text_ends_with_a_token_of_its_own(pieces: list[str], left: int, key: str) -> None:
    assert await where(*pieces, key=key) == left


async def test_where_no_such_place_is_near_nothing_is_said_again() -> None:
    ends = ["\n"] * (GATEWAY_CUT_BACK + 1)
    assert await where("a", *ends) == len(ends) + 1
    assert await where("a", *ends[1:]) == 2


async def test_the_first_piece_is_taken_for_a_token() -> None:
    """There is nothing before it that could be sent as the beginning of the answer."""
    assert await where("\n", "\n") == 1
