"""How this node gets into its mesh, and what its home remembers of it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.config import PUBLIC_RELAYS, NodeConfig
from mesh_llm.defaults import DRAFT_MAX
from mesh_llm.errors import JoinRefused, MeshError, UsageError
from mesh_llm.home import Home
from mesh_llm.membership.facts import settings_from_document, settings_to_document
from mesh_llm.membership.plans import NAME_CHARS, clean
from mesh_llm.models import catalog, names
from mesh_llm.node.mesh import Mesh
from mesh_llm.node.shelf import file_stem
from mesh_llm.planning.forced import misfit
from mesh_llm.transport.dialler import expelled
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, decode, encode
from mesh_llm.transport.membership import Membership
from mesh_llm.transport.network import Network, NetworkConfig
from mesh_llm.types import Address, Draft, MeshId, MeshSettings, ModelFacts, NodeId, Role

log = logging.getLogger(__name__)


class Entry:
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
        self.settings: MeshSettings | None = None
        self._known: dict[NodeId, Address] = {}
        self._ports = (0, 0)
        self.epoch = 0
        """The highest one of a plan that this home has heard of."""
        self._relay: tuple[str | None, str | None] = (config.relay, config.relay_token)
        """The mesh's own, and its token; None where the public ones serve."""
        if config.relay == PUBLIC_RELAYS:
            self._relay = (None, None)
        self._revoked_written: set[str] = set()
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
            if remembered.get("expelled"):
                raise expelled()
            self._check_role(self.membership.role(self._identity.id))
            self._check_options(self.settings)
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
        if self._config.relay is None:
            # Where the inviter is to be found is no reason to give up the other public relays.
            self._relay = (invite.address.relay, invite.relay_token) if invite.own_relay else (None, None)

    def _check_role(self, role: Role) -> None:
        if role is Role.CLIENT and not self._config.client:
            raise MeshError(
                "the invite is for clients, which lend no device",
                hint="add --client, or ask for another invite",
            )

    def _recall(self, document: dict[str, Any]) -> None:
        try:
            self.membership = Membership.from_document(document["membership"])
            if document["settings"] is not None:
                self.settings = settings_from_document(document["settings"])
            self._known = {
                NodeId(str(node)): Address(direct=tuple(map(str, direct)), relay=relay)
                for node, direct, relay in document["members"]
            }
            self.epoch = int(document.get("epoch", 0))
            ipv4, ipv6 = document.get("ports", (0, 0))
            self._ports = (int(ipv4), int(ipv6))
            if self._config.relay is None:
                self._relay = (document["relay"], document["relay_token"])
        except (KeyError, TypeError, ValueError, MeshError) as error:
            raise MeshError(
                f"{self._home.mesh_file} is damaged: {error}",
                hint="join again with a new token, or start afresh with --new-mesh",
            ) from error

    @property
    def model(self) -> str | None:
        """What the mesh called its model when this home was last in it."""
        return self.settings.model if self.settings is not None else None

    @property
    def is_creator(self) -> bool:
        return self.membership.mesh == MeshId(self._identity.id)

    def network_config(self) -> NetworkConfig:
        relay, token = self._relay
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
                self._write()

    async def join(self, mesh: Mesh) -> str:
        """By invite; raises with one sentence where that is refused. Returns the inviter's name."""
        assert self.network is not None and self.invite is not None
        _, welcome = await self.network.join(self.invite)
        self.settings = _settings_of(welcome)
        self._check_options(self.settings)
        known = _addresses_of(welcome)
        known.setdefault(self.invite.inviter, self.invite.address)
        self._known = known
        mesh.know(known)
        self._write()
        name = welcome.get("name")
        return clean(name, NAME_CHARS) if isinstance(name, str) and name else self.invite.inviter[:8]

    def remembered(self) -> dict[NodeId, Address]:
        return self._known

    def settle(
        self, model: ModelFacts | None, draft: Draft | None, *, default_slots: int
    ) -> MeshSettings | None:
        """The mesh's settings: made by its creator, obeyed by everybody else."""
        if not self.is_creator:
            self._check_options(self.settings)
            return self.settings
        if model is None:
            return self.settings
        config, old = self._config, self.settings
        if config.layers is not None and (wrong := misfit(len(model.layers), config.layers)):
            raise UsageError(wrong, hint=f"the model's layers are 0-{len(model.layers) - 1}")
        settings = MeshSettings(
            version=old.version if old is not None else 1,
            # A name and never a path: others look for it in their own folders.
            model=_common_name(model),
            fingerprint=model.fingerprint,
            alias=config.alias or file_stem(model),
            context=config.context,
            slots=config.slots or default_slots,
            cache_type_k=config.cache_type_k or "f16",
            cache_type_v=config.cache_type_v or "f16",
            split=config.split,
            tensor_split=config.tensor_split,
            layers=config.layers,
            guess=not config.no_draft,
            draft=draft,
            # Without a draft there is nothing to limit, and nothing that travels.
            draft_max=(config.draft_max or DRAFT_MAX) if draft is not None else DRAFT_MAX,
        )
        if old is not None and settings != old:
            settings = replace(settings, version=old.version + 1)
        self.settings = settings
        self._write()
        return settings

    def check_model(self, model: ModelFacts) -> None:
        """A joiner's own model has to be the mesh's."""
        settings = self.settings
        if self.is_creator or settings is None or model.fingerprint == settings.fingerprint:
            return
        raise MeshError(
            f"the mesh serves {settings.alias} (fingerprint {settings.fingerprint[:12]}), "
            f"and {file_stem(model)} is another file ({model.fingerprint[:12]})",
            hint="leave --model out to take part with the mesh's model, or start a mesh with --new-mesh",
        )

    def _check_options(self, settings: MeshSettings | None) -> None:
        """Plan options belong to the mesh: whoever joins may repeat them, and not change them."""
        if settings is None or self.is_creator:
            return
        config = self._config
        for option, given, agreed in (
            ("--model", self._named(settings), settings.model),
            ("--ctx-size", config.context, settings.context),
            ("--parallel", config.slots, settings.slots),
            ("--cache-type-k", config.cache_type_k, settings.cache_type_k),
            ("--cache-type-v", config.cache_type_v, settings.cache_type_v),
            ("--alias", config.alias, settings.alias),
            ("--split", config.split or None, settings.split),
            ("--tensor-split", config.tensor_split, settings.tensor_split),
            ("--layers", config.layers, settings.layers),
            ("--draft", self._named_draft(settings), settings.draft.name if settings.draft else None),
            ("--draft-max", config.draft_max, settings.draft_max),
            ("--no-draft", config.no_draft or None, not settings.guess),
        ):
            if given is not None and given != agreed:
                shown = "not set" if agreed in (None, False) else str(agreed)
                raise MeshError(
                    f"{option} belongs to the mesh, where it is {shown}; its creator sets it",
                    hint=f"leave {option} out",
                )

    def _named(self, settings: MeshSettings) -> str | None:
        """The catalog's name that was asked for, in the mesh's words; files are told by their contents."""
        if self._config.model is None:
            return None
        known = catalog.load(self._home.catalog_file).get(self._config.model)
        if known is None:
            return None
        theirs = catalog.load().get(settings.model)
        same = names.same_model(known.stem, theirs.stem if theirs is not None else settings.model)
        return settings.model if same else self._config.model

    def _named_draft(self, settings: MeshSettings) -> str | None:
        """The draft that was asked for, in the mesh's words."""
        given = self._config.draft
        if given is None or settings.draft is None:
            return given
        same = names.same_model(catalog.stem_of(Path(given).name), settings.draft.name)
        return settings.draft.name if same else given

    # -- what is remembered --------------------------------------------------------------------

    def remember(self, mesh: Mesh) -> None:
        """Keep up with settings and addresses, so that this node finds back after a restart."""
        settings = mesh.settings()
        known = {
            m.id: m.facts.address
            for m in mesh.members
            if m.id != self._identity.id and m.facts.address.direct
        }
        newer = settings is not None and (self.settings is None or settings.version > self.settings.version)
        if newer:
            self.settings = settings
        news = any(self._known.get(node) != address for node, address in known.items())
        news = news or not mesh.expelled.isdisjoint(self._known) or mesh.highest_epoch() > self.epoch
        if newer or news or self.membership.revoked != self._revoked_written:
            known = {**self._known, **known}
            self._known = {node: known[node] for node in known if node not in mesh.expelled}
            self.epoch = max(self.epoch, mesh.highest_epoch())
            try:
                self._write()
            except OSError as error:
                # A full disk is no reason to end a node that serves; the next change tries again.
                log.warning("membership not written file=%s cause=%s", self._home.mesh_file, error.strerror)

    def _write(self, *, expelled: bool = False) -> None:
        if self.membership.mesh is None or self._left:
            return  # not in yet, and what the home remembers may be of use; or out for good
        relay, token = self._relay
        if self._new_secret is not None:
            # In this order a home is never left with the key of one mesh and the record of another.
            self._home.forget_mesh()
            self._home.write_secret(self._new_secret)
            self._new_secret = None
        self._revoked_written = set(self.membership.revoked)
        self._home.write_mesh(
            {
                "membership": self.membership.to_document(),
                "settings": settings_to_document(self.settings) if self.settings is not None else None,
                "members": [[node, list(a.direct), a.relay] for node, a in self._known.items()],
                "epoch": self.epoch,
                "ports": list(self._ports),
                "relay": relay,
                "relay_token": token,
                "expelled": expelled,
            }
        )

    def on_expelled(self) -> None:
        """So that it does not run on alone, the next time that it is started."""
        self._write(expelled=True)

    def forget(self) -> None:
        self._left = True
        self._home.forget_mesh()

    # -- invites -------------------------------------------------------------------------------

    def invite_others(self, role: Role, lifetime_s: float | None, *, reuse: bool = False) -> dict[str, Any]:
        """A token for `role`; with `reuse` that of an invite which is open and has most of its time left."""
        if self.network is None or self.membership.mesh is None:
            raise MeshError("this node is not in its mesh yet", hint="try again in a moment")
        if self.membership.role(self._identity.id) is Role.CLIENT:
            raise MeshError("a client cannot invite others", hint="make the invite on a node of the mesh")
        now = time.time()
        admissions = self.membership.admissions
        open_ones = [
            invite
            for invite in admissions.invites()
            if invite.role is role
            and invite.state(now) == "open"
            and (invite.expires is None) == (lifetime_s is None)
            and (invite.expires is None or lifetime_s is None or invite.expires - now > lifetime_s / 2)
        ]
        if reuse and open_ones:
            issued = open_ones[-1]
        else:
            issued = admissions.issue(role=role, now=now, lifetime_s=lifetime_s)
            self._write()
        relay, token = self._relay
        address = self.network.address
        invite = Invite(
            id=issued.id,
            mesh=self.membership.mesh,
            secret=issued.secret,
            inviter=self._identity.id,
            address=Address(direct=address.direct, relay=address.relay or relay),
            own_relay=relay is not None,
            relay_token=token if relay is not None else None,
            role=role,
            expires=issued.expires,
        )
        return {"id": issued.id, "token": encode(invite, self._identity)}

    def list_invites(self) -> dict[str, Any]:
        now = time.time()
        return {
            "invites": [
                {
                    "id": invite.id,
                    "role": invite.role.value,
                    "state": invite.state(now),
                    "issued": invite.issued,
                    "expires": invite.expires,
                    "uses": invite.uses,
                }
                for invite in self.membership.admissions.invites()
            ]
        }

    def revoke(self, id: str, mesh: Mesh) -> dict[str, Any]:
        """Expel those who came in by it, and let nobody else in."""
        assert self.network is not None
        names = {member.id: mesh.name_of(member.id) for member in mesh.members}
        self.network.revoke(id)
        out = mesh.expel({id})
        self._write()
        return {"id": id, "expelled": sorted(names.get(node, node[:8]) for node in out)}


def _common_name(model: ModelFacts) -> str:
    """By which every node of the mesh can look for it: never a path, nor one person's own word."""
    stem = file_stem(model)
    known = catalog.load().get(stem)
    if known is None:
        return stem
    # A file that is called as somebody else's model: others must not download that one for it.
    return known.name if catalog.key_of(known.stem) == catalog.key_of(stem) else f"{stem}.gguf"


def _settings_of(welcome: dict[str, Any]) -> MeshSettings | None:
    document = welcome.get("settings")
    return settings_from_document(document) if document is not None else None


def _addresses_of(welcome: dict[str, Any]) -> dict[NodeId, Address]:
    """The members that an admitting node told of."""
    found: dict[NodeId, Address] = {}
    for entry in welcome.get("members", [])[:1000]:
        match entry:
            case {"id": str(node), "direct": list(direct), "relay": str() | None as relay}:
                addresses = tuple(str(part) for part in direct[:16])
                found[NodeId(node)] = Address(direct=addresses, relay=relay)
    return found
