"""Whether CUDA's multi-process service is taken for there, by the socket of its control daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.engine import cuda_mps
from mesh_llm.membership.fact_documents import facts_from_document, facts_to_document
from tests.support import planning


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(home))
    return home


@pytest.fixture(params=[socket.SOCK_STREAM, socket.SOCK_SEQPACKET], ids=["stream", "seqpacket"])
def daemon(folder: Path, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, request.param)) as control:
        control.bind(str(folder / "control"))
        control.listen()
        control.setblocking(False)
        yield control


def test_a_daemon_that_listens_is_found_and_left_alone(daemon: socket.socket) -> None:
    assert cuda_mps.serves_this_user()
    with pytest.raises(BlockingIOError):
        daemon.accept()


def test_a_daemon_that_is_gone_leaves_a_socket_that_counts_for_nothing(daemon: socket.socket) -> None:
    daemon.close()
    assert not cuda_mps.serves_this_user()


def test_another_users_socket_counts_for_nothing(
    daemon: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_mps, "_ROOT", -1)
    monkeypatch.setattr(os, "getuid", lambda: -2)
    assert not cuda_mps.serves_this_user()


def test_without_a_socket_there_is_none(folder: Path) -> None:
    assert not cuda_mps.serves_this_user()
    (folder / "control").write_text("")
    assert not cuda_mps.serves_this_user()


def test_a_folder_whose_name_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/" + "x" * 200)
    assert not cuda_mps.serves_this_user()


@pytest.mark.parametrize("mps", [True, False])
def test_it_is_told_with_the_device(mps: bool) -> None:
    device = replace(planning.gpu(8), mps=mps)
    facts = planning.node("a", gpus=(device,)).facts
    document = facts_to_document(facts)
    assert facts_from_document(document).gpus == (device,)
    assert ("mps" in document["gpus"][0]) is mps  # type: ignore[index]
