"""How this node gets into its mesh, and what its home remembers of it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.config import PUBLIC_RELAYS, NodeConfig
from mesh_llm.defaults import REMEMBERED_LIMIT
from mesh_llm.errors import Forged, JoinRefused, MalformedMessage, MeshError, UsageError
from mesh_llm.home import Home
from mesh_llm.local.model_files import file_stem
from mesh_llm.local.own_settings import (
    check_layers,
    given_over,
    given_settings,
    own_settings,
    refuse_changes,
    version_after,
)
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.messages import signed_from_fields, told_from_document, told_to_document
from mesh_llm.membership.record import Told, read_record, told
from mesh_llm.mesh_settings import Draft, MeshSettings, ModelExtras, ModelSettings
from mesh_llm.node import home_upgrade
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import NAME_CHARS, clean
from mesh_llm.transport.credential import (
    role_of,
)
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, decode
from mesh_llm.transport.network import Network, NetworkConfig
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Address, Fingerprint, ModelFacts, NodeId, Role

OWNER_HEARS_S = 3.0
"""That an owner's start waits for word of other members: connections to those that run take less than one."""


log = logging.getLogger(__name__)


class Joining:
    """Membership, settings and known addresses: read from the home, changed, written back."""

    def __init__(
        self, home: Home, config: NodeConfig, identity: Identity, *, new_secret: bytes | None = None
    ) -> None:
        self._home = home
        self._config = config
        self._identity = identity
        self._new_secret = new_secret
        """That of an identity which the home gets together with its new mesh, and not before."""
        self.network: Network | None = None
        self.invite: Invite | None = None
        self.membership = Membership()
        self._known: dict[NodeId, Told] = {}
        """Members by what they have signed, to be found again."""
        self._hints: dict[NodeId, Address] = {}
        """Where others may be, by a token or a home of before: kept until they have signed it themselves."""
        self._ports = (0, 0)
        self.epoch = 0
        """The highest one of a plan that this home has heard of."""
        self.relay: tuple[str | None, str | None] = (config.relay, config.relay_token)
        """The mesh's own, and its token; None where the public ones serve."""
        if config.relay == PUBLIC_RELAYS:
            self.relay = (None, None)
        self._joining = False
        """It may still be refused, or refuse: then nothing of that mesh is to stay."""
        self._written: dict[str, Any] = {}
        self._left = False

    # -- at the start --------------------------------------------------------------------------

    def read(self) -> None:
        """The token, or what the home remembers; a new mesh where there is neither. No packet is sent."""
        if self._config.join is not None:
            self._read_invite(decode(self._config.join))
            return
        remembered = None if self._config.new_mesh else self._home.read_mesh()
        if remembered is not None:
            self._recall(remembered)
            self._check_role(self.membership.role(self._identity.id))
            self._check_options()
        elif self._config.client:
            raise UsageError(
                "--client needs --join TOKEN: it has no model of its own",
                hint="mesh-llm invite --role client, on a node of the mesh, prints a token",
            )
        else:
            self.membership = Membership.create(self._identity)

    def _read_invite(self, invite: Invite) -> None:
        if invite.inviter == self._identity.id:
            raise JoinRefused("this node made the token itself", hint="use it on another machine")
        self._check_role(invite.role)
        # What it revoked and whom it invited counts on when it comes back; another mesh's record goes.
        with suppress(MeshError):
            remembered = self._home.read_mesh()
            if remembered is not None and (remembered.get("membership") or {}).get("mesh") == invite.mesh:
                self._recall(remembered)
        self.invite = invite
        self._joining = True
        if self._config.relay is None:
            # Where the inviter is to be found is no reason to give up the other public relays.
            self.relay = (invite.address.relay, invite.relay_token) if invite.own_relay else (None, None)

    def _check_role(self, role: Role) -> None:
        if role is Role.CLIENT and not self._config.client:
            raise MeshError(
                "the invite is for a lite client, which lends no device",
                hint="add --client, or ask for another invite",
            )

    def _recall(self, document: dict[str, Any]) -> None:
        try:
            document = home_upgrade.current(document, self._identity)
            self.membership = Membership.from_document(document["membership"], now=time.time())
            self._known = {told.node: told for told in map(told_from_document, document["members"])}
            self._hints = dict(map(_hint, document["hints"]))
            self.epoch = int(document["epoch"])
            ipv4, ipv6 = document["ports"]
            self._ports = (int(ipv4), int(ipv6))
            if self._config.relay is None:
                self.relay = (document["relay"], document["relay_token"])
        except (KeyError, TypeError, ValueError, MeshError) as error:
            raise MeshError(
                f"{self._home.mesh_file} is damaged: {error}",
                hint="join again with a new token, or start afresh with --new-mesh",
            ) from error

    @property
    def settings(self) -> MeshSettings | None:
        """The mesh's, as an owner has signed them."""
        return self.membership.settings

    @property
    def model(self) -> str | None:
        """What the mesh called its model when this home was last in it."""
        return self.settings.model if self.settings is not None else None

    @property
    def file(self) -> Path:
        """Where all of it is written."""
        return self._home.mesh_file

    @property
    def is_owner(self) -> bool:
        """Whether this node may set the mesh's settings."""
        return self.membership.mesh is not None and role_of(self.membership.credential) is Role.OWNER

    @property
    def sets_plan(self) -> bool:
        """Whether this run's options and files are the mesh's.

        An owner's options are; its files only as long as no other owner has set something since, or where it
        was given options.
        """
        chosen = self.membership.in_force
        mine = chosen is None or chosen.signer.node == self._identity.id
        return self.is_owner and (mine or bool(given_settings(self._config)))

    def network_config(self) -> NetworkConfig:
        relay, token = self.relay
        return NetworkConfig(
            identity=self._identity,
            bind_ip=self._config.bind_ip,
            bind_port=self._config.bind_port,
            last_ports=self._ports,
            relay=None if self._config.no_relay else relay,
            relay_token=token,
            no_relay=self._config.no_relay,
        )

    # -- entering ------------------------------------------------------------------------------

    def opened(self, network: Network) -> None:
        """Keep its ports: in a mesh that was all switched off, members look where they were last."""
        self.network = network
        if network.ports != self._ports:
            self._ports = network.ports
            if self.invite is None:
                self.write()

    async def join(self, mesh: Mesh) -> str:
        """By invite; raises with one sentence where that is refused. Returns the inviter's name."""
        assert self.network is not None and self.invite is not None
        _, welcome = await self.network.join(self.invite)
        self._welcomed(welcome)
        self._check_options()
        self._joining = False
        self._hints = {self.invite.inviter: self.invite.address}
        self._look_for_others(mesh)
        self.write()
        name = welcome.get("name")
        return clean(name, NAME_CHARS) if isinstance(name, str) and name else self.invite.inviter[:8]

    def _welcomed(self, welcome: dict[str, Any]) -> None:
        """What the inviter has told of others is worth what they have signed."""
        try:
            fields = Fields(welcome, "welcome")
            if fields.has("settings"):
                signed = signed_from_fields(Fields(fields.get("settings"), "settings"))
                self.membership.take_settings(signed, now=time.time())
            told = fields.items("members", REMEMBERED_LIMIT, told_from_document)
        except (Forged, MalformedMessage) as error:
            raise JoinRefused(
                f"the inviter sent {error.message}", hint="do not trust that machine; join by another node"
            ) from error
        self._known = {each.node: each for each in told if each.signed is not None}

    async def return_to(self, mesh: Mesh) -> None:
        """Look for those whom the home remembers."""
        self._look_for_others(mesh)
        if self.is_owner and (self._known or self._hints):
            # Another owner may have set something meanwhile, which this run's options are not to undo.
            with suppress(TimeoutError):
                async with asyncio.timeout(OWNER_HEARS_S):
                    await mesh.claims.heard.wait()

    def _look_for_others(self, mesh: Mesh) -> None:
        mesh.know(self._hints, epoch=self.epoch)
        verified = mesh.recall(self._known.values())
        self._known = {node: told for node, told in self._known.items() if node in verified}

    def settle(
        self, model: ModelFacts | None, draft: Draft | None, extras: ModelExtras | None = None
    ) -> MeshSettings | None:
        """The mesh's settings: made by its owners, obeyed by everybody else."""
        if not self.sets_plan:
            self._check_options()
        if not self.sets_plan or model is None:
            return self.settings
        check_layers(self._config.layers, model)
        own, chosen = own_settings(self._config, model, draft, extras), self.membership.in_force
        if chosen is None:
            return self._set(own)
        mine = chosen.signer.node == self._identity.id
        return self._set(given_over(self._config, chosen.settings, own, mine=mine))

    def set_digest(self, fingerprint: Fingerprint, digest: str) -> None:
        """All bytes of the model's files are known by now: fetches can be checked by them."""
        chosen = self.membership.in_force
        mine = chosen is not None and chosen.signer.node == self._identity.id
        old = self.settings
        if not mine or old is None:
            return
        others = (
            replace(each, digest=digest) if each.fingerprint == fingerprint else each for each in old.others
        )
        own = digest if old.fingerprint == fingerprint else old.digest
        self._set(replace(old, digest=own, others=tuple(others)))

    def change(self, settings: MeshSettings) -> None:
        """As an owner asks while the mesh runs."""
        self._set(settings)

    def _set(self, settings: MeshSettings) -> MeshSettings:
        """Sign them, where they differ from those in force."""
        old = self.settings
        settings = version_after(old, settings)
        if settings != old:
            self.membership.set(settings, self._identity, now=time.time())
        self.write()
        return settings

    def check_model(self, model: ModelFacts, settings: ModelSettings) -> None:
        """A joiner's own model has to be the mesh's."""
        if model.fingerprint == settings.fingerprint:
            return
        raise MeshError(
            f"the mesh serves {settings.alias} (fingerprint {settings.fingerprint[:12]}), "
            f"and {file_stem(model)} is another file ({model.fingerprint[:12]})",
            hint="leave --model out to take part with the mesh's model, or start a mesh with --new-mesh",
        )

    def _check_options(self) -> None:
        if self.settings is not None and not self.is_owner:
            refuse_changes(self._config, self.settings, self._home)

    # -- what is remembered --------------------------------------------------------------------

    def remember(self, mesh: Mesh) -> None:
        """Keep up with claims and addresses, so that this node finds back after a restart."""
        for record in mesh.records:
            old = self._known.get(record.node)
            new = (
                record.node != self._identity.id
                and record.signed is not None
                and bool(record.facts.address.direct)
            )
            if new and (old is None or _address_of(old) != record.facts.address):
                self._known.pop(record.node, None)
                self._known[record.node] = told(record)
        for node in mesh.expelled:
            self._known.pop(node, None)
            self._hints.pop(node, None)
        while len(self._known) > REMEMBERED_LIMIT:
            del self._known[next(iter(self._known))]
        self.epoch = max(self.epoch, mesh.highest_epoch())
        try:
            self.write(only_news=True)
        except OSError as error:
            # A full disk is no reason to end a node that serves; the next change tries again.
            log.warning("membership not written file=%s cause=%s", self._home.mesh_file, error.strerror)

    def write(self, *, only_news: bool = False) -> None:
        if self.membership.mesh is None or self._left or self._joining:
            return  # not in yet, and what the home remembers may be of use; or out for good
        relay, token = self.relay
        document = {
            "version": home_upgrade.HOME_VERSION,
            "membership": self.membership.to_document(),
            "members": [told_to_document(each) for each in self._known.values()],
            "hints": [
                [node, list(address.direct), address.relay]
                for node, address in self._hints.items()
                if node not in self._known
            ],
            "epoch": self.epoch,
            "ports": list(self._ports),
            "relay": relay,
            "relay_token": token,
        }
        if only_news and document == self._written:
            return
        if self._new_secret is not None:
            self._home.begin_anew(self._new_secret, document)
            self._new_secret = None
        else:
            self._home.write_mesh(document)
        self._written = document

    def forget(self) -> None:
        self._left = True
        self._home.forget_mesh()


def _address_of(told: Told) -> Address:
    return read_record(told).facts.address


def _hint(entry: Any) -> tuple[NodeId, Address]:
    node, direct, relay = entry
    return NodeId(str(node)), Address(direct=tuple(map(str, direct)), relay=relay)
