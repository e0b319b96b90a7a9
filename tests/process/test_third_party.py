"""What we rely on in the engine beyond its interface: it is all there, and where it is not, it is told."""

from __future__ import annotations

import logging
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_llm.engine.inspect import describe
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.spec import DraftSpec, EngineSpec, PaceSpec
from mesh_llm.third_party import features_off, texts_missing
from tests.process.test_supervisor import Watched
from tests.support.third_party_table import engine_symbols, table

ROOT = Path(__file__).parents[2]
CLEAR = b"_ZN12common_batch5clearEv"
OFF = (
    "chunked prefill is off, answers under way pause while the engine reads a long prompt: "
    "this engine has no _ZN12common_batch5cleaxEv"
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="functions are replaced on Linux only")


@pytest.fixture
def mesh(libraries: dict[str, Path]) -> Path:
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh is not built on this machine")
    return libraries["mesh"]


@pytest.fixture
def made_for_another(mesh: Path, tmp_path: Path) -> Path:
    """A library that looks for a function which this engine does not have."""
    copy = tmp_path / mesh.name
    shutil.copy(mesh, copy)
    copy.write_bytes(copy.read_bytes().replace(CLEAR, CLEAR.replace(b"clear", b"cleax")))
    return copy


def test_the_engine_has_every_symbol_and_text(mesh: Path) -> None:
    assert features_off(engine_symbols(mesh)) == ()
    assert texts_missing(find_wheel().module) == ()


def test_every_symbol_is_listed(mesh: Path) -> None:
    """What the library exports besides its own interface stands in for the engine's."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    said = subprocess.run(
        ["nm", "-D", "--defined-only", mesh], check=True, stdout=subprocess.PIPE, timeout=60, text=True
    )
    # Weak ones are templates of the standard library, which are in every library that uses them.
    functions = [line.split()[-1] for line in said.stdout.splitlines() if line.split()[-2] == "T"]
    theirs = {name for name in functions if not name.startswith("ggml_mesh_")} - {"ggml_backend_init"}
    assert theirs == {symbol.name for symbol in engine_symbols(mesh) if symbol.replaced}


def test_the_page_has_the_table(mesh: Path) -> None:
    page = (ROOT / "docs" / "design" / "engine-upgrade.md").read_text("utf-8")
    assert table(engine_symbols(mesh)) in page, "python -m tests.support.third_party_table prints it"


async def test_engine_info_tells_what_is_off(made_for_another: Path) -> None:
    assert (await describe({"mesh": made_for_another}))["features_off"] == [OFF]


async def test_an_engine_without_a_symbol_serves_and_the_log_tells(
    made_for_another: Path,
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = EngineSpec(
        model=str(tiny_model),
        alias="tiny",
        context=512,
        slots=1,
        threads=1,
        key=secrets.token_urlsafe(32),
        libraries={"mesh": str(made_for_another)},
        draft=DraftSpec(text_depth=8),
        pace=PaceSpec(usual=64, fewest=16),
    )
    watched = Watched(spec, tmp_path)
    with caplog.at_level(logging.WARNING):
        async with watched.running():
            await watched.until_ready()
            assert await watched.figures(spec.key)

    assert f"engine feature missing: {OFF}" in caplog.messages
