"""Which relays a node uses: those that it was told, was invited to, or remembers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mesh_llm.config import PUBLIC_RELAYS, NodeConfig
from mesh_llm.home import Home
from mesh_llm.node.home_upgrade import HOME_VERSION
from mesh_llm.node.joining import Joining
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, encode
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Address, MeshId

INVITER, JOINER = Identity.from_secret(bytes(range(32))), Identity.from_secret(bytes(range(1, 33)))
OWN, PUBLIC, OTHER = "https://relay.example/", "https://one.public.example/", "https://other.example/"


def token(relay: str, *, own: bool) -> str:
    invite = Invite(
        id="00" * 8,
        mesh=MeshId(INVITER.id),
        secret=bytes(16),
        inviter=INVITER.id,
        address=Address(direct=("192.0.2.7:4433",), relay=relay),
        own_relay=own,
        relay_token="secret" if own else None,
        expires=int(time.time()) + 3600,
    )
    return encode(invite, INVITER)


def relay_of(home: Home, **options: str) -> tuple[str | None, str | None]:
    entry = Joining(home, NodeConfig(home=home.path, **options), JOINER)  # type: ignore[arg-type]
    entry.read()
    config = entry.network_config()
    return config.relay, config.relay_token


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def test_where_the_inviter_is_does_not_become_the_only_relay(home: Home) -> None:
    """None: the public ones, all of them, and their lookups."""
    assert relay_of(home, join=token(PUBLIC, own=False)) == (None, None)


def test_the_meshs_own_relay_comes_with_the_token(home: Home) -> None:
    assert relay_of(home, join=token(OWN, own=True)) == (OWN, "secret")


def test_a_relay_that_was_asked_for_comes_first(home: Home) -> None:
    joining = token(OWN, own=True)

    assert relay_of(home, join=joining, relay=OTHER) == (OTHER, None)
    assert relay_of(home, join=joining, relay=PUBLIC_RELAYS) == (None, None)


def test_a_remembered_relay_can_be_left(home: Home) -> None:
    home.write_mesh(
        {
            "version": HOME_VERSION,
            "membership": Membership.create(JOINER).to_document(),
            "members": [],
            "hints": [],
            "epoch": 0,
            "ports": [0, 0],
            "relay": OWN,
            "relay_token": "secret",
        }
    )

    assert relay_of(home) == (OWN, "secret")
    assert relay_of(home, relay=OTHER) == (OTHER, None)
    assert relay_of(home, relay=PUBLIC_RELAYS) == (None, None)
