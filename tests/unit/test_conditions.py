"""What a way of a line does to what passes: pure figures, seeded."""

from __future__ import annotations

import pytest

from mesh_llm.errors import UsageError
from mesh_llm.lab.conditions import RETRANSMIT_S, Conditions, Way


def way(seed: str = "7", **fields: float) -> Way:
    return Way(Conditions(**fields), seed=seed)


def test_nothing_is_held_up_unless_it_was_asked_for() -> None:
    assert Conditions().is_open
    assert not Conditions(delay_s=0.001).is_open
    assert not Conditions(bytes_s=1e6).is_open
    assert not Conditions(loss=0.1).is_open
    assert way().arrival(5.0, 1000) == 5.0
    assert way().retransmitting_s(10**6) == 0.0


@pytest.mark.parametrize(
    "fields",
    [
        {"delay_s": -0.001},
        {"delay_s": 61.0},
        {"jitter_s": 0.001},
        {"delay_s": 0.01, "jitter_s": 0.02},
        {"bytes_s": 0.0},
        {"bytes_s": float("nan")},
        {"loss": 1.0},
        {"loss": -0.1},
        {"delay_s": float("nan")},
    ],
)
def test_impossible_conditions_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Conditions(**fields)


def test_what_is_sent_together_shares_the_bandwidth() -> None:
    narrow = way(delay_s=0.5, bytes_s=1000.0)
    assert [narrow.arrival(1.0, 100) for _ in range(3)] == pytest.approx([1.6, 1.7, 1.8])
    # After a pause it is free again.
    assert narrow.arrival(9.0, 100) == pytest.approx(9.6)


def test_jitter_stays_within_its_bounds_and_is_seeded() -> None:
    ways = way(delay_s=0.01, jitter_s=0.004), way(delay_s=0.01, jitter_s=0.004)
    first, second = ([each.arrival(0.0, 1) for _ in range(500)] for each in ways)
    assert first == second
    assert first != [way(seed="8", delay_s=0.01, jitter_s=0.004).arrival(0.0, 1) for _ in range(500)]
    assert min(first) >= 0.006
    assert max(first) <= 0.014
    assert min(first) < 0.007
    assert max(first) > 0.013


def test_the_share_that_is_lost_is_what_was_asked_for() -> None:
    lossy = way(loss=0.1)
    assert 800 < sum(lossy.loses() for _ in range(10_000)) < 1200
    assert 800 < lossy.passage().lost < 1200


def test_loss_costs_a_stream_time() -> None:
    """A lone packet waits for the time-out; among many, one more round trip is enough."""
    lossy = way(loss=0.5, delay_s=0.01)
    alone = {round(lossy.retransmitting_s(100), 6) for _ in range(200)}
    assert alone >= {0.0, RETRANSMIT_S + 0.02}
    many = way(loss=0.0001, delay_s=0.01)
    late = {round(many.retransmitting_s(1448 * 100), 6) for _ in range(1000)}
    assert late >= {0.0, 0.02}


def test_conditions_can_change_at_any_time() -> None:
    changing = way(delay_s=0.1)
    assert changing.arrival(1.0, 1) == pytest.approx(1.1)
    changing.conditions = Conditions()
    assert changing.arrival(2.0, 1) == 2.0


def test_they_read_well() -> None:
    assert Conditions().text() == "0 ms"
    assert Conditions(delay_s=0.02, jitter_s=0.001).text() == "20 ± 1 ms"
    assert Conditions(delay_s=0.005, bytes_s=1.25e7, loss=0.015).text() == "5 ms, 12.5 MB/s, 1.5 % lost"
