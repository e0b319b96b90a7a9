"""A node's home: its identity, its lock, and where its socket lies."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_llm.errors import HomeInUse, MeshError
from mesh_llm.home import (
    Home,
    cache_folder,
    default_home,
    link_door,
    models_folder,
    noted_homes,
    write_private,
)
from mesh_llm.transport.identity import Identity
from mesh_llm.types import NodeId


def test_identity_is_made_once_and_private(home: Path) -> None:
    place = Home(home)

    first, second = place.secret(), Home(home).secret()

    assert len(first) == 32
    assert first == second
    assert (home / "identity").stat().st_mode & 0o777 == 0o600
    assert Identity.from_secret(first).id not in (home / "identity").read_text()
    assert [path.name for path in home.iterdir()] == ["identity"]


@pytest.mark.parametrize("text", ["", "not hexadecimal", "abcd", "00" * 33])
def test_a_damaged_identity_is_refused_and_kept(home: Path, text: str) -> None:
    (home / "identity").write_text(text)

    with pytest.raises(MeshError) as caught:
        Home(home).secret()

    assert caught.value.message == f"{home}/identity is damaged: it should hold 64 hexadecimal digits"
    assert (home / "identity").read_text() == text


def test_a_home_in_use_names_its_holder(home: Path) -> None:
    with Home(home).lock():
        with pytest.raises(HomeInUse) as caught, Home(home).lock():
            pass

        assert caught.value.message == f"{home} is in use by the node with pid {os.getpid()}"
    with Home(home).lock():
        pass


def noted(home: Path) -> bool:
    return home in [each.path for each in noted_homes()]


def test_a_running_node_is_found_whatever_its_home(home: Path) -> None:
    assert not noted(home)
    with Home(home).lock():
        assert noted(home)
        with pytest.raises(HomeInUse), Home(home).lock():
            pass
        assert noted(home)
    assert not noted(home)


def test_a_home_that_is_gone_is_noted_no_longer(home: Path) -> None:
    gone = home / "gone"
    with Home(gone).lock():
        assert noted(gone)
        shutil.rmtree(gone)
        assert not noted(gone)


def test_one_who_is_refused_leaves_the_socket_of_the_other(home: Path) -> None:
    with Home(home).lock():
        socket = Home(home).control_socket
        socket.touch()
        with pytest.raises(HomeInUse), Home(home).lock():
            pass

        assert socket.exists()
    assert not socket.exists()


def test_a_socket_left_by_a_killed_node_is_removed(home: Path) -> None:
    Home(home).create()
    Home(home).control_socket.touch()

    with Home(home).lock():
        assert not Home(home).control_socket.exists()


def test_folders_are_private(home: Path) -> None:
    Home(home / "new").create()

    for folder in (home / "new", home / "new" / "run", home / "new" / "logs"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_long_path_gets_a_short_socket(home: Path) -> None:
    deep = Home(home / ("x" * 120))
    other = Home(home / ("y" * 120))

    assert Home(home).control_socket == home / "run" / "control.sock"
    assert len(os.fsencode(deep.control_socket)) <= 100
    assert deep.control_socket != other.control_socket
    assert deep.control_socket.parent.name == f"mesh-llm-{os.getuid()}"


def test_a_run_folder_open_to_others_is_refused(home: Path) -> None:
    (home / "run").mkdir(mode=0o755)
    (home / "run").chmod(0o755)

    with pytest.raises(MeshError, match="other users can open it") as caught:
        Home(home).create()

    assert caught.value.hint == f"chmod 700 {home}/run"


def test_a_file_in_the_place_of_a_home(home: Path) -> None:
    (home / "file").touch()

    with pytest.raises(MeshError, match=f"^cannot create {home}/file"):
        Home(home / "file").create()


def test_folders_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESH_LLM_CACHE", "MESH_LLM_MODELS", "MESH_LLM_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/person")

    assert [cache_folder(), models_folder(), default_home()] == [
        Path("/person/.cache/mesh-llm"),
        Path("/person/.models"),
        Path("/person/.mesh-llm"),
    ]
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/mesh-llm")
    monkeypatch.setenv("MESH_LLM_CACHE", "~/a")
    monkeypatch.setenv("MESH_LLM_MODELS", "~/b")
    monkeypatch.setenv("MESH_LLM_HOME", "~/c")
    assert [cache_folder(), models_folder(), default_home()] == [
        Path("/person/a"),
        Path("/person/b"),
        Path("/person/c"),
    ]


# -- sockets outside the home ---------------------------------------------------------------------

NODE = NodeId("ab" * 32)
STRANGER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder in another user's name")


@pytest.fixture
def shared(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of /tmp, with a cache folder beside it."""
    folder = home / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("mesh_llm.home._RUNTIME", str(home / "runtime"))
    monkeypatch.setenv("MESH_LLM_CACHE", str(home / "cache"))
    return folder / f"mesh-llm-{os.getuid()}"


