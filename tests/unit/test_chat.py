"""What `mesh-llm chat` keeps, asks and shows; its terminal is in tests/process."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_llm.cli import chat
from mesh_llm.cli.chat import Conversation, served, visible
from mesh_llm.errors import MeshError


class Scripted(chat.ChatApi):
    """An API that says what it is told to, and remembers what it was asked."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append(body)
        yield from self.answers.pop(0)


def says(*pieces: str) -> list[dict[str, Any]]:
    return [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]


def test_the_conversation_is_kept() -> None:
    api = Scripted(says("Hel", "lo."), says("You said hi."))
    conversation = Conversation(api, model="a-model", system="Be brief.")
    assert "".join(piece for piece, _ in conversation.answer("Hi")) == "Hello."
    list(conversation.answer("What did I say?"))
    assert api.asked[1] == {
        "model": "a-model",
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "What did I say?"},
        ],
    }
    conversation.clear()
    assert conversation.messages == []


def test_an_answer_that_is_stopped_stays_as_far_as_it_came() -> None:
    conversation = Conversation(Scripted(says("One ", "two ", "three")))
    answer = conversation.answer("Count")
    next(answer)
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "One "}


def test_a_question_without_an_answer_is_forgotten() -> None:
    conversation = Conversation(Scripted([{"error": {"message": "the engine was lost"}}], says("Yes.")))
    with pytest.raises(MeshError, match="the answer was cut off: the engine was lost"):
        list(conversation.answer("Are you there?"))
    list(conversation.answer("And now?"))
    assert [message["content"] for message in conversation.messages] == ["And now?", "Yes."]


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"content": 7}}]},
        {"timings": "fast"},
        {"timings": {"predicted_n": "x", "predicted_per_second": None}},
    ],
)
def test_events_that_say_nothing_are_skipped(event: dict[str, Any]) -> None:
    conversation = Conversation(Scripted([event, *says("x")]))
    assert list(conversation.answer("?")) == [("x", False)]
    assert conversation.figures == ""


def test_thoughts_are_told_apart_and_not_repeated_to_the_model() -> None:
    events = [{"choices": [{"delta": {"reasoning_content": "Hm."}}]}, *says("Yes.")]
    conversation = Conversation(Scripted(events))
    assert list(conversation.answer("?")) == [("Hm.", True), ("Yes.", False)]
    assert conversation.messages[-1]["content"] == "Yes."


def test_thoughts_are_for_people_who_look_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thinks = [{"choices": [{"delta": {"reasoning_content": "Hm."}}]}, *says("Yes.")]
    chat._answer(Conversation(Scripted(thinks)), "?")
    assert capsys.readouterr().out == "Yes.\n"
    monkeypatch.setattr(chat, "is_terminal", lambda _: True)
    monkeypatch.setattr(chat, "_dim", lambda text: f"<{text}>")
    chat._answer(Conversation(Scripted(thinks)), "?")
    assert capsys.readouterr().out == "<Hm.>\n\nYes.\n"


def test_a_lost_node_is_told_in_a_line_and_the_answer_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    news = {"resumed": "attic was lost; desk goes on with the answer\x1b[2J"}
    conversation = Conversation(Scripted([*says("One "), news, *says("two.")]), tell=chat._remark)
    chat._answer(conversation, "Count")
    assert capsys.readouterr() == ("One two.\n", "(attic was lost; desk goes on with the answer[2J)\n")
    assert conversation.messages[-1]["content"] == "One two."


def test_speed_is_told() -> None:
    timings = {"predicted_n": 12, "predicted_per_second": 34.56}
    conversation = Conversation(Scripted([*says("x"), {"timings": timings, "choices": []}]))
    list(conversation.answer("?"))
    assert conversation.figures.startswith("12 tokens in ")
    assert conversation.figures.endswith(" s, 34.6 tok/s")


def test_a_model_cannot_move_the_cursor() -> None:
    assert visible("a\x1b[2J\x07b\n\tc\x9b1m") == "a[2Jb\n\tc1m"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (None, None),
        ("coder", "coder"),
        ("CODER.gguf", "coder"),
        ("smollm2", "SmolLM2-135M-Instruct.Q4_1"),
        ("SmolLM2", "SmolLM2-135M-Instruct.Q4_1"),
        ("smollm2:135m", "SmolLM2-135M-Instruct.Q4_1"),
    ],
)
def test_a_model_is_found_by_what_people_call_it(typed: str | None, meant: str | None) -> None:
    assert served(typed, ["SmolLM2-135M-Instruct.Q4_1", "coder"]) == meant


def test_a_model_that_is_not_served_is_refused() -> None:
    with pytest.raises(MeshError) as caught:
        served("qwen9", ["smollm2", "coder"])
    assert caught.value.message == "qwen9 is not served here"
    assert caught.value.hint == "served here: smollm2, coder; mesh-llm load NAME serves one more"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["hello"], "hello"),
        (["one\\", "two"], "one\ntwo"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
    ],
)
def test_a_message_may_have_several_lines(
    lines: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(rest))
    assert chat._typed() == text
    assert list(rest) == []


def test_a_certificate_is_checked_unless_the_node_is_on_this_machine() -> None:
    assert chat._trusting("127.0.0.1").verify_mode is ssl.CERT_NONE
    assert chat._trusting("192.0.2.1").verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"{}", "this node needs its API key"),
        (503, b'{"error": {"message": "the model is being loaded"}}', "the model is being loaded"),
        (500, b"<html>", "the node answered with HTTP 500"),
        (500, b'{"error": "x"}', "the node answered with HTTP 500"),
    ],
)
def test_refusals_are_sentences(status: int, body: bytes, message: str) -> None:
    error = chat._refusal(status, body)
    assert error.message == message
    assert error.hint
