"""How long a node that failed is left alone."""

from __future__ import annotations

from mesh_llm.planning.backoff import NEEDED_SHARE, Backoff, BetterPlan, GivingBack
from mesh_llm.types import NodeId

A, B = NodeId("a"), NodeId("b")


def test_nobody_is_barred_at_first() -> None:
    assert Backoff().barred(now=0.0) == {}
    assert Backoff().next_change(now=0.0) is None


def test_a_failure_bars_for_two_seconds() -> None:
    attempts = Backoff().failed(A, "refused: no room", now=100.0)

    assert attempts.barred(now=100.0) == {A: "refused: no room"}
    assert attempts.barred(now=101.9) == {A: "refused: no room"}
    assert attempts.barred(now=102.0) == {}
    assert attempts.next_change(now=100.0) == 100.2
    assert attempts.next_change(now=100.5) == 102.0
    assert attempts.next_change(now=102.0) is None


def test_failures_in_a_row_double_the_pause_up_to_a_minute() -> None:
    attempts, now, pauses = Backoff(), 0.0, []
    for _ in range(8):
        attempts = attempts.failed(A, "died", now=now)
        until = attempts.failures[A].until_s
        pauses.append(until - now)
        now = until + 1

    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_five_minutes_of_health_forget_it() -> None:
    twice = Backoff().failed(A, "died", now=0.0).failed(A, "died", now=3.0)

    assert twice.failures[A].until_s == 7.0
    assert twice.failed(A, "died", now=306.9).failures[A].until_s == 306.9 + 8
    assert twice.failed(A, "died", now=307.0).failures[A].until_s == 309.0
    assert list(twice.failed(B, "died", now=307.0).failures) == [B]


def test_each_node_has_its_own() -> None:
    attempts = Backoff().failed(A, "died", now=0.0).failed(A, "died", now=2.0).failed(B, "hung", now=3.0)

    assert attempts.barred(now=4.0) == {A: "died", B: "hung"}
    assert attempts.barred(now=5.5) == {A: "died"}
    assert attempts.next_change(now=4.0) == 5.0
    assert attempts.forget(A).barred(now=4.0) == {B: "hung"}
    assert attempts.barred(now=4.0) == {A: "died", B: "hung"}


def test_where_it_is_needed_a_node_is_kept_out_for_a_tenth() -> None:
    attempts, now, pauses = Backoff(), 0.0, []
    for _ in range(7):
        attempts = attempts.failed(A, "died", now=now)
        until = attempts.next_change(now=now)
        assert until is not None
        assert attempts.barred(now=until - 0.01, share=NEEDED_SHARE) == {A: "died"}
        assert attempts.barred(now=until, share=NEEDED_SHARE) == {}
        assert attempts.barred(now=until) == {A: "died"}
        pauses.append(round(until - now, 3))
        now = until

    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.0, 6.0]


def test_a_model_that_keeps_failing_leaves_its_memory_for_longer_and_longer() -> None:
    giving_back, pauses = GivingBack(), []
    for _ in range(9):
        giving_back = giving_back.failed(now=1000.0, well_s=0.0)
        pauses.append(max(0.0, giving_back.until_s - 1000.0))
    assert pauses == [0, 60, 120, 240, 480, 960, 1800, 1800, 1800]
    # One that had served for five minutes is tried again at once.
    assert giving_back.failed(now=5000.0, well_s=300.0) == GivingBack(failures=1)


def test_a_better_plan_that_fails_again_and_again_waits_longer_and_longer_and_another_one_does_not() -> None:
    better, now, pauses = BetterPlan(), 0.0, []
    for _ in range(7):
        assert not better.waits(("one",), now=now)
        better = better.failed(("one",), now=now)
        assert better.waits(("one",), now=now)
        assert not better.waits(("two",), now=now)
        pauses.append(better.until_s - now)
        now = better.until_s

    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    assert better.failed(("two",), now=now).until_s == now + 2
