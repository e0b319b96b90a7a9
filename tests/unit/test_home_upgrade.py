"""Homes that 0.1 wrote, read by this version: `homes/` has two of them, as they were."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.errors import Expelled, MeshError
from mesh_llm.home import Home
from mesh_llm.membership.record import Told
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.node import home_upgrade
from mesh_llm.node.joining import Joining
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, encode
from mesh_llm.types import Address, Fingerprint, MeshId, NodeId, Role

CREATOR, ANNE, BERT = (Identity.from_secret(bytes([number]) * 32) for number in (1, 2, 3))
MESH = MeshId(CREATOR.id)
SETTINGS = MeshSettings(
    version=4,
    model="Qwen2.5-32B",
    fingerprint=Fingerprint("ab" * 32),
    alias="qwen",
    context=4096,
    slots=2,
    cache_type_k="q8_0",
    layers=(("one", 0, 30), ("two", 30, 64)),
)
KNOWN = {
    ANNE.id: Address(direct=("192.0.2.7:4433", "[2001:db8::1]:4433")),
    BERT.id: Address(direct=("192.0.2.8:4433",), relay="https://relay.example/"),
}


class Looked:
    """A mesh that is told where to look for its members."""

    def __init__(self) -> None:
        self.hints: dict[NodeId, Address] = {}
        self.told: list[Told] = []
        self.epoch = 0
        self.claims = SimpleNamespace(heard=asyncio.Event())
        self.claims.heard.set()

    def know(self, addresses: Mapping[NodeId, Address], *, epoch: int) -> None:
        self.hints, self.epoch = dict(addresses), epoch

    def recall(self, told: Any) -> None:
        self.told = list(told)


def looked_for(entry: Joining) -> Looked:
    mesh: Any = Looked()
    asyncio.run(entry.return_to(mesh))
    assert isinstance(mesh, Looked)
    return mesh


def written(name: str) -> dict[str, Any]:
    document = json.loads((Path(__file__).parent / "homes" / name).read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def started(home: Home, identity: Identity, **options: Any) -> Joining:
    entry = Joining(home, NodeConfig(home=home.path, **options), identity)
    entry.read()
    return entry


def bound(entry: Joining) -> None:
    """On other ports than the last time, which the home is to remember."""
    network: Any = SimpleNamespace(ports=(40003, 40004))
    entry.opened(network)


def test_a_creator_and_what_it_claimed(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))

    entry = started(home, CREATOR)

    membership = entry.membership
    assert (membership.mesh, membership.credential, membership.role(CREATOR.id)) == (MESH, (), Role.OWNER)
    assert entry.is_owner
    assert entry.sets_plan
    assert entry.settings == SETTINGS
    assert entry.epoch == 17
    config = entry.network_config()
    assert (config.relay, config.relay_token, config.last_ports) == (
        "https://relay.example/",
        "secret",
        (40001, 40002),
    )


def test_its_invites_are_good_for_as_many_as_ever(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))

    invites = started(home, CREATOR).membership.admissions.invites()

    assert [(invite.id, invite.role, invite.uses, invite.limit) for invite in invites] == [
        ("11" * 8, Role.NODE, 3, None),
        ("22" * 8, Role.NODE, 1, None),
        ("33" * 8, Role.CLIENT, 0, None),
    ]
    assert [invite.state(1_790_000_001) for invite in invites] == ["open", "revoked", "open"]
    assert invites[0].secret == b"\x11" * 16
    assert invites[2].expires == 1_790_003_600


def test_its_own_revocations_are_signed_now(home: Home) -> None:
    """Those of others, which it only heard of, are theirs to sign."""
    home.write_mesh(written("creator-0.1.json"))

    signed = started(home, CREATOR).membership.revocations.signed

    assert [json.loads(each.text) for each in signed] == [{"revoke": "22" * 8, "issuer": CREATOR.id}]
    fresh = started_member(home)
    [news] = fresh.membership.take_revocations(signed)
    assert (news.signer, news.role) == (CREATOR.id, Role.OWNER)


def started_member(home: Home) -> Joining:
    home.write_mesh(written("member-0.1.json"))
    return started(home, ANNE)


def test_others_take_the_creators_settings(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))
    settings, _ = started(home, CREATOR).membership.claims()

    member = started_member(home)

    # It has heard of them before, from nobody who signed them.
    assert member.settings is None
    assert [member.membership.take_settings(each, now=1.8e9) for each in settings] == [True]
    assert member.settings == SETTINGS


def test_a_member_and_its_right(home: Home) -> None:
    entry = started_member(home)

    assert entry.membership.role(ANNE.id) is Role.NODE
    assert [grant.invite for grant in entry.membership.credential] == ["11" * 8]
    assert not entry.is_owner
    assert [json.loads(each.text)["revoke"] for each in entry.membership.revocations.signed] == ["44" * 8]


def test_that_it_was_expelled_is_looked_at_again(home: Home) -> None:
    """One peer's word was enough for 0.1. Where it is so, others show the revocation."""
    assert written("member-0.1.json")["expelled"] is True
    entry = started_member(home)
    creator = Home(home.path / "creator")
    creator.create()
    creator.write_mesh(written("creator-0.1.json"))
    owner = started(creator, CREATOR).membership

    owner.revoke("11" * 8, CREATOR)
    entry.membership.take_revocations(owner.revocations.signed)

    with pytest.raises(Expelled):
        entry.membership.role(ANNE.id)


