"""The meter of a connection's bytes."""

from __future__ import annotations

from mesh_llm.peers.paths import Meter


def test_rates_come_from_the_difference_of_two_readings() -> None:
    meter = Meter()

    meter.read(1000, 500, now=10.0)
    assert (meter.bytes_per_s, meter.peak_bytes_per_s) == (0.0, 0.0)
    meter.read(3000, 1500, now=12.0)
    assert meter.bytes_per_s == 1500.0
    meter.read(3100, 1500, now=13.0)

    assert meter.bytes_per_s == 100.0
    assert meter.peak_bytes_per_s == 1500.0
    assert (meter.sent_bytes, meter.received_bytes) == (3100, 1500)


def test_a_new_connection_counts_from_nothing_and_is_no_negative_rate() -> None:
    meter = Meter()
    meter.read(5000, 5000, now=1.0)
    meter.read(10, 20, now=2.0)

    assert meter.bytes_per_s == 0.0
    assert (meter.sent_bytes, meter.received_bytes) == (10, 20)


def test_a_clock_that_stands_still_is_no_division_by_zero() -> None:
    meter = Meter()
    meter.read(0, 0, now=1.0)
    meter.read(100, 0, now=1.0)

    assert meter.bytes_per_s == 0.0
