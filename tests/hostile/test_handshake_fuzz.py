"""Handshakes that are almost right, from either side: they succeed, or are refused as the protocol says."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.errors import JoinRefused
from mesh_llm.home import Home
from mesh_llm.membership.messages import signed_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.node.joining import Joining
from mesh_llm.transport import handshake
from mesh_llm.transport.claims import Claim, sign
from mesh_llm.transport.control_stream import ControlStream
from mesh_llm.transport.credential import extend
from mesh_llm.transport.framing import FRAME_VERSION, HEAD, FrameError, FrameType
from mesh_llm.transport.handshake import HandshakeRefusal, Introduction, SaidExpelled, Self
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite
from mesh_llm.transport.own_membership import Membership
from mesh_llm.types import Address, Fingerprint, MeshId, Role
from tests.hostile.mutation import Mutations
from tests.support.background import WITHIN_S
from tests.support.members import new_identity

BODILESS = FrameType.CONFIRM
"""What is in it is not looked at."""
CASES = (
    *(
        (frame, by)
        for frame in (FrameType.HELLO, FrameType.PROVE, FrameType.ADMITTED)
        for by in ("invite", "credential")
    ),
    # An invite that was revoked is refused without it.
    (FrameType.EXPELLED, "credential"),
)
QUICK, FULL = 200, 10_000
REFUSALS = (FrameError, HandshakeRefusal, SaidExpelled)
"""What a node expects of a handshake that fails."""
SETTINGS = MeshSettings(version=1, model="m", fingerprint=Fingerprint("ab"), alias="m", context=512, slots=1)

Alter = Callable[[bytes], bytes]


class Way:
    """One direction of a stream, in memory."""

    def __init__(self, alter: Alter) -> None:
        self._alter = alter
        self._parts = asyncio.Queue[bytes]()

    async def write_all(self, data: bytes) -> None:
        self._parts.put_nowait(self._alter(data))

    async def read(self, limit: int) -> bytes:
        return await self._parts.get()

    def end(self) -> None:
        self._parts.put_nowait(b"")


@dataclass(frozen=True, slots=True)
class End:
    """What a node has of a stream."""

    sending: Way
    receiving: Way

    def send(self) -> Way:
        return self.sending

    def recv(self) -> Way:
        return self.receiving


class Meeting:
    """The creator of a mesh, and one who dials it: with an invite, as a member, or expelled."""

    def __init__(self, frame: FrameType, by: str, home: Home) -> None:
        self._frame, self._by, self._home = frame, by, home
        creator, joiner = new_identity(), new_identity()
        self._ids = creator.id, joiner.id
        self._joiner = joiner
        membership = Membership.create(creator)
        membership.set(SETTINGS, creator, now=time.time())
        mesh = MeshId(creator.id)
        issued = membership.admissions.issue(role=Role.NODE, now=time.time(), lifetime_s=None)
        self._invite = Invite(
            id=issued.id, mesh=mesh, secret=issued.secret, inviter=creator.id, address=Address()
        )
        member = Membership.create(creator)
        member.adopt(mesh, extend((), mesh, creator, joiner.id, Role.NODE, issued.id))
        if frame is FrameType.EXPELLED:
            membership.revoke(issued.id, creator)
        self._here, self._there = _self(creator, membership), _self(joiner, member)
        seed = zlib.crc32(f"{frame.name} {by}".encode())
        self._mutations = Mutations(seed=seed, ids=(*self._ids, "0" * 64))
        self.altered = 0
        self.met = 0

    async def hold(self) -> None:
        """Both sides come to an end that they know."""
        ways = Way(self._alter), Way(self._alter)
        answering = self._answer(ControlStream(End(ways[1], ways[0])))
        dialling = self._dial(ControlStream(End(ways[0], ways[1])))
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(_until_refused(answering, ways[1]), _until_refused(dialling, ways[0]))

    def _alter(self, data: bytes) -> bytes:
        if data[HEAD.size - 1] != self._frame:
            return data
        self.altered += 1
        text = self._mutations.text(json.loads(data[HEAD.size :]))
        return HEAD.pack(len(text), FRAME_VERSION, self._frame) + text

    async def _answer(self, control: ControlStream) -> None:
        found = await handshake.answer(
            control, self._here, self._joiner.id, now=time.time(), let_in=lambda: None
        )
        self._check(found, Role.NODE)

    async def _dial(self, control: ControlStream) -> None:
        if self._by == "credential":
            found = await handshake.prove_credential(control, self._there, self._invite.inviter)
        else:
            found, joined = await handshake.prove_invite(control, self._there, self._invite)
            self._enter(joined.welcome)
        self._check(found, Role.OWNER)

    def _enter(self, welcome: dict[str, Any]) -> None:
        entry = Joining(self._home, NodeConfig(home=self._home.path), self._joiner)
        entry.membership = Membership(mesh=self._invite.mesh, revocations=self._there.membership.revocations)
        try:
            entry._welcomed(welcome)
        except JoinRefused:
            return
        assert entry.settings in (None, SETTINGS)

    def _check(self, found: Introduction, role: Role) -> None:
        assert found.node in self._ids
        assert found.role is role
        self.met += 1


def _self(identity: Identity, membership: Membership) -> Self:
    return Self(
        identity=identity,
        instance="ab" * 8,
        membership=membership,
        gone=lambda node: ["cd" * 8],
        welcome=lambda node, role: _welcome(identity, membership),
    )


def _welcome(identity: Identity, membership: Membership) -> dict[str, Any]:
    assert membership.mesh is not None
    assert membership.in_force is not None
    numbers = {"id": identity.id, "i": 1, "s": 1}
    facts = {"name": "n", "role": "owner", "version": __version__, "state": "waiting", "address": {}}
    text = json.dumps(numbers | {"facts": facts})
    record = numbers | signed_to_document(sign(identity, membership.mesh, (), Claim.RECORD, text))
    return {
        "name": "n",
        "settings": signed_to_document(membership.in_force.signed),
        "members": [record],
    }


async def _until_refused(steps: Coroutine[Any, Any, None], told: Way) -> None:
    """What a connection does that ends: the other side reads no more."""
    try:
        await steps
    except REFUSALS:
        pass
    finally:
        told.end()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.create()
    return home


def test_every_frame_is_tried() -> None:
    """Messages are test_fuzz's."""
    assert {BODILESS, FrameType.MESSAGE, *(frame for frame, _ in CASES)} == set(FrameType)


@pytest.mark.parametrize("count", [QUICK, pytest.param(FULL, marks=pytest.mark.long)])
@pytest.mark.parametrize(("frame", "by"), CASES, ids=[f"{frame.name}-{by}" for frame, by in CASES])
async def test_frames(frame: FrameType, by: str, count: int, home: Home) -> None:
    meeting = Meeting(frame, by, home)
    while meeting.altered < count:
        before = meeting.altered
        await meeting.hold()
        assert meeting.altered > before
    # Some changes do not matter.
    assert bool(meeting.met) == (frame is not FrameType.EXPELLED)
