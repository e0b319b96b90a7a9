"""An answer that a second engine goes on with, token by token beside what the first one says by itself.

The engines are real ones. The connection to the first one breaks off after so many events; the gateway finds
the second one under another address.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Upstream
from tests.support.architectures import MODELS, Metadata
from tests.support.engine_lab import EngineLab
from tests.support.lone_engine import KEY, LoneEngine, lone_engine
from tests.support.raw_http import Answer, connect, request_bytes
from tests.support.sampling import first, sampled
from tests.support.split import token_ids
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, FakeNode, Seen, Wire, fake_engine

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
NATIVE = "/completion"
TELLS = (b'"delta":{"content":"', b'"text":"', b'"completion_probabilities":[')
"""Found in the events that bring a token: a chat's, a completion's, and llama-server's own with chances."""
TOKENS, LONG = 40, 80
EXACT: dict[str, Any] = {"temperature": 0, "cache_prompt": False, "ignore_eos": True}
BATCHES: dict[str, Any] = {"n_batch": 128, "n_ubatch": 64}
THREADS: dict[str, Any] = {"changes": {"threads": 2}}
"""How the engine of another plan may run. Two threads that wait for each other are slow on a busy machine."""
FOX = "Tell me of a fox."
COLOURS = "List five colours."
"""Is answered with a list and a blank line."""
NOTES = " ".join(f"Note {number}: the weather was fine." for number in range(20)) + " Now tell me of a fox."
"""More than 64 tokens, which are read in another way than fewer; with an answer, more than 256."""


@pytest.fixture(scope="module")
def engine(smollm2: Path, libraries: dict[str, Path]) -> Iterator[LoneEngine]:
    with lone_engine(smollm2, libraries) as engine:
        yield engine


