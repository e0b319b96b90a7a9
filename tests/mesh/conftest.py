"""Meshes for tests that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.joining import Lab, lab, write_model
from tests.support.mesh import MeshProcesses
from tests.support.node import temporary_home
from tests.support.waiting import until

NAMES = ("one", "two", "three")
WHOLE_S = 90.0
PATIENCE_S = 6.0
"""For a node that has failed once or twice to be tried again."""


class _Kept:
    """A mesh that one test after the other breaks, and that has to heal in between."""

    def __init__(self, model: Path, options: tuple[str, ...]) -> None:
        self._model = model
        self._options = options
        self._stack = ExitStack()
        self.mesh: MeshProcesses | None = None

    def whole(self) -> MeshProcesses:
        if self.mesh is None:
            folder = self._stack.enter_context(temporary_home())
            self.mesh = self._stack.enter_context(MeshProcesses(folder, self._model))
            self.mesh.create(NAMES[0], "--split", *self._options)
            for name in NAMES[1:]:
                self.mesh.join(name, *self._options)
        for name in NAMES:
            if name not in self.mesh.nodes:
                self.mesh.restart(name)
        self._forgive(self.mesh)
        self.mesh.serving(within_s=WHOLE_S)
        return self.mesh

    def _forgive(self, mesh: MeshProcesses) -> None:
        """One that test after test takes down is kept out for longer each time; started anew it is not."""
        try:
            agreed = until(mesh.agreed, within_s=WHOLE_S, what="some plan serves")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{mesh.told()}") from None
        if left_out := set(NAMES).difference(name for name, _, _ in agreed.stages):
            try:
                mesh.serving(within_s=PATIENCE_S)
            except AssertionError:
                for name in left_out:
                    mesh.stop(name)
                    mesh.restart(name)

    def end(self, error: BaseException | None = None) -> None:
        self.mesh = None
        self._stack.__exit__(type(error) if error else None, error, None)


@pytest.fixture(scope="module")
def options() -> tuple[str, ...]:
    """What each node of the mesh is started with besides; a module may have its own."""
    return ()


@pytest.fixture(scope="module")
def kept(smollm2: Path, options: tuple[str, ...]) -> Iterator[_Kept]:
    kept = _Kept(smollm2, options)
    try:
        yield kept
    finally:
        kept.end()


@pytest.fixture
def trio(kept: _Kept, request: pytest.FixtureRequest) -> Iterator[MeshProcesses]:
    """Three nodes that serve a model split over all of them; a test may leave any of them dead."""
    failed = request.session.testsfailed
    try:
        yield kept.whole()
    except BaseException as error:
        kept.end(error)
        raise
    if request.session.testsfailed > failed:
        kept.end()


@pytest.fixture
def heal(kept: _Kept) -> Callable[[], MeshProcesses]:
    """Makes the trio whole again in the middle of a test."""
    return kept.whole


@pytest.fixture
def mesh(smollm2: Path) -> Iterator[MeshProcesses]:
    """None yet, and for this test alone."""
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def model(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one that answers nonsense."""
    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def nodes(model: Path) -> Iterator[Lab]:
    """None yet; those that are started serve `model`."""
    with lab(model) as nodes:
        yield nodes
