"""Meshes that real clients talk to: through the host, and through a lite client that joined it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_gguf
from tests.support.installed import Client, FromNpm, FromPyPI
from tests.support.lone_engine import LoneEngine
from tests.support.node import NodeProcess
from tests.support.pairs import Pair, Pairs
from tests.support.questions import CHAT
from tests.support.sampling import sampled
from tests.support.strangers import Strangers

FOLDER = Path(__file__).parent
TEMPLATE = (FOLDER / "tools.jinja").read_text()
"""SmolLM2's own knows of no tools."""
REAL = ("--ctx-size", "2048", "--parallel", "1")
TINY = ("--ctx-size", "512", "--parallel", "1")
PAIRS = Pairs()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Here, where a test's time limit does not count; what fails is told by the test that needs it."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    clients: dict[str, type[Client]] = {"pi": FromNpm, "litellm": FromPyPI}
    for name, kind in clients.items():
        if name in wanted and not session.config.option.collectonly:
            kind(FOLDER / name).install()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the meshes with the last test of this folder; fixtures end with a module, or with the whole run."""
    if nextitem is None or FOLDER not in nextitem.path.parents:
        PAIRS.end()


def pytest_sessionfinish() -> None:
    """An interrupted run tears nothing down; what reads the nodes' output would wait for their end."""
    PAIRS.end()


@pytest.fixture(scope="session")
def strangers() -> Iterator[Strangers]:
    with Strangers() as strangers:
        yield strangers


@pytest.fixture(autouse=True)
def nobody_calls_out(strangers: Strangers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No client may call beyond this machine, be it for telemetry, prices or updates."""
    for name, value in strangers.environment().items():
        monkeypatch.setenv(name, value)
    before = len(strangers.called)
    yield
    assert strangers.called[before:] == []


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Pair:
    return PAIRS.get(smollm2, *REAL, "--engine-set", f"chat_template={TEMPLATE}")


@pytest.fixture(scope="module")
def tiny_pair(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Answers nonsense, at once: a request without a limit ends soon, too."""
    model = tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")
    return PAIRS.get(model, *TINY)


@pytest.fixture(scope="module")
def embedding_pair(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Its file asks for the mean of all tokens."""
    path = tmp_path_factory.mktemp("embedding") / "embedding.gguf"
    return PAIRS.get(tiny_gguf.write(path, "llama", metadata={"pooling_type": 1}), *TINY, "--embeddings")


@pytest.fixture(scope="module", params=sampled(["host", "client"], "client"))
def way(request: pytest.FixtureRequest) -> str:
    """Through which node of a pair a test asks."""
    return str(request.param)


@pytest.fixture(scope="module")
def api(pair: Pair, way: str) -> NodeProcess:
    node: NodeProcess = getattr(pair, way)
    return node


@pytest.fixture(scope="module")
def engine(smollm2: Path, libraries: dict[str, Path]) -> LoneEngine:
    return PAIRS.engine(smollm2, libraries, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def chat_text(engine: LoneEngine) -> str:
    """What the engine alone says to CHAT."""
    return str(engine.ask("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"])
