"""Of a parametrised test, some cases in every run; the others with the long tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases, all but `kept` marked as `full`."""
    every = list(cases)
    assert all(case in every for case in kept), kept
    return [case if case in kept else pytest.param(case, marks=pytest.mark.full) for case in every]


def first(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases of a test with several parameters, all but the first `count` marked as `full`."""
    every = list(cases)
    return [*every[:count], *(pytest.param(*case, marks=pytest.mark.full) for case in every[count:])]