@pytest.fixture(scope="module", params=sampled([BATCHES, THREADS], BATCHES), ids=["batches", "threads"])
def heir(smollm2: Path, libraries: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[LoneEngine]:
    """The engine that the answer continues with."""
    with lone_engine(smollm2, libraries, **request.param) as engine:
        yield engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """What the engine says when nothing happens."""

    engine: LoneEngine
    question: str
    rendered: str
    """As the template makes a prompt of it."""
    prompt: list[int]
    tokens: list[int]
    pieces: list[str]

    @classmethod
    def of(cls, engine: LoneEngine, question: str) -> Undisturbed:
        rendered = engine.ask("/apply-template", {"messages": messages(question)}).json()["prompt"]
        cut = {"content": rendered, "add_special": True, "parse_special": True}
        prompt = engine.ask("/tokenize", cut).json()["tokens"]
        count = LONG if question == NOTES else TOKENS
        asked = {**EXACT, "prompt": prompt, "n_predict": count, "return_tokens": True}
        tokens = engine.ask("/completion", asked).json()["tokens"]
        pieces = [engine.ask("/detokenize", {"tokens": [token]}).json()["content"] for token in tokens]
        assert len(tokens) == count
        return cls(
            engine=engine,
            question=question,
            rendered=rendered,
            prompt=prompt,
            tokens=tokens,
            pieces=pieces,
        )

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def asked(self, path: str) -> dict[str, Any]:
        """As a client would ask for it there."""
        what = {"messages": messages(self.question)} if path == CHAT else {"prompt": self.rendered}
        return {**EXACT, **what, "max_tokens": len(self.tokens)}


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@asynccontextmanager
async def broken_off(engine: LoneEngine, heir: LoneEngine, after: int) -> AsyncIterator[Gateway]:
    """A gateway whose connection to the engine ends with the event of so many tokens, once."""
    node = FakeNode()
    real = Upstream(url=heir.url, key=KEY)

    async def relay(seen: Seen, wire: Wire) -> None:
        _, _, port = engine.url.rpartition(":")
        async with connect(int(port)) as link:
            await link.send(
                request_bytes("POST", seen.target, f"Authorization: Bearer {KEY}", body=seen.body)
            )
            assert (await link.head()).status == 200
            await wire.send(SSE_HEAD)
            left = after
            while chunk := await link.chunk():
                for event in chunk.split(b"\n\n")[:-1]:
                    await wire.send_chunk(event + b"\n\n")
                    left -= any(sign in event for sign in TELLS)
                    if not left:
                        node.where = real
                        wire.abort()
                        return
            await wire.send(LAST_CHUNK)

    async with fake_engine() as first:
        first.on(CHAT, relay)
        first.on(PLAIN, relay)
        first.on(NATIVE, relay)
        node.where = first.upstream
        gateway = Gateway(GatewayConfig(port=0), node)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()


async def resumed(
    undisturbed: Undisturbed, heir: LoneEngine, path: str, *, after: int
) -> tuple[list[str], dict[str, int]]:
    """The pieces that a client gets of an answer that was cut there, and their count."""
    body = {**undisturbed.asked(path), "stream_options": {"include_usage": True}}
    return pieces_of(await continued(undisturbed.engine, heir, path, body, after=after))


async def continued(
    engine: LoneEngine, heir: LoneEngine, path: str, body: dict[str, Any], *, after: int
) -> Answer:
    """The stream of an answer that was cut there."""
    asked = json.dumps({**body, "stream": True}).encode()
    async with broken_off(engine, heir, after) as gateway, connect(gateway.port) as client:
        await client.send(request_bytes("POST", path, body=asked))
        answer = await client.rest(await client.head())
    assert answer.whole
    assert answer.body.count(b": mesh-llm resumed 1") == 1
    return answer


def data_of(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: {")]


def pieces_of(answer: Answer) -> tuple[list[str], dict[str, int]]:
    data = data_of(answer)
    choices = [choice for told in data for choice in told["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    *_, usage = (told["usage"] for told in data if "usage" in told)
    return [text for text in texts if text], usage


@pytest.mark.parametrize(
    ("path", "question"), first(1, [(CHAT, COLOURS), (CHAT, NOTES), (CHAT, FOX), (PLAIN, COLOURS)])
)
async def test_it_is_the_undisturbed_answer(
    engine: LoneEngine, heir: LoneEngine, path: str, question: str
) -> None:
    undisturbed = await asyncio.to_thread(Undisturbed.of, engine, question)
    for after in cuts(undisturbed):
        pieces, usage = await resumed(undisturbed, heir, path, after=after)
        assert pieces == undisturbed.pieces, after
        assert len(pieces) == usage["completion_tokens"] == len(undisturbed.tokens), after
        assert usage["prompt_tokens"] == len(undisturbed.prompt)


@pytest.mark.parametrize("parts", sampled([(50,), (7, 20, 90, 170)], (7, 20, 90, 170)), ids=str)
def test_a_prompt_is_computed_alike_in_any_parts(engine: LoneEngine, parts: tuple[int, ...]) -> None:
    """Its beginnings were asked for before and are remembered, as those of a conversation are."""
    prompt = [1000 + 37 * number % 7919 for number in range(200)]
    whole = chances(engine, prompt, cache_prompt=False)
    engine.ask("/completion", {"prompt": [1], "n_predict": 1, "cache_prompt": False})
    for part in parts:
        reply = engine.ask("/completion", {"prompt": prompt[:part], "n_predict": 1}).json()
        assert reply["timings"]["cache_n"] < part
    assert chances(engine, prompt) == whole


def chances(engine: LoneEngine, prompt: list[int], **more: Any) -> list[float]:
    """How likely each token of an answer was: numbers that tell of the smallest difference."""
    asked = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, "n_probs": 1, **more}
    answer = engine.ask("/completion", asked).json()
    return [each["logprob"] for each in answer["completion_probabilities"]]


NOT_ASCII = [[token, False] for token in (*range(3), *range(3 + 128, 3 + 256))]
"""Tokens of a tiny model that are part of a letter, or of no text: their numbers would not be told."""
TOLD: dict[str, Any] = {"n_predict": LONG, "n_probs": 1, "logit_bias": NOT_ASCII}
WIDEST = 128
"""Heads that are computed alike in any batch (native/cpu_attention.cmake)."""
WITHOUT_CHECKPOINTS: dict[str, Any] = {"n_ctx_checkpoints": 0}


@pytest.mark.parametrize(
    ("architecture", "head_size"),
    first(
        2,
        [
            *[("qwen35", 64), ("gemma3", 256)],
            *[("gemma3", 64), ("lfm2", 64), ("granitehybrid", 64), ("qwen35", 256), ("granitehybrid", 256)],
        ],
    ),
)
async def test_other_layers_compute_the_same_numbers(
    architecture: str, head_size: int, lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """With wide heads only where the heir has the same batches: see the test below."""
    model = with_heads(lab, architecture, head_size)
    other = BATCHES if head_size <= WIDEST else {}
    with lone_engine(model, libraries) as engine, lone_engine(model, libraries, **other) as heir:
        said, heard = await told_by(engine, heir)
    assert len({token for token, _ in said}) > LONG // 10
    assert heard == [said, said]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gemma3", "qwen35"])
async def test_wide_heads_with_other_batches_differ_in_the_last_bits(
    architecture: str, lab: EngineLab, libraries: dict[str, Path]
) -> None:
    """A limit: for checkpoints the engine cuts a prompt, at places that depend on the size of a batch."""
    model = with_heads(lab, architecture, 2 * WIDEST)
    with lone_engine(model, libraries) as engine, lone_engine(model, libraries, **BATCHES) as heir:
        said, heard = await told_by(engine, heir)
    assert said not in heard
    for after, answer in zip(CUTS, heard, strict=True):
        assert len(answer) == len(said)
        assert answer[:after] == said[:after]
        assert answer[after][1] == pytest.approx(said[after][1], abs=0.01)

    plain = lone_engine(model, libraries, **WITHOUT_CHECKPOINTS)
    with plain as engine, lone_engine(model, libraries, **WITHOUT_CHECKPOINTS, **BATCHES) as heir:
        said, heard = await told_by(engine, heir)
    assert heard == [said, said]


CUTS = (1, 70)
"""Tokens after which the first engine of a tiny model is lost."""
Told = list[tuple[int, float]]
"""Tokens, and how likely each was."""


def with_heads(lab: EngineLab, architecture: str, size: int) -> Path:
    widths: Metadata = {"attention.key_length": size, "attention.value_length": size}
    return lab.write(architecture, MODELS[architecture] | widths).path


async def told_by(engine: LoneEngine, heir: LoneEngine) -> tuple[Told, list[Told]]:
    """What the engine says undisturbed, and what a client hears that both of them answer."""
    asked = {**EXACT, **TOLD, "prompt": token_ids(150)}
    undisturbed = await asyncio.to_thread(lambda: engine.ask(NATIVE, asked).json())
    answers = [await continued(engine, heir, NATIVE, asked, after=after) for after in CUTS]
    return told_in(undisturbed), [
        [each for data in data_of(answer) for each in told_in(data)] for answer in answers
    ]


def told_in(document: dict[str, Any]) -> Told:
    return [(each["id"], each["logprob"]) for each in document.get("completion_probabilities", ())]


def cuts(undisturbed: Undisturbed) -> list[int]:
    """Early, late, at the end, and behind blank lines: a text that ends there is cut into other tokens."""
    pairs = enumerate(itertools.pairwise(undisturbed.pieces), 2)
    blank = {at for at, (one, next_one) in pairs if one.isspace() and next_one.isspace()}
    assert blank or undisturbed.question != COLOURS
    count = len(undisturbed.tokens)
    if undisturbed.question == NOTES:
        return [1, count - 20]
    return sorted({1, count - 20, count, *sorted(blank)[:1]})
