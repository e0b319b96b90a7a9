"""Model files that are replaced while a node has them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm import file_stamp
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.supervisor import EngineSupervisor
from mesh_llm.errors import EngineFailed, LinkRefused
from mesh_llm.local import model_files as local_models
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.local.side_files import SideFiles
from mesh_llm.mesh_settings import MeshSettings, SideFile
from mesh_llm.node import file_watch
from mesh_llm.node.file_watch import FileWatch
from mesh_llm.node.layer_supply import LayerSupply
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event, Fingerprint, ModelFacts
from mesh_llm.worker.lending import Terms
from tests.support import planning

OURS = Fingerprint("first bytes")
BEFORE, AFTER = "first bytes", "other bytes"
"""As long as each other."""


def rename_over(path: Path, text: str) -> None:
    """As `mv` does, and with the time of the file before, as `rsync -t` and `cp -p` have it."""
    about = path.stat()
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.utime(fresh, ns=(about.st_atime_ns, about.st_mtime_ns))
    fresh.replace(path)


def rewrite(path: Path, text: str) -> None:
    about = path.stat()
    path.write_text(text)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


HOW: list[Callable[[Path, str], None]] = [rename_over, rewrite]


class Machine:
    """With one model, whose bytes are its fingerprint."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "ours.gguf"
        self.path.write_text(BEFORE)
        self.model_files = ModelFiles()
        monkeypatch.setattr(self.model_files, "look", self._look)
        monkeypatch.setattr(file_watch, "LOOK_S", 0.01)
        self.settings: MeshSettings = planning.settings(fingerprint=OURS, alias="ours")
        self.said: list[str] = []
        self.given_up: list[str] = []
        self.spoilt: list[tuple[Fingerprint, str]] = []
        self.told = 0
        run = SimpleNamespace(give_up=lambda error: self.given_up.append(error.message))
        parts: dict[str, Any] = {
            "offers": SimpleNamespace(tell=self._tell_members),
            "lending": SimpleNamespace(spoil=lambda *what: self.spoilt.append(what)),
            "service": lambda fingerprint: SimpleNamespace(hosting=SimpleNamespace(runs=(run,))),
        }
        self.watch = FileWatch(
            **parts,
            model_files=self.model_files,
            settings=lambda: self.settings,
            tell=self._tell,
            on_files=lambda: None,
        )

    async def _look(self, path: Path) -> ModelFacts:
        return planning.model(fingerprint=Fingerprint(path.read_text()), files=(path,))

    def _tell(self, event: Event) -> None:
        self.said.append(event.text)

    def _tell_members(self) -> None:
        self.told += 1

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("change", HOW)
async def test_a_file_that_is_replaced_is_no_longer_given_or_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], None]
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    files = machine.model_files
    await files.read(machine.path)
    assert files.files(OURS) == (machine.path,)

    change(machine.path, AFTER)

    assert files.files(OURS) is None
    assert files.held(OURS) == ()


@pytest.mark.parametrize("change", HOW)
async def test_a_file_that_is_replaced_is_lost_until_it_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], None]
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    await machine.model_files.read(machine.path)
    watching = asyncio.create_task(machine.watch.run())
    change(machine.path, AFTER)
    await machine.until(lambda: len(machine.said) == 2)

    what = "replaced" if change is rename_over else "changed"
    reason = f"{machine.path} was {what} while this node ran"
    assert machine.said[0] == f"{reason}; it is checked anew before anything is computed with it"
    assert machine.said[1].startswith(f"{machine.path} is no longer ours, and nothing is computed with it: ")
    assert machine.model_files.facts(OURS) is None
    # Who has mapped a file that was renamed over goes on with the bytes of the first one.
    assert machine.given_up == ([] if change is rename_over else [reason])
    assert machine.spoilt == ([] if change is rename_over else [(OURS, reason)])
    assert machine.told == 1

    change(machine.path, BEFORE)
    await machine.until(lambda: machine.model_files.facts(OURS))
    await cancelled(watching)
    assert machine.said[2] == f"{machine.path} is ours, as before"


