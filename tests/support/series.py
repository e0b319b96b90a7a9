"""A scrape of `/metrics`, as Prometheus would read it."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """Series by name and labels. Equal ones, which Prometheus refuses, fail here, too."""

    def __init__(self, text: bytes) -> None:
        self.bytes = len(text)
        self.kinds: dict[str, str] = {}
        self.help: dict[str, str] = {}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text.decode()):
            assert family.name not in self.kinds, f"{family.name} comes twice"
            self.kinds[family.name] = family.type
            self.help[family.name] = family.documentation
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self._values, f"{key} comes twice"
                self._values[key] = sample.value

    def __len__(self) -> int:
        return len(self._values)

    def value(self, name: str, labels: Mapping[str, str] | None = None, /, **more: str) -> float:
        """Of the one series that has these labels, and perhaps others."""
        wanted = {**(labels or {}), **more}.items()
        (found,) = [v for (n, have), v in self._values.items() if n == name and wanted <= dict(have).items()]
        return found

    def of(self, name: str, label: str) -> dict[str, float]:
        """All series of a name, by one of their labels."""
        return {dict(have)[label]: value for (n, have), value in self._values.items() if n == name}

    def state(self, name: str) -> str:
        """Of series of which one is 1: its label."""
        (found,) = [label for label, value in self.of(name, name.rpartition("_")[2]).items() if value == 1]
        return found

    def labels(self, name: str) -> set[str]:
        return {label for found, have in self._values if found == name for label, _ in have}

    def names(self) -> set[str]:
        return {name for name, _ in self._values}
