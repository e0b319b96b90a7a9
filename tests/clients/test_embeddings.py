"""Embeddings through OpenAI's client, of a model whose file asks for pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from tests.support.node import NodeProcess
from tests.support.pairs import Pair

HIDDEN = 64


@pytest.fixture
def embedder(embedding_pair: Pair, way: str) -> NodeProcess:
    node: NodeProcess = getattr(embedding_pair, way)
    return node


@pytest.fixture
def client(embedder: NodeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="mesh", max_retries=0, timeout=60) as client:
        yield client


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="any", input=["one", "two", "one"], encoding_format="float")

    first, second, third = (entry.embedding for entry in answer.data)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert len(first) == HIDDEN
    assert math.isclose(math.hypot(*first), 1.0, rel_tol=1e-4)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(first, third, strict=True))
    assert first != second
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_encoded_embeddings_are_the_same(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="any", input="one", encoding_format="float")
    # Without a word about it this client asks for base64, and decodes it.
    encoded = client.embeddings.create(model="any", input="one")

    assert len(encoded.data[0].embedding) == HIDDEN
    pairs = zip(plain.data[0].embedding, encoded.data[0].embedding, strict=True)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in pairs)


async def test_async_embeddings(embedder: NodeProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="mesh", max_retries=0) as client:
        answer = await client.embeddings.create(model="any", input="one", encoding_format="float")

    assert len(answer.data[0].embedding) == HIDDEN


def test_no_input_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input"):
        client.embeddings.create(model="any", input=[])
