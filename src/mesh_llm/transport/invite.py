"""The invite token: what a person copies from one machine to another.

`mesh1-` and base64url, without padding, of

    u8 flags | 8 id | 32 inviter | [32 mesh, unless the inviter created it] | 16 secret
    [u32 expires] | u8 count, each: u8 4 or 6, the IP, u16 port
    [u8 length, relay] | [u8 length, relay token]
    64 signature of the inviter over all before it | 4 checksum over all before it, the prefix included

There is exactly one text for an invite: anything altered, added or missing is refused, before a packet
is sent. Blanks and line breaks, which terminals and mail programs add, do not count.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import struct
import time
from dataclasses import field
from datetime import UTC, datetime

from mesh_llm.defaults import INVITE_TEXT_LIMIT
from mesh_llm.errors import InviteRefused
from mesh_llm.frozen import frozen
from mesh_llm.transport.identity import SIGNATURE_BYTES, Identity, verify
from mesh_llm.types import Address, MeshId, NodeId, Role

INVITE_ADDRESSES = 4
"""In a token: an interface or two, for both kinds of IP; each costs ten to twenty-six characters."""


PREFIX = "mesh1-"
ID_BYTES = 8
SECRET_BYTES = 16
KEY_BYTES = 32
CHECKSUM_BYTES = 4
EXPIRES_LIMIT = 1 << 32
_ANY_PREFIX = re.compile(r"mesh([1-9][0-9]{0,3})-")
_TEXT = re.compile(r"[A-Za-z0-9_-]+")
_RELAY = re.compile(r"https?://[!-~]+")
_TOKEN = re.compile(r"[!-~]+")

_CLIENT, _FOREIGN_MESH, _EXPIRES, _HAS_RELAY, _HAS_TOKEN, _OWN_RELAY, _OWNER = 1, 2, 4, 8, 16, 32, 64
_KNOWN_FLAGS = 127
_ROLE_FLAGS = {Role.NODE: 0, Role.CLIENT: _CLIENT, Role.OWNER: _OWNER}


@frozen
class Invite:
    id: str
    """16 hexadecimal digits; what `invite list` and `invite revoke` call it."""
    mesh: MeshId
    secret: bytes = field(repr=False)
    inviter: NodeId
    address: Address
    own_relay: bool = False
    """The relay of its address is the mesh's own, for all members; else it is only where the inviter is."""
    relay_token: str | None = field(default=None, repr=False)
    role: Role = Role.NODE
    expires: int | None = None
    """Unix time, in whole seconds."""


def encode(invite: Invite, identity: Identity) -> str:
    """The token; `identity` is the inviter's."""
    if identity.id != invite.inviter:
        raise ValueError("an invite is signed by its inviter")
    content = _pack(invite)
    body = content + identity.sign(_signed(content))
    return PREFIX + _to_text(body + _checksum(body))


def decode(text: str, *, now: float | None = None) -> Invite:
    """The invite in a token, or `InviteRefused` with one sentence."""
    token = "".join(text.split())
    prefix = _ANY_PREFIX.match(token)
    if prefix is None:
        raise InviteRefused(
            "this is not an invite token",
            hint=f"a token starts with {PREFIX}; `mesh-llm invite` on a member of the mesh makes one",
        )
    if prefix[0] != PREFIX:
        raise InviteRefused(
            "the token was made by a newer mesh-llm", hint="update mesh-llm on this machine, then join again"
        )
    invite = _decode_body(token.removeprefix(PREFIX))
    check_expiry(invite, now=time.time() if now is None else now)
    return invite


def check_expiry(invite: Invite, *, now: float) -> None:
    if invite.expires is not None and now >= invite.expires:
        day = datetime.fromtimestamp(invite.expires, UTC).strftime("%Y-%m-%d at %H:%M UTC")
        raise InviteRefused(
            f"the token expired on {day}", hint="ask for a new one: `mesh-llm invite` on a member makes it"
        )


def _decode_body(text: str) -> Invite:
    if len(text) > INVITE_TEXT_LIMIT or not _TEXT.fullmatch(text):
        raise _damaged()
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise _damaged() from None
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if _to_text(data) != text or checksum != _checksum(body) or len(body) < SIGNATURE_BYTES:
        raise _damaged()
    content, signature = body[:-SIGNATURE_BYTES], body[-SIGNATURE_BYTES:]
    try:
        invite = _unpack(content)
    except (struct.error, ValueError):
        raise _damaged() from None
    # What can be written in two ways is refused in all but one.
    if _pack(invite) != content or not verify(invite.inviter, _signed(content), signature):
        raise _damaged()
    return invite


