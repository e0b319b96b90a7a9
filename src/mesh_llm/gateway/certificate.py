"""A certificate that this machine makes itself, for a port on the local network.

ECDSA over P-256, which every browser takes (Ed25519, which nodes use, is taken by none), written out in DER:
a few dozen lines in place of a dependency that every lite client would have to install. Keys are made and
used for one signature here, once a year; connections are encrypted by the system's TLS library.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import secrets
import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from mesh_llm.home import write_private

CERTIFICATE_DAYS = 396
"""A day less than browsers take at most: it begins a day ago, for clocks that are behind."""
_RENEWED_BEFORE_S = 30 * 86400
_PREFIX = "# mesh-llm "

# P-256, FIPS 186-5.
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)

_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _TEXT, _TIME = 0x30, 0x31, 0x02, 0x03, 0x04, 0x0C, 0x17
_EXPLICIT = 0xA0

Point = tuple[int, int] | None
"""None is the one at infinity."""


def certificate(file: Path, names: Sequence[str]) -> Path:
    """`file`, with a key and a certificate for `names` that is valid for a while, made anew if need be."""
    if not _is_usable(file, names):
        until = time.time() + CERTIFICATE_DAYS * 86400
        note = _PREFIX + json.dumps({"names": list(names), "until": until})
        write_private(file, "\n".join((note, *_make(names, time.time() - 86400, until), "")))
    return file


def fingerprint(file: Path) -> str:
    """SHA-256, as browsers show it."""
    text = file.read_text()
    head, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(text[text.index(head) : text.index(end) + len(end)])
    return hashlib.sha256(der).digest().hex(":").upper()


def _is_usable(file: Path, names: Sequence[str]) -> bool:
    try:
        first, _, _ = file.read_text().partition("\n")
        note = json.loads(first.removeprefix(_PREFIX))
        lasts_s = float(note["until"]) - time.time()
        return list(names) == note["names"] and lasts_s > _RENEWED_BEFORE_S
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _make(names: Sequence[str], since: float, until: float) -> tuple[str, str]:
    """A key and a certificate that it has signed, in PEM."""
    secret = secrets.randbelow(_ORDER - 1) + 1
    public = _written(_times(secret, _BASE))
    curve = _oid("1.2.840.10045.3.1.7")
    algorithm = _der(_SEQUENCE, _oid("1.2.840.10045.4.3.2"))
    # The first name alone; browsers look at the others.
    named = _der(_SET, _der(_SEQUENCE, _oid("2.5.4.3"), _der(_TEXT, f"mesh-llm {names[0]}".encode()[:64])))
    body = _der(
        _SEQUENCE,
        _der(_EXPLICIT, _integer(2)),
        _integer(secrets.randbits(120) | 1 << 120),
        algorithm,
        _der(_SEQUENCE, named),
        _der(_SEQUENCE, _time(since), _time(until)),
        _der(_SEQUENCE, named),
        _der(_SEQUENCE, _der(_SEQUENCE, _oid("1.2.840.10045.2.1"), curve), _bits(public)),
        _der(_EXPLICIT + 3, _der(_SEQUENCE, *_extensions(names))),
    )
    signed = _der(_SEQUENCE, body, algorithm, _bits(_signature(secret, body)))
    key = _der(
        _SEQUENCE,
        _integer(1),
        _der(_OCTETS, secret.to_bytes(32, "big")),
        _der(_EXPLICIT, curve),
        _der(_EXPLICIT + 1, _bits(public)),
    )
    return _pem("EC PRIVATE KEY", key), _pem("CERTIFICATE", signed)


def _extensions(names: Sequence[str]) -> list[bytes]:
    """It signs no others (basic constraints), and is for servers of these names."""
    critical = b"\x01\x01\xff"
    alternative = _der(_SEQUENCE, *map(_alternative, names))
    return [
        _der(_SEQUENCE, _oid("2.5.29.19"), critical, _der(_OCTETS, _der(_SEQUENCE))),
        _der(_SEQUENCE, _oid("2.5.29.15"), critical, _der(_OCTETS, b"\x03\x02\x07\x80")),
        _der(_SEQUENCE, _oid("2.5.29.37"), _der(_OCTETS, _der(_SEQUENCE, _oid("1.3.6.1.5.5.7.3.1")))),
        _der(_SEQUENCE, _oid("2.5.29.17"), _der(_OCTETS, alternative)),
    ]


def _alternative(name: str) -> bytes:
    try:
        return _der(0x87, ipaddress.ip_address(name).packed)
    except ValueError:
        return _der(0x82, name.encode("idna"))


# -- ECDSA ---------------------------------------------------------------------------------------


def _signature(secret: int, message: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
    while True:
        nonce = secrets.randbelow(_ORDER - 1) + 1
        point = _times(nonce, _BASE)
        assert point is not None
        r = point[0] % _ORDER
        s = pow(nonce, -1, _ORDER) * (digest + r * secret) % _ORDER
        if r and s:
            return _der(_SEQUENCE, _integer(r), _integer(s))


def _times(number: int, point: Point) -> Point:
    result: Point = None
    while number:
        if number & 1:
            result = _sum(result, point)
        point = _sum(point, point)
        number >>= 1
    return result


def _sum(one: Point, other: Point) -> Point:
    if one is None or other is None:
        return other if one is None else one
    (x1, y1), (x2, y2) = one, other
    if x1 == x2 and (y1 + y2) % _P == 0:
        return None
    if one == other:
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, _P) % _P
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _P) % _P
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _written(point: Point) -> bytes:
    assert point is not None
    return b"\x04" + point[0].to_bytes(32, "big") + point[1].to_bytes(32, "big")


# -- DER -----------------------------------------------------------------------------------------


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 0x80:
        return bytes((tag, len(body))) + body
    length = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + body


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(body: bytes) -> bytes:
    return _der(_BITS, b"\0", body)


def _time(at: float) -> bytes:
    return _der(_TIME, time.strftime("%y%m%d%H%M%SZ", time.gmtime(at)).encode())


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    body = bytearray((40 * first + second,))
    for number in rest:
        septets = [number & 0x7F]
        while number := number >> 7:
            septets.append(number & 0x7F | 0x80)
        body += bytes(reversed(septets))
    return _der(0x06, bytes(body))


def _pem(kind: str, der: bytes) -> str:
    lines = base64.encodebytes(der).decode().replace("\n", "")
    folded = "\n".join(lines[at : at + 64] for at in range(0, len(lines), 64))
    return f"-----BEGIN {kind}-----\n{folded}\n-----END {kind}-----"
