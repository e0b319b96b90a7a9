"""One request, one fault at one moment of it, and what may come of it."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

from tests.support.node import NodeProcess, send
from tests.support.questions import SCHEMA, TOOL, WEATHER, WEATHER_TURNS

CHAT_PATH = "/v1/chat/completions"
TOKENS = 40
BOUND_S = 150.0
"""The gateway gives up after two minutes; nobody waits any longer than that."""
CONTINUED_TRIES = 5
RESUMED = "x-mesh-llm-resumed"
REFUSALS = {"not_resumed", "engine_lost"}
LONG = "Here is a list of numbers: " + " ".join(str(number) for number in range(200)) + ". "
"""Seven hundred tokens or so: a second passes, or several, in which nothing else comes."""

EXACT: dict[str, Any] = {"temperature": 0, "cache_prompt": False}
"""A prompt that is computed in other batches may end in another text."""


def body_of(form: str, *, long: bool = False) -> dict[str, Any]:
    question = WEATHER if form in ("tools", "schema") else "Tell me of a fox."
    asked = {"role": "user", "content": (LONG if long else "") + question}
    body: dict[str, Any] = {**EXACT, "messages": [asked], "max_tokens": TOKENS}
    match form:
        case "stream":
            return {**body, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        case "whole":
            return {**body, "ignore_eos": True}
        case "tools":
            turns = [*WEATHER_TURNS[:-1], asked]
            forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
            return {**body, **forced, "messages": turns, "stream": True, "max_tokens": 96}
        case "schema":
            schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
            return {**body, "stream": True, "response_format": schema}
    raise ValueError(form)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All that the client saw."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[str] = field(default_factory=list)
    """Of the text, as they came; a tool call's pieces as well."""
    at_seam: list[int] = field(default_factory=list)
    """How many pieces had come when another engine went on."""
    usage: dict[str, int] | None = None
    finish: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False
    """It ended as it should."""
    longest_s: float = 0.0
    """Between two pieces."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Client(threading.Thread):
    """Asks, and writes down what it hears."""

    def __init__(
        self, node: NodeProcess, body: dict[str, Any], *, at: int | None = None, do: Callable[[], None]
    ) -> None:
        """`do` is called once as soon as `at` pieces have come; 0: with the head of the answer."""
        super().__init__(daemon=True)
        self._connection = HTTPConnection(node.url.partition("//")[2], timeout=BOUND_S)
        self._body = body
        self._at = at
        self._do = do
        self.outcome = Outcome()
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            with closing(self._connection):
                self._ask()
        except BaseException as error:
            self.problem = error

    def finished(self) -> Outcome:
        self.join(BOUND_S)
        assert not self.is_alive(), f"no end within {BOUND_S:.0f} s: {self.outcome}"
        if self.problem is not None:
            raise self.problem
        return self.outcome

    def _ask(self) -> None:
        send(self._connection, CHAT_PATH, self._body, headers={"Prefer": "wait=60"})
        response = self._connection.getresponse()
        seen = self.outcome
        seen.status, seen.headers = response.status, dict(response.getheaders())
        if not self._body.get("stream") or response.status != 200:
            seen.body = response.read()
            document = json.loads(seen.body)
            if response.status == 200:
                seen.pieces = [document["choices"][0]["message"]["content"]]
                seen.finish, seen.usage = [document["choices"][0]["finish_reason"]], document["usage"]
                seen.done = True
            else:
                seen.error = document["error"]
            return
        self._reach(0)
        last_s = time.monotonic()
        while line := response.readline():
            if line.startswith(b": mesh-llm resumed"):
                seen.at_seam.append(len(seen.pieces))
            if line.startswith(b"data: [DONE]"):
                seen.done = True
            if line.startswith(b"data: {"):
                came = len(seen.pieces)
                self._hear(json.loads(line[6:]))
                if len(seen.pieces) > came:
                    now_s = time.monotonic()
                    seen.longest_s, last_s = max(seen.longest_s, now_s - last_s), now_s
                    self._reach(len(seen.pieces))

    def _hear(self, data: dict[str, Any]) -> None:
        seen = self.outcome
        seen.error = data.get("error", seen.error)
        seen.usage = data.get("usage", seen.usage)
        for choice in data["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                seen.pieces.append(delta["content"])
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                seen.pieces.append(function.get("name", "") + function.get("arguments", ""))
            if choice["finish_reason"] is not None:
                seen.finish.append(choice["finish_reason"])

    def _reach(self, count: int) -> None:
        if self._at == count:
            self._at = None
            self._do()


def undisturbed(node: NodeProcess, body: dict[str, Any]) -> Outcome:
    client = Client(node, body, do=lambda: None)
    client.start()
    outcome = client.finished()
    assert outcome.done, outcome
    return outcome


Follow = Callable[[str, int], str]
"""What comes after a text, so many tokens of it, when nothing happens meanwhile."""


def continued(node: NodeProcess, body: dict[str, Any], beginning: str, tokens: int) -> str:
    """What follows `beginning` when a mesh that nothing has happened to is asked to go on from it."""
    messages = [*body["messages"], {"role": "assistant", "content": beginning}]
    more = {"messages": messages, "continue_final_message": "content", "add_generation_prompt": False}
    asked = {**body, **more, "stream": False, "max_tokens": tokens}
    asked.pop("stream_options", None)
    for _ in range(CONTINUED_TRIES):
        # The mesh may be taking its lost one back just now.
        reply = node.ask(CHAT_PATH, asked, headers={"Prefer": "wait=60"})
        assert reply.status == 200, reply.body
        if RESUMED not in {name.lower() for name in reply.headers}:
            document = reply.json()
            # One engine has made all of it: this is its own count, and no sum of the gateway's.
            assert document["usage"]["completion_tokens"] == tokens, document
            return str(document["choices"][0]["message"]["content"])
    raise AssertionError(f"{CONTINUED_TRIES} times something happened to the answer that nothing should")


def events_at_seams(log: str) -> list[int]:
    """From a node's log: how many events had been told each time that another engine went on."""
    return [int(count) for count in re.findall(r"resumed elsewhere events=([0-9]+)", log)]


