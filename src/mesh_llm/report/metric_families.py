"""Prometheus' families of series, made at once from rows of labels and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Row = tuple[Sequence[str], float]


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def labelled(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def summed(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """Prometheus adds `_total` to its name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def one_of(name: str, text: str, kinds: type[StrEnum], now: StrEnum | None) -> Metric:
    """A series for each, so that one can be asked for that is not there."""
    label = name.rpartition("_")[2]
    return labelled(name, text, (label,), [((kind.value,), float(kind is now)) for kind in kinds])
