"""Honest nodes, and members that attack them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.adversary import Adversary
from tests.support.background import Background, background
from tests.support.joining import Lab, lab, write_model

Villain = Callable[..., Adversary]


@pytest.fixture(scope="module")
def model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def nodes(model: Path) -> Iterator[Lab]:
    with lab(model) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def loop() -> Iterator[Background]:
    with background() as loop:
        yield loop


@pytest.fixture
def villain(loop: Background) -> Iterator[Villain]:
    """Makes an adversary that has joined with a token; all of them end with the test."""
    made: list[Adversary] = []

    def make(token: str, *, timeout_s: float = 30.0, **options: Any) -> Adversary:
        made.append(Adversary(loop, **options))
        return made[-1].join(token, timeout_s=timeout_s)

    try:
        yield make
    finally:
        for one in made:
            one.end()
