"""The relay's figures, counted as plain numbers and turned into Prometheus' text when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST

NO_ROOM = "client reads slowly"
UNKNOWN = "destination not here"


class RelayCounters:
    def __init__(self) -> None:
        self.frames = 0
        """Messages with datagrams that came in."""
        self.bytes = 0
        self.delivered = 0
        self.dropped: Counter[str] = Counter()
        """By reason."""
        self.admitted = 0
        self.refused: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()
        self.replaced = 0
        self.throttled = 0


class RelayMetrics(Collector):
    def __init__(self, counters: RelayCounters, clients: Callable[[], int]) -> None:
        self._counters = counters
        self._clients = clients
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return exposition.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield GaugeMetricFamily(
            "mesh_relay_clients", "Endpoints that are connected now", value=self._clients()
        )
        for name, words, value in (
            ("frames", "Messages with datagrams received", counters.frames),
            ("bytes", "Bytes of datagrams received", counters.bytes),
            ("delivered", "Messages with datagrams passed on", counters.delivered),
            ("admitted", "Endpoints admitted", counters.admitted),
            ("replaced", "Times that an id connected again while it was connected", counters.replaced),
            ("throttled", "Times that a client had to wait because of its rate limit", counters.throttled),
        ):
            yield CounterMetricFamily(f"mesh_relay_{name}", words, value=value)
        for name, words, reasons in (
            ("dropped", "Messages with datagrams dropped", counters.dropped),
            ("refused", "Connections refused", counters.refused),
            ("removed", "Clients that the relay disconnected", counters.removed),
        ):
            family = CounterMetricFamily(f"mesh_relay_{name}", words, labels=["reason"])
            for reason, count in sorted(reasons.items()):
                family.add_metric([reason], count)
            yield family
