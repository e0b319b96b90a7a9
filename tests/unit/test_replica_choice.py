"""Which of several engines a request goes to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mesh_llm.gateway.engine_choice import EngineChoice
from mesh_llm.gateway.engine_connection import EngineLost
from mesh_llm.gateway.replica_choice import LOADS_S, SHUN_S, ReplicaChoice
from mesh_llm.gateway.upstream import EngineLoad, SlotRequest, Upstream
from mesh_llm.gateway.warm_prefixes import ASKED_LIMIT, Prompt, WarmPrefixes, prompt_of, read_prompt
from tests.support.upstream import FakeNode


async def _connect(turn: SlotRequest | None = None) -> socket.socket:
    raise OSError


def engine(number: int, **load: Any) -> Upstream:
    return Upstream(url=f"http://node:{number}", connect=_connect, load=EngineLoad(**{"slots": 4, **load}))


def chat(*texts: str) -> Prompt:
    """A person and an engine in turn."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return prompt_of({"messages": messages})


@dataclass
class Node(FakeNode):
    engines: list[Upstream] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    looks: int = 0

    def upstreams(self) -> list[Upstream]:
        return self.engines

    async def look(self, digests: Sequence[str]) -> dict[str, str]:
        self.looks += 1
        return self.told


class World:
    def __init__(self, *engines: Upstream) -> None:
        self.now_s = 100.0
        self.node = Node(engines=list(engines))
        self.warm = WarmPrefixes()
        self.choice = ReplicaChoice(self.warm, clock=lambda: self.now_s)

    async def pick(
        self, prompt: Prompt | None = None, *, keep: bool = False, node: Node | None = None
    ) -> str:
        node = node or self.node
        picker = await self.choice.picker(node, prompt or Prompt())
        url = picker.pick(node.engines).url
        if not keep:
            picker.close()
        await asyncio.sleep(0)
        return url


async def test_requests_go_where_most_turns_are_free() -> None:
    one, two = engine(1), engine(2)
    world = World(one, two)
    picked = [await world.pick(keep=True) for _ in range(8)]
    assert sorted(picked) == [one.url] * 4 + [two.url] * 4


async def test_a_faster_engine_is_taken_until_it_is_full() -> None:
    fast, slow = engine(1, tok_s=100, prompt_tok_s=1000), engine(2, tok_s=10)
    world = World(slow, fast)
    assert await world.pick() == fast.url
    world.node.engines = [
        slow,
        replace(fast, load=EngineLoad(slots=4, taken=4, waiting=9, turn_s=5, tok_s=100)),
    ]
    assert await world.pick() == slow.url


async def test_each_models_hosts_are_asked_how_busy_they_are() -> None:
    world = World(engine(1), engine(2))
    other = Node(engines=[engine(3), engine(4)], names=("other",))
    await world.pick()
    await world.pick(node=other)
    assert (world.node.looks, other.looks) == (1, 1)


async def test_a_look_at_one_model_changes_nothing_of_another() -> None:
    one, two = engine(1), engine(2, taken=3)
    world = World(one, two)
    other = Node(engines=[engine(3), engine(4)], names=("other",))
    await world.pick()
    assert [await world.pick(keep=True) for _ in range(3)] == [one.url] * 3
    # Of these its host has told nothing yet.
    world.node.engines = [engine(1, taken=2), engine(2, taken=4)]
    world.now_s += LOADS_S
    await world.pick(node=other)
    assert await world.pick() == two.url


async def test_a_second_turn_goes_where_the_first_one_went() -> None:
    world = World(engine(1), engine(2))
    first = await world.pick(chat("How deep is the sea?"))
    for _ in range(3):
        await world.pick(keep=True)
    again = chat("How deep is the sea?", "Very deep.", "And how wide?")
    assert again.continues
    assert await world.pick(again) == first
    assert world.node.looks <= 1, "nobody else had to be asked"


async def test_who_knows_a_conversation_that_began_elsewhere_is_asked() -> None:
    one, two = engine(1), engine(2)
    world = World(one, two)
    first, again = chat("How deep is the sea?"), chat("How deep is the sea?", "Very.", "Why?")
    world.node.told = {two.url: first.beginnings[-1][0], one.url: ""}
    assert await world.pick(again) == two.url
    assert world.node.looks == 1


async def test_a_warm_engine_without_a_free_turn_is_weighed_against_reading_again() -> None:
    one, two = engine(1), engine(2)
    world = World(one, two)
    world.warm.note(two.url, chat("Hello"))
    world.node.engines = [one, replace(two, load=EngineLoad(slots=4, taken=4, waiting=3, turn_s=10))]
    assert await world.pick(chat("Hello", "Hi", "Bye")) == one.url
    long = "word " * 100_000
    world.warm.note(two.url, chat(long))
    assert await world.pick(chat(long, "Hi", "Bye")) == two.url


async def test_one_that_broke_off_is_shunned_for_a_while() -> None:
    one, two = engine(1), engine(2)
    world = World(one, two)
    world.choice.failed(one)
    assert [await world.pick(keep=True) for _ in range(3)] == [two.url] * 3
    world.now_s += SHUN_S
    assert await world.pick() == one.url


async def test_the_next_engine_is_asked_at_once_when_one_dies() -> None:
    world = World(engine(1), engine(2))
    picker = await world.choice.picker(world.node, Prompt())
    async with EngineChoice(world.node, limit_s=60, picker=picker, clock=lambda: world.now_s) as attempts:
        first = await attempts.next()
        attempts.failed(first, EngineLost("gone"), told=True)
        # The clock stands still: a wait would never end.
        async with asyncio.timeout(20):
            second = await attempts.next()
    assert {first.url, second.url} == {each.url for each in world.node.engines}


def test_beginnings_are_the_same_in_longer_prompts() -> None:
    for body, longer in (
        ({"prompt": "a" * 600}, {"prompt": "a" * 600 + "b" * 600}),
        ({"prompt": [1] * 70}, {"prompt": [1] * 70 + [2] * 70}),
        ({"system": "s", "messages": [{"a": 1}]}, {"system": "s", "messages": [{"a": 1}, {"b": 2}]}),
    ):
        short, long = prompt_of(body), prompt_of(longer)
        assert short.beginnings
        assert set(short.beginnings) < set(long.beginnings)
        other = prompt_of({"system": "other", **{name: body[name] for name in body if name != "system"}})
        assert not set(other.beginnings) & set(long.beginnings)
    assert len(prompt_of({"prompt": "a" * 1_000_000}).asked) == ASKED_LIMIT
    assert prompt_of({"prompt": None, "messages": 7}) == Prompt()


def test_a_prompt_of_very_many_parts_is_not_read() -> None:
    """A guest sends it, and all others wait meanwhile."""
    few, many = ([{"role": "user", "content": ""}] * count for count in (100, 300_000))
    assert len(read_prompt(json.dumps({"messages": few}).encode()).beginnings) == 100
    assert read_prompt(json.dumps({"messages": many}).encode()) == Prompt()
    assert read_prompt(json.dumps({"prompt": "x" * (17 << 20)}).encode()) == Prompt()
    assert len(prompt_of({"messages": many}).beginnings) < 5000


def test_only_so_many_beginnings_are_remembered() -> None:
    warm = WarmPrefixes(limit=2)
    for text in ("one", "two", "three"):
        warm.note("here", chat(text))
    assert [bool(warm.sizes(chat(text))) for text in ("one", "two", "three")] == [False, True, True]
    warm.forget("here")
    assert warm.sizes(chat("three")) == {}
