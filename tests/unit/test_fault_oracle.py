"""The judge of the tests that break a mesh, before made-up answers: it lets nothing wrong pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.faults import TOKENS, Outcome, check_shaped, check_text, pieces_at_seams

WORDS = [f" w{number}" for number in range(TOKENS)]
REFERENCE = Outcome(
    pieces=WORDS,
    usage={"prompt_tokens": 5, "completion_tokens": TOKENS},
    finish=["length"],
    done=True,
)


def whole(outcome: Outcome) -> Outcome:
    return replace(outcome, pieces=[outcome.text])


def said(pieces: list[str]) -> Outcome:
    return replace(REFERENCE, pieces=pieces)


def after_second_seam(pieces: list[str]) -> list[str]:
    return [*pieces[:22], *pieces[23:], " w40"]


def follow(beginning: str, tokens: int) -> str:
    """As from a model that goes on with the words where the text leaves off, whatever the text."""
    count = len(beginning.split())
    return "".join(f" w{number}" for number in range(count, count + tokens))


def judge(outcome: Outcome, seams: list[int], reference: Outcome = REFERENCE) -> None:
    check_text(outcome, reference, WORDS, seams, follow)


SEAMS = [[], [0], [1], [20], [39], [40], [0, 20], [20, 20], [20, 22], [1, 20, 40]]


@pytest.mark.parametrize("seams", SEAMS)
def test_the_right_answer_passes(seams: list[int]) -> None:
    judge(REFERENCE, seams)
    judge(whole(REFERENCE), seams, whole(REFERENCE))


WRONG = {
    "the last one is missing": WORDS[:-1],
    "the last ten are missing": WORDS[:-10],
    "the last twenty are missing": WORDS[:-20],
    "the last three are doubled": WORDS + WORDS[-3:],
    "one more": [*WORDS, f" w{TOKENS}"],
    "one is doubled at the seam": [*WORDS[:20], WORDS[19], *WORDS[20:-1]],
    "one is missing at the seam": [*WORDS[:20], *WORDS[21:], f" w{TOKENS}"],
    "one is altered before the seam": [*WORDS[:5], " x", *WORDS[6:]],
    "one is altered after the seam": [*WORDS[:25], " x", *WORDS[26:]],
    "one is missing after the second seam": after_second_seam(WORDS),
    "garbage at the end": [*WORDS[:22], *([" garbage"] * 18)],
    "the last is altered": [*WORDS[:-1], " x"],
}


@pytest.mark.parametrize("seams", SEAMS)
@pytest.mark.parametrize("pieces", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_refused(pieces: list[str], seams: list[int]) -> None:
    with pytest.raises(AssertionError):
        judge(said(pieces), seams)
    with pytest.raises(AssertionError):
        judge(whole(said(pieces)), seams, whole(REFERENCE))


def test_the_text_alone_is_not_enough_for_a_stream() -> None:
    """Two tokens in one piece: one of the two events is lost, or there are others than the text's."""
    with pytest.raises(AssertionError):
        judge(said([*WORDS[:38], WORDS[38] + WORDS[39]]), [20])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda outcome: replace(outcome, done=False),
        lambda outcome: replace(outcome, error={"code": "engine_lost"}),
        lambda outcome: replace(outcome, finish=["stop"]),
        lambda outcome: replace(outcome, finish=["length", "length"]),
        lambda outcome: replace(outcome, usage=None),
        lambda outcome: replace(outcome, usage={"prompt_tokens": 25, "completion_tokens": TOKENS}),
        lambda outcome: replace(outcome, usage={"prompt_tokens": 5, "completion_tokens": TOKENS - 1}),
    ],
)
def test_an_answer_that_did_not_end_as_it_should_is_refused(spoil: Callable[[Outcome], Outcome]) -> None:
    with pytest.raises(AssertionError):
        judge(spoil(REFERENCE), [20])


def test_what_has_a_form_is_all_of_it_or_an_error() -> None:
    error = {"code": "not_resumed"}
    check_shaped(REFERENCE, REFERENCE)
    check_shaped(replace(said(WORDS[:20]), error=error, done=False, finish=["error"]), REFERENCE)
    for wrong in (
        said(WORDS[:-1]),
        said(WORDS + WORDS[-1:]),
        replace(REFERENCE, done=False),
        replace(said(WORDS[:20]), error=error, finish=["error"]),
        replace(said(WORDS[:20]), error=error, done=False),
        replace(said([*WORDS[:19], " x"]), error=error, done=False, finish=["error"]),
    ):
        with pytest.raises(AssertionError):
            check_shaped(wrong, REFERENCE)


def test_events_that_are_no_text_are_not_counted() -> None:
    assert pieces_at_seams([0, 1, 2, 21, TOKENS + 1, TOKENS + 2, TOKENS + 3]) == [
        0,
        0,
        1,
        20,
        TOKENS,
        TOKENS,
        TOKENS,
    ]
