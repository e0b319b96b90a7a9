"""The waits of tests: bounds in time that the machine ran."""

from __future__ import annotations

import pytest

from tests.support.waiting import LOOK_S, STRETCH, Patience, until


class Machine:
    """A clock, and processors of which others take a part."""

    def __init__(self, *, ours: int, others: int) -> None:
        self.now = 1000.0
        self.ours, self.others = ours, others
        """Ticks a second."""

    def clock(self) -> float:
        return self.now

    def shares(self) -> tuple[int, int]:
        return round(self.now * self.ours), round(self.now * self.others)

    def seconds_until_over(self, within_s: float, *, step_s: float = 0.25) -> float:
        patience = Patience(within_s, clock=self.clock, shares=self.shares)
        began = self.now
        while not patience.is_over:
            self.now += step_s
        return self.now - began


@pytest.mark.parametrize("ours", [100, 3])
def test_a_machine_of_ones_own_is_given_the_bound(ours: int) -> None:
    assert Machine(ours=ours, others=0).seconds_until_over(10) == 10.25


def test_an_idle_machine_is_given_the_bound_too() -> None:
    assert Machine(ours=0, others=0).seconds_until_over(10) == 10.25


def test_what_others_took_does_not_count() -> None:
    took_s = Machine(ours=100, others=100).seconds_until_over(10)
    assert 20 - 2 * LOOK_S <= took_s <= 20 + 2 * LOOK_S


def test_a_machine_that_stands_still_does_not_make_a_wait_endless() -> None:
    assert Machine(ours=1, others=200).seconds_until_over(10) == 10 * STRETCH + 0.25


def test_a_jump_past_the_bound_is_looked_at_by_what_ran_meanwhile() -> None:
    # One look after 30 s in which others had it all but a tenth: 3 s counted.
    assert Machine(ours=20, others=180).seconds_until_over(10, step_s=30) > 30


def test_a_condition_that_never_holds_is_named() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: pigs fly"):
        until(lambda: False, within_s=0.05, what="pigs fly")


def test_the_first_true_value_is_returned() -> None:
    values = iter(["", "", "here"])
    assert until(lambda: next(values), within_s=5, what="a word") == "here"
