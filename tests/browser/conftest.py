"""A browser and a mesh for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import CHROMIUM, Visit, chromium, visit
from tests.support.mesh import MeshProcesses
from tests.support.node import temporary_home

NAMES = ("one", "two", "three")
WHOLE_S = 90.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: while Playwright runs, no other test can run an event loop.
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (sudo apt install chromium)")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def trio(smollm2: Path) -> Iterator[MeshProcesses]:
    """Three nodes, a model split over all of them, and the console of the first."""
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        mesh.create(NAMES[0], "--split", "--console", "0")
        for name in NAMES[1:]:
            mesh.join(name)
        mesh.serving(within_s=WHOLE_S)
        yield mesh


def console_of(mesh: MeshProcesses) -> str:
    return str(mesh.nodes[NAMES[0]].status()["console"]["url"])


@pytest.fixture
def whole(trio: MeshProcesses) -> MeshProcesses:
    """The same, healed from what the last test did to it."""
    for name in NAMES:
        if name not in trio.nodes:
            trio.restart(name)
    trio.serving(within_s=WHOLE_S)
    return trio


@pytest.fixture
def visited(browser: Browser, trio: MeshProcesses) -> Iterator[Visit]:
    with visit(browser, console_of(trio)) as visited:
        yield visited


@pytest.fixture
def page(visited: Visit) -> Page:
    return visited.open()