def pieces_at_seams(events: list[int]) -> list[int]:
    """How many pieces of text were among so many events.

    The first one says who speaks; after the last piece come the reason why it ends, and the count.
    """
    return [min(max(0, count - 1), TOKENS) for count in events]


# -- what may come of it ---------------------------------------------------------------------------


def check_shaped(outcome: Outcome, reference: Outcome) -> None:
    if outcome.error is None:
        assert outcome.done
        assert (outcome.text, outcome.finish) == (reference.text, reference.finish)
        return
    assert outcome.error["code"] in REFUSALS, outcome.error
    assert not outcome.done
    assert outcome.finish in ([], ["error"])
    assert reference.text.startswith(outcome.text)


def check_text(
    outcome: Outcome, reference: Outcome, pieces: list[str], seams: list[int], follow: Follow
) -> None:
    """No piece lost, doubled or altered: each part is what follows from all that was there before it.

    `pieces` are those of the undisturbed answer, one for each token; `seams` how many of them the
    client had, or would have had of a stream, each time that another engine went on.
    """
    assert outcome.error is None, outcome.error
    assert outcome.done
    assert outcome.finish == ["length"]
    assert outcome.usage is not None
    assert reference.usage is not None
    assert outcome.usage["prompt_tokens"] == reference.usage["prompt_tokens"]
    assert outcome.usage["completion_tokens"] == TOKENS
    assert len(pieces) == TOKENS, pieces
    # A stream has a piece for each token, a whole answer is one piece.
    assert len(outcome.pieces) == len(reference.pieces), outcome.pieces
    begun = [count for count in seams if count > 0]
    expected = "".join(pieces[: begun[0]] if begun else pieces)
    for at, end in itertools.pairwise([*begun, TOKENS]):
        if len(outcome.pieces) == TOKENS:
            assert "".join(outcome.pieces[:at]) == expected, (at, outcome.pieces)
        if end > at:
            expected += follow(expected, end - at)
    assert outcome.text == expected, (begun, outcome.pieces)