def test_addresses_are_hints(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))

    mesh = looked_for(started(home, CREATOR))

    assert mesh.hints == KNOWN
    assert mesh.told == []
    assert mesh.epoch == 17


def test_hints_are_kept_until_somebody_is_found(home: Home) -> None:
    """Machines are updated one after the other: the first ones find nobody, and are started again."""
    home.write_mesh(written("creator-0.1.json"))

    bound(started(home, CREATOR))

    document = home.read_mesh()
    assert document is not None
    assert document["version"] == home_upgrade.HOME_VERSION
    assert looked_for(started(home, CREATOR)).hints == KNOWN


def test_what_was_taken_over_is_written_as_this_version_does(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))
    before = started(home, CREATOR)

    bound(before)

    after = started(home, CREATOR)
    assert after.membership.to_document() == before.membership.to_document()
    assert (after.settings, after.epoch) == (SETTINGS, 17)
    assert after.network_config() == before.network_config()


def test_the_home_is_as_it_was_until_it_is_written(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json"))
    before = home.mesh_file.read_bytes()

    started(home, CREATOR)

    assert home.mesh_file.read_bytes() == before


def test_a_home_from_before_epochs_and_ports(home: Home) -> None:
    document = written("creator-0.1.json")
    for name in ("epoch", "ports", "expelled"):
        del document[name]
    home.write_mesh(document)

    entry = started(home, CREATOR)

    assert (entry.epoch, entry.network_config().last_ports) == (0, (0, 0))


def test_a_mesh_without_settings(home: Home) -> None:
    home.write_mesh(written("creator-0.1.json") | {"settings": None})

    assert started(home, CREATOR).settings is None


def test_more_revoked_invites_than_others_keep(home: Home) -> None:
    """A node's are bounded now; that is no reason not to start."""
    document = written("member-0.1.json")
    [invite] = document["membership"]["invites"]
    many = [{**invite, "id": f"{number:016x}"} for number in range(300)]
    document["membership"]["invites"] = many
    home.write_mesh(document)

    membership = started(home, ANNE).membership

    assert len(membership.revocations) == 256
    assert {invite.state(0) for invite in membership.admissions.invites()} == {"revoked"}


def test_coming_back_with_a_token_keeps_what_it_gave_out(home: Home) -> None:
    home.write_mesh(written("member-0.1.json"))
    token = encode(
        Invite(
            id="66" * 8,
            mesh=MESH,
            secret=bytes(16),
            inviter=CREATOR.id,
            address=Address(direct=("192.0.2.6:4433",)),
        ),
        CREATOR,
    )

    entry = started(home, ANNE, join=token)

    assert [invite.id for invite in entry.membership.admissions.invites()] == ["44" * 8]
    assert len(entry.membership.revocations) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("membership"),
        lambda document: document.update(membership=None),
        lambda document: document["membership"].pop("invites"),
        lambda document: document["membership"].update(mesh=5),
        lambda document: document["membership"].update(credential=[{"node": "x"}]),
        lambda document: document["membership"]["credential"][0].update(role="king"),
        lambda document: document["membership"]["credential"][0].update(signature="xx"),
        lambda document: document["membership"]["invites"][0].pop("revoked"),
        lambda document: document["membership"]["invites"][0].update(id=5),
        lambda document: document.update(members=[5]),
        lambda document: document.update(settings={}, membership=written("creator-0.1.json")["membership"]),
    ],
)
def test_a_damaged_home(home: Home, spoil: Callable[[dict[str, Any]], Any]) -> None:
    document = written("member-0.1.json")
    spoil(document)
    home.write_mesh(document)
    identity = CREATOR if document.get("settings") == {} else ANNE

    with pytest.raises(MeshError, match=r"mesh\.json is damaged: "):
        started(home, identity)
