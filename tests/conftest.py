"""What all tests share: the engine's native libraries, the default model, a home for each test.

Libraries and model come from the person's own cache, where `make demo` keeps them, too: a fresh
machine builds and downloads them once, before the first test that needs them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh_llm.engine import build
from mesh_llm.engine.sources import sources_tree
from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from tests.support.command import MESH_LLM
from tests.support.node import temporary_home

# A run in the background ignores Ctrl-C, one under nohup its terminal's end, and so would every child
# that is sent one here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_NEED_LIBRARIES = {"libraries", "engine_sources"}
_NEED_MODEL = {"smollm2"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("full")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Set up what the chosen tests need: here, where a test's time limit does not count."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        if wanted & (_NEED_LIBRARIES | _NEED_MODEL) and build.at_hand().missing:
            _run("engine", "build")
        if wanted & _NEED_MODEL and not _smollm2().is_file():
            _run("download", "smollm2")


def _run(*arguments: str) -> None:
    # A failure is told by the command itself, and shows again as the tests' reason to skip.
    subprocess.run([*MESH_LLM, *arguments], check=False)


def _smollm2() -> Path:
    return models_folder() / catalog.load().find("smollm2").files[0]


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """The native libraries at hand; none where this machine cannot build them."""
    return build.at_hand().libraries


@pytest.fixture(scope="session")
def engine_sources() -> Path:
    """The engine's sources, unpacked."""
    tree = sources_tree()
    if not tree.is_dir():
        pytest.skip("the engine's sources could not be fetched")
    return tree


@pytest.fixture(scope="session")
def smollm2(libraries: dict[str, Path]) -> Path:
    path = _smollm2()
    if not path.is_file():
        # In CI a run without the model would test next to nothing and look green.
        (pytest.fail if os.environ.get("CI") else pytest.skip)("smollm2 could not be downloaded")
    return path


@pytest.fixture
def home() -> Iterator[Path]:
    with temporary_home() as folder:
        yield folder
