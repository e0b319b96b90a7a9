"""A node's home: its identity, its lock, and where its socket lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesh_llm.errors import HomeInUse, MeshError
from mesh_llm.home import Home, cache_folder, default_home, models_folder
from mesh_llm.transport.identity import Identity


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

    with pytest.raises(MeshError, match="is open to others") as caught:
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
