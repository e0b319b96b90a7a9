"""What workers of a split engine do while they have to do."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.engine.telemetry import Flow, Flows, Rates, flows, paces
from mesh_llm.types import StageCounters


def counters(runs: int, *, wait_ms: float, compute_ms: float = 0.0, sent: int = 0) -> StageCounters:
    return StageCounters(
        runs=runs,
        compute_ns=int(compute_ms * 1e6),
        wait_ns=int(wait_ms * 1e6),
        sent_bytes=sent,
        received_bytes=2 * sent,
        worker_in_bytes=sent,
        worker_out_bytes=2 * sent,
        weight_bytes=0,
        queued=0,
        in_flight=1,
    )


def test_an_interval_of_work_is_what_counts() -> None:
    before = {"MESH0": counters(10, wait_ms=60_000, compute_ms=50, sent=1000)}
    after = {"MESH0": counters(110, wait_ms=60_500, compute_ms=550, sent=101_000)}

    assert paces({}, before, after) == {"MESH0": counters(100, wait_ms=500, compute_ms=500, sent=100_000)}


def test_idle_seconds_and_the_last_words_of_an_answer_change_nothing() -> None:
    known = {"MESH0": counters(100, wait_ms=500)}
    before = {"MESH0": counters(110, wait_ms=1000)}

    assert paces(known, before, before) == known
    assert paces(known, before, {"MESH0": counters(120, wait_ms=1990)}) == known


def test_another_pace_replaces_it() -> None:
    known = {"MESH0": counters(100, wait_ms=500)}
    before = {"MESH0": counters(110, wait_ms=1000)}

    assert paces(known, before, {"MESH0": counters(160, wait_ms=1700)}) == {
        "MESH0": counters(50, wait_ms=700)
    }


def test_a_first_report_begins_with_the_link() -> None:
    first = {"MESH0": counters(24, wait_ms=900)}

    assert paces({}, {}, first) == first
    assert paces({}, {}, {"MESH0": counters(0, wait_ms=900)}) == {}


def figures(tokens: float, seconds: float) -> dict[str, float]:
    return {
        "prompt_tokens_total": 10 * tokens,
        "prompt_seconds_total": seconds,
        "tokens_predicted_total": tokens,
        "tokens_predicted_seconds_total": seconds,
    }


def test_rates_are_those_of_the_last_answers_however_often_they_are_read() -> None:
    rates = Rates()
    rates.read(figures(100, 5))
    rates.read(figures(100, 5))
    rates.read({})

    assert (rates.decode_tok_s, rates.prompt_tok_s) == (20.0, 200.0)
    rates.read(figures(150, 6))
    assert (rates.decode_tok_s, rates.prompt_tok_s) == (50.0, 500.0)


def test_a_single_token_is_no_rate() -> None:
    rates = Rates()
    rates.read(figures(1, 1e-6))

    assert rates.decode_tok_s == 0.0
    rates.read(figures(21, 1.0))
    assert round(rates.decode_tok_s) == 20


def moved(sent: int, *, pushed: int = 0) -> StageCounters:
    return replace(counters(1, wait_ms=0, sent=sent), worker_out_bytes=2 * sent + pushed)


def test_what_crosses_a_link_is_what_came_since_the_last_report() -> None:
    before, after = {"MESH0": moved(1000, pushed=500)}, {"MESH0": moved(5000, pushed=3500)}

    found = flows({}, before, after, seconds=1.5)

    assert found == {
        "MESH0": Flows(
            host=Flow(bytes_per_s=8000.0, peak_bytes_per_s=8000.0),
            following=Flow(bytes_per_s=2000.0, peak_bytes_per_s=2000.0),
        )
    }


def test_after_a_pause_the_last_second_counts_and_the_best_one_is_kept() -> None:
    best = Flow(bytes_per_s=9000.0, peak_bytes_per_s=9000.0)
    known = {"MESH0": Flows(host=best, following=best)}

    found = flows(known, {"MESH0": moved(1000)}, {"MESH0": moved(2000)}, seconds=600.0)

    assert found["MESH0"].host == Flow(bytes_per_s=3000.0, peak_bytes_per_s=9000.0)
    assert found["MESH0"].following == Flow(bytes_per_s=0.0, peak_bytes_per_s=9000.0)
    assert found["MESH0"].idle().host == Flow(bytes_per_s=0.0, peak_bytes_per_s=9000.0)


def test_a_worker_that_pushes_nothing_has_sent_the_host_more_than_it_counted() -> None:
    first = {"MESH0": replace(moved(1000), worker_out_bytes=1900)}

    assert flows({}, {}, first, seconds=1.0)["MESH0"].following == Flow()