def is_private(folder: Path) -> bool:
    return folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.getuid()


def test_sockets_lie_in_a_private_folder(home: Path, shared: Path) -> None:
    assert link_door(NODE) == shared / f"{NODE[:16]}-links.sock"
    assert is_private(shared)


def occupied_by_a_stranger(shared: Path) -> None:
    shared.mkdir(mode=0o700)
    os.chown(shared, STRANGER, STRANGER)


def occupied_by_a_link(shared: Path) -> None:
    """It leads to a folder of ours, and whoever made it can lead it elsewhere."""
    target = shared.parent / "target"
    target.mkdir(mode=0o700)
    shared.symlink_to(target)


def occupied_by_a_file(shared: Path) -> None:
    shared.touch()


def open_to_all(shared: Path) -> None:
    shared.mkdir()
    shared.chmod(0o777)


@pytest.mark.parametrize(
    "occupy",
    [
        pytest.param(occupied_by_a_stranger, marks=AS_ROOT),
        occupied_by_a_link,
        occupied_by_a_file,
        open_to_all,
    ],
)
def test_a_folder_that_is_not_ours_keeps_no_node_from_starting(
    home: Path, shared: Path, occupy: Callable[[Path], None]
) -> None:
    occupy(shared)

    deep = Home(home / ("x" * 120))
    for place in (Home(home / "one"), Home(home / "two"), deep):
        place.create()

    door = link_door(NODE)
    assert door.parent == deep.control_socket.parent == home / "cache" / "run"
    assert is_private(door.parent)


def test_the_sessions_folder_comes_before_the_cache(home: Path, shared: Path) -> None:
    (home / "runtime").mkdir(mode=0o700)
    occupied_by_a_file(shared)

    assert link_door(NODE).parent == home / "runtime" / "mesh-llm"


def test_a_node_that_started_before_is_found_where_it_is(home: Path, shared: Path) -> None:
    occupied_by_a_file(shared)
    door = link_door(NODE)
    door.touch()
    shared.unlink()

    assert link_door(NODE) == door
    assert link_door(NodeId("cd" * 32)).parent == shared


def test_no_folder_at_all(home: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied_by_a_file(shared)
    monkeypatch.setenv("MESH_LLM_CACHE", str(home / ("x" * 120)))

    with pytest.raises(MeshError) as caught:
        Home(home / "one").create()

    assert caught.value.message == f"{shared} would hold sockets, but it is not a private folder of yours"
    assert caught.value.hint == "remove it, or name a folder of your own in TMPDIR"


# -- a full disk --------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The disk is full from the nth file on."""

    def fill(after: int) -> None:
        fine = iter(range(after))

        def fsync(_: int) -> None:
            if next(fine, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


def contents(home: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in home.iterdir()}


def test_a_full_disk_costs_no_file_and_leaves_nothing(home: Path, full: Callable[[int], None]) -> None:
    file = home / "keys.json"
    write_private(file, "earlier")
    full(0)

    with pytest.raises(OSError, match="No space left on device") as refused:
        write_private(file, "later")

    assert refused.value.filename == str(file)
    assert contents(home) == {"keys.json": "earlier"}


@pytest.mark.parametrize("written", [0, 1])
def test_a_home_keeps_its_mesh_where_another_one_has_no_room(
    home: Path, full: Callable[[int], None], written: int
) -> None:
    place = Home(home)
    secret = place.secret()
    place.write_mesh({"mesh": "earlier"})
    before = contents(home)
    full(written)

    with pytest.raises(OSError, match="No space left on device"):
        place.begin_anew(bytes(32), {"mesh": "later"})

    assert contents(home) == before
    assert (place.secret(), place.read_mesh()) == (secret, {"mesh": "earlier"})


def test_a_home_begins_anew_with_both_files(home: Path) -> None:
    place = Home(home)
    place.write_mesh({"mesh": "earlier"})

    place.begin_anew(bytes(32), {"mesh": "later"})

    assert (place.secret(), place.read_mesh()) == (bytes(32), {"mesh": "later"})
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}