@pytest.mark.parametrize("change", HOW)
async def test_a_file_that_only_looks_the_same_is_not_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], None]
) -> None:
    """Whoever looks for the model meanwhile goes by its fingerprint, which takes samples."""
    machine = Machine(tmp_path, monkeypatch)

    async def samples(path: Path) -> ModelFacts:
        return planning.model(fingerprint=OURS, files=(path,))

    async def digest_of(facts: ModelFacts) -> str:
        await machine.model_files.find(machine.settings)
        return facts.files[0].read_text()

    monkeypatch.setattr(machine.model_files, "look", samples)
    monkeypatch.setattr(machine.watch._offers, "digest_of", digest_of, raising=False)
    monkeypatch.setattr(local_models, "_candidates", lambda settings: [machine.path])
    machine.settings = replace(machine.settings, digest=BEFORE)
    await machine.model_files.read(machine.path)
    watching = asyncio.create_task(machine.watch.run())
    change(machine.path, AFTER)
    await machine.until(lambda: len(machine.said) == 2)

    assert "is no longer ours" in machine.said[1]
    assert machine.model_files.facts(OURS) is None
    assert await machine.model_files.find(machine.settings) is None
    reason = f"{machine.path} is no longer ours"
    assert machine.given_up[-1:] == [reason]
    assert machine.spoilt[-1:] == [(OURS, reason)]

    change(machine.path, BEFORE)
    await machine.until(lambda: machine.model_files.facts(OURS))
    await cancelled(watching)


async def test_a_file_that_is_only_touched_is_checked_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    await machine.model_files.read(machine.path)
    watching = asyncio.create_task(machine.watch.run())
    rewrite(machine.path, BEFORE)
    await machine.until(lambda: len(machine.said) == 2)
    await cancelled(watching)

    assert machine.said[1] == f"{machine.path} is ours, as before"
    assert machine.model_files.files(OURS) == (machine.path,)


@pytest.mark.parametrize("change", HOW)
async def test_a_worker_lends_no_layers_of_a_file_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, str], None]
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    await machine.model_files.read(machine.path)
    unused: Any = None
    offers: Any = SimpleNamespace(side_files=SimpleNamespace(paths_of=lambda digests: {}))
    layers = LayerSupply(
        config=unused,
        settings=lambda: machine.settings,
        model_files=machine.model_files,
        offers=offers,
        mesh=unused,
        sources=unused,
        check=unused,
        tell=unused,
        doing=unused,
        progress=unused,
    )
    terms = Terms(epoch=1, fingerprint=OURS, first=0, last=1, need_bytes=1)
    weights = await layers.weights(terms, lambda done, total: None)
    assert weights.changed() is None

    change(machine.path, AFTER)

    assert weights.changed() is not None
    with pytest.raises(LinkRefused, match=r"ours\.gguf was (changed|replaced) while this node ran"):
        await layers.weights(terms, lambda done, total: None)


@pytest.mark.parametrize("change", HOW)
async def test_an_engine_is_not_started_with_a_file_that_was_replaced(
    tmp_path: Path, change: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "ours.gguf"
    path.write_text(BEFORE)
    spec = EngineSpec(
        model=str(path),
        alias="ours",
        context=1,
        slots=1,
        threads=1,
        key="",
        stamps=file_stamp.stamps([path]),
    )
    assert EngineSpec.from_line(spec.to_line().decode()) == spec
    change(path, AFTER)

    with pytest.raises(EngineFailed, match=r"ours\.gguf was (changed|replaced) while this node ran"):
        await EngineSupervisor(spec, tmp_path / "engine.log", lambda report: None).run()
    assert not (tmp_path / "engine.log").exists()


@pytest.mark.parametrize("change", HOW)
async def test_hashes_and_files_beside_the_model_are_not_believed_of_other_bytes(
    tmp_path: Path, change: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "adapter.gguf"
    path.write_text(BEFORE)
    digests = PieceHashes(tmp_path / "digests")
    unused: Any = None
    side_files = SideFiles(config=unused, digests=digests, busy=bool)
    file: SideFile = await side_files.described(path)
    assert side_files.path(file) == path
    assert digests.known(path) is not None

    change(path, AFTER)

    assert side_files.path(file) is None
    assert digests.known(path) is None
    assert (await side_files.described(path)).digest != file.digest
