"""Nodes of other versions: each says which protocols it speaks, and what lies between goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mesh_llm.defaults import PROTOCOL_VERSION
from mesh_llm.errors import JoinRefused
from mesh_llm.transport import handshake
from mesh_llm.transport.handshake import PROTOCOL_OLDEST
from mesh_llm.types import Role
from tests.support.members import Mesh, mesh_of_members

OLDER = "the inviter runs an older mesh-llm than this node"
NEWER = "the inviter runs a newer mesh-llm than this node"


@pytest.fixture
async def mesh(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Mesh]:
    async with mesh_of_members() as mesh:
        yield mesh
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def speak(monkeypatch: pytest.MonkeyPatch, **versions: Any) -> None:
    """The next HELLO, the joiner's, says this; later ones are as always."""
    usual = handshake._hello

    def hello(nonce: bytes) -> dict[str, Any]:
        monkeypatch.setattr(handshake, "_hello", usual)
        return {**versions, "nonce": nonce.hex()}

    monkeypatch.setattr(handshake, "_hello", hello)


@pytest.mark.parametrize(
    "versions",
    [
        {"version": PROTOCOL_VERSION},
        {"version": PROTOCOL_VERSION, "oldest": PROTOCOL_OLDEST},
        {"version": PROTOCOL_VERSION + 1, "oldest": PROTOCOL_VERSION},
        {"version": PROTOCOL_VERSION + 7, "oldest": 1},
    ],
    ids=str,
)
async def test_one_that_understands_us(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, versions: dict[str, Any]
) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    speak(monkeypatch, **versions)

    await joiner.network.join(first.token())

    assert await first.handler.wait("peer") == [(joiner.id, Role.NODE)]


@pytest.mark.parametrize(
    ("versions", "told", "noted"),
    [
        # As 0.1 said it.
        ({"version": 1}, NEWER, "it speaks an older protocol"),
        ({"version": 1, "oldest": 1}, NEWER, "it speaks an older protocol"),
        ({"version": PROTOCOL_VERSION + 1}, OLDER, "it speaks a newer protocol"),
        (
            {"version": PROTOCOL_VERSION + 2, "oldest": PROTOCOL_VERSION + 1},
            OLDER,
            "it speaks a newer protocol",
        ),
    ],
    ids=str,
)
async def test_one_that_does_not(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, versions: dict[str, Any], told: str, noted: str
) -> None:
    first, joiner = await mesh.creator(), await mesh.member()
    speak(monkeypatch, **versions)

    with pytest.raises(JoinRefused) as caught:
        await joiner.network.join(first.token())

    assert caught.value.message == told
    assert await first.handler.wait("refused") == [(joiner.id, noted)]
    assert first.network.peers == {}