def _damaged() -> InviteRefused:
    return InviteRefused("the token is damaged: a part of it is missing or altered", hint="copy it whole")


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(PREFIX.encode() + body).digest()[:CHECKSUM_BYTES]


def _signed(content: bytes) -> bytes:
    return b"mesh-llm invite 1\0" + content


# -- the compact form ----------------------------------------------------------------------------


def _pack(invite: Invite) -> bytes:
    foreign = str(invite.mesh) != invite.inviter
    flags = _ROLE_FLAGS[invite.role] | (_FOREIGN_MESH if foreign else 0)
    flags |= (_EXPIRES if invite.expires is not None else 0) | (_HAS_RELAY if invite.address.relay else 0)
    flags |= (_HAS_TOKEN if invite.relay_token else 0) | (_OWN_RELAY if invite.own_relay else 0)
    parts = [bytes([flags]), bytes.fromhex(invite.id), bytes.fromhex(invite.inviter)]
    if foreign:
        parts.append(bytes.fromhex(invite.mesh))
    parts.append(invite.secret)
    if invite.expires is not None:
        parts.append(struct.pack(">I", invite.expires))
    direct = invite.address.direct[:INVITE_ADDRESSES]
    parts.append(bytes([len(direct)]))
    parts += [_pack_address(address) for address in direct]
    parts += [_pack_text(text) for text in (invite.address.relay, invite.relay_token) if text]
    return b"".join(parts)


def _pack_address(text: str) -> bytes:
    ip, port = split_address(text)
    return bytes([ip.version]) + ip.packed + struct.pack(">H", port)


def _pack_text(text: str) -> bytes:
    data = text.encode()
    if len(data) > 255:
        raise ValueError("a relay's URL and its token have at most 255 characters")
    return bytes([len(data)]) + data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._rest = data

    def take(self, count: int) -> bytes:
        if len(self._rest) < count:
            raise ValueError("too short")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def text(self, pattern: re.Pattern[str]) -> str:
        text = self.take(self.byte()).decode("ascii")
        if not pattern.fullmatch(text):
            raise ValueError("not such a text")
        return text

    def end(self) -> None:
        if self._rest:
            raise ValueError("too long")


def _unpack(content: bytes) -> Invite:
    reader = _Reader(content)
    flags = reader.byte()
    roles = [role for role, bits in _ROLE_FLAGS.items() if flags & (_CLIENT | _OWNER) == bits]
    if flags & ~_KNOWN_FLAGS or not roles:
        raise ValueError("unknown flags")
    id, inviter = reader.take(ID_BYTES).hex(), reader.take(KEY_BYTES).hex()
    mesh = reader.take(KEY_BYTES).hex() if flags & _FOREIGN_MESH else inviter
    secret = reader.take(SECRET_BYTES)
    expires = int.from_bytes(reader.take(4)) if flags & _EXPIRES else None
    count = reader.byte()
    if count > INVITE_ADDRESSES:
        raise ValueError("too many addresses")
    direct = tuple(_unpack_address(reader) for _ in range(count))
    relay = reader.text(_RELAY) if flags & _HAS_RELAY else None
    relay_token = reader.text(_TOKEN) if flags & _HAS_TOKEN else None
    reader.end()
    own_relay = bool(flags & _OWN_RELAY)
    if own_relay and relay is None:
        raise ValueError("no relay that could be its own")
    return Invite(
        id=id,
        mesh=MeshId(mesh),
        secret=secret,
        inviter=NodeId(inviter),
        address=Address(direct=direct, relay=relay),
        own_relay=own_relay,
        relay_token=relay_token,
        role=roles[0],
        expires=expires,
    )


def _unpack_address(reader: _Reader) -> str:
    version = reader.byte()
    if version not in (4, 6):
        raise ValueError("no such IP version")
    ip = ipaddress.ip_address(reader.take(4 if version == 4 else 16))
    port = int.from_bytes(reader.take(2))
    if port == 0:
        raise ValueError("no port")
    return join_address(ip, port)


IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_relay_url(text: str) -> bool:
    return _RELAY.fullmatch(text) is not None and len(text) < 256


def split_address(text: str) -> tuple[IpAddress, int]:
    """The parts of `IP:PORT` or `[IP]:PORT`; ValueError where it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not IP:PORT")
    if host.startswith("[") and host.endswith("]"):
        return ipaddress.IPv6Address(host[1:-1].partition("%")[0]), int(port)
    return ipaddress.IPv4Address(host), int(port)


def customer_of(ip: IpAddress) -> str:
    """Whom an address counts for: itself, or the network that one IPv6 customer has."""
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, 64), strict=False))


def join_address(ip: IpAddress, port: int) -> str:
    return f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}"
