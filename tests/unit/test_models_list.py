"""How `mesh-llm models` looks where something is missing: an engine, a header, room."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.cli import inventory, models
from mesh_llm.cli.inventory import Inventory, Listed, take_stock
from mesh_llm.errors import EngineFailed, EngineMissing
from mesh_llm.home import Home as NodeHome
from mesh_llm.models.header_cache import NO_FINGERPRINT, Header
from mesh_llm.models.stores import LocalModel, Skipped, Store
from mesh_llm.planning.would_fit import WouldFit
from mesh_llm.status_schema import ServedModelStatus, from_document
from tests.support import planning
from tests.support.stores import Home

MISSING = EngineMissing("the engine is not installed")


def entry(here: WouldFit | None, mesh: WouldFit | None = None) -> Listed:
    path = Path("/models/big.gguf")
    model = LocalModel(name="big", path=path, files=(path,), size_bytes=20 * 10**9, store=Store.HUB)
    facts = planning.model(fingerprint=NO_FINGERPRINT)
    header = Header(architecture="llama", facts=facts, problem="", refusal=None)
    return Listed(model=model, header=header, here=here, mesh=mesh)


def fit(fits: bool, *, context: int = 4096, need: float = 21.3) -> WouldFit:
    need_bytes = int(need * 10**9)
    return WouldFit(fits=fits, context=context, need_bytes=need_bytes, have_bytes=10**10, nodes=1, reason="")


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (entry(None), "huggingface"),
        (entry(fit(True)), "fits"),
        (entry(fit(True, context=512)), "fits, ctx 512"),
        (entry(fit(False)), "needs 21.3 GB"),
        (entry(fit(False, need=412)), "needs 412 GB"),
        (entry(fit(False), fit(True)), "fits the mesh"),
        (entry(fit(False), fit(False)), "needs 21.3 GB"),
    ],
)
def test_the_fit_in_words(
    listed: Listed, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.show(Inventory(listed=(listed,), skipped=(), places=Home(tmp_path).places, rooms=None, note=""))

    shown = capsys.readouterr().out.splitlines()[1]
    assert shown.startswith("big   Q4_K_M  20.0 GB      40      32k  llama         huggingface")
    assert shown.endswith(f"  {words}")


def test_priorities_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [{"name": "tiny", "state": "serving"}, {"name": "coder", "state": "serving", "priority": 5}]
    served = tuple(from_document(ServedModelStatus, each) for each in told)
    places = Home(tmp_path).places
    models.show(Inventory(places=places, listed=(), skipped=(), served=served, rooms=None, note=""))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["tiny", "0"], ["coder", "5"]]


def test_many_reasons_are_not_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = tuple(
        Skipped(path=Path(f"/models/{index}.gguf"), store=Store.MODELS, reason="is empty")
        for index in range(100)
    )
    models.show(Inventory(listed=(), skipped=skipped, places=Home(tmp_path).places, rooms=None, note=""))

    told = capsys.readouterr().err.splitlines()
    assert len(told) == 14
    assert told[1] == "Not listed: /models/0.gguf is empty"
    assert told[-1] == "Not listed: 88 more; --json names them"


async def test_without_an_engine_files_are_listed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    home.add("x.gguf")
    for name, value in home.env.items():
        monkeypatch.setenv(name, value)

    def find_wheel() -> None:
        raise MISSING

    async def describe(libraries: dict[str, Path]) -> None:
        raise EngineFailed("it does not run")

    monkeypatch.setattr(inventory, "find_wheel", find_wheel)
    monkeypatch.setattr(inventory, "describe", describe)

    found = await take_stock(NodeHome(tmp_path / "home"), progress=lambda step: None)
    models.show(found)

    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split() == ["x", "0", "MB", "models"]
    assert captured.err == "The model files could not be read: the engine is not installed\n"
