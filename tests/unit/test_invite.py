"""Invite tokens: one text per invite, and a sentence for everything else."""

from __future__ import annotations

import base64
import string
import subprocess
import sys
from dataclasses import replace

import pytest

from mesh_llm.errors import InviteRefused
from mesh_llm.transport import invite as invites
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import PREFIX, Invite, decode, encode
from mesh_llm.types import Address, MeshId, NodeId, Role

INVITER = Identity.from_secret(bytes(range(32)))
NOW = 1_800_000_000
SMALL = Invite(
    id="00112233445566ff",
    mesh=MeshId(INVITER.id),
    secret=b"sixteen bytes ok",
    inviter=INVITER.id,
    address=Address(direct=("192.0.2.7:4433",)),
)
LARGE = Invite(
    id="ff" * 8,
    mesh=MeshId("ab" * 32),
    secret=bytes(16),
    inviter=INVITER.id,
    address=Address(
        direct=("192.0.2.7:1", "[2001:db8::1]:65535", "10.0.0.1:4433", "[::1]:80"),
        relay="https://relay.example.org:8443/",
    ),
    own_relay=True,
    relay_token="a-token-of-32-characters-or-so-x",
    role=Role.CLIENT,
    expires=NOW + 3600,
)
DAMAGED = "the token is damaged: a part of it is missing or altered"


def refusal(text: str) -> str:
    with pytest.raises(InviteRefused) as caught:
        decode(text, now=NOW)
    return caught.value.message


@pytest.mark.parametrize(
    "invite",
    [
        SMALL,
        LARGE,
        replace(LARGE, own_relay=False),
        replace(LARGE, role=Role.OWNER),
        replace(SMALL, role=Role.OWNER),
        replace(SMALL, role=Role.CLIENT, address=Address()),
    ],
)
def test_an_invite_comes_back_as_it_was(invite: Invite) -> None:
    token = encode(invite, INVITER)

    assert token.startswith(PREFIX)
    assert decode(token, now=NOW) == invite
    assert encode(decode(token, now=NOW), INVITER) == token


def test_tokens_are_short() -> None:
    typical = replace(
        SMALL,
        address=Address(
            direct=("192.168.1.23:41234", "[2001:db8::17]:41234"), relay="https://relay.example/"
        ),
        expires=NOW + 1,
    )

    assert len(encode(typical, INVITER)) == 245
    assert len(encode(LARGE, INVITER)) < 400


def test_only_the_likeliest_addresses_travel() -> None:
    many = replace(SMALL, address=Address(direct=tuple(f"192.0.2.{last}:4433" for last in range(1, 20))))

    assert decode(encode(many, INVITER), now=NOW).address.direct == many.address.direct[:4]


def test_blanks_and_line_breaks_are_forgiven() -> None:
    token = encode(LARGE, INVITER)
    pasted = "  " + "\r\n".join(token[start : start + 40] for start in range(0, len(token), 40)) + "\n\t"

    assert decode(pasted, now=NOW) == LARGE


@pytest.mark.parametrize("invite", [SMALL, LARGE])
def test_every_altered_character_is_refused(invite: Invite) -> None:
    token = encode(invite, INVITER)
    alphabet = string.ascii_letters + string.digits + "-_"

    for index, sign in enumerate(token):
        # All of them where it is cheap: the last one, which carries spare bits.
        others = alphabet if index == len(token) - 1 else (sign.swapcase(), "A", "_", "9", "=", "ä")
        for other in others:
            if other != sign:
                with pytest.raises(InviteRefused):
                    decode(token[:index] + other + token[index + 1 :], now=NOW)


def test_every_missing_or_added_character_is_refused() -> None:
    token = encode(SMALL, INVITER)

    for index in range(len(token)):
        for text in (token[:index], token[:index] + token[index + 1 :], token[:index] + "A" + token[index:]):
            with pytest.raises(InviteRefused):
                decode(text, now=NOW)
    for more in ("A", "=", "==", "AAAA", token):
        assert refusal(token + more) == DAMAGED


@pytest.mark.parametrize(
    "text", ["", "hello", "mesh-llm", "esh1-AAAA", "MESH1-AAAA", "mesh01-AAAA", "mesh0-AAAA"]
)
def test_what_is_no_token(text: str) -> None:
    assert refusal(text) == "this is not an invite token"


@pytest.mark.parametrize("rest", ["", "AAAA", "A" * 5000, "Ä" * 50, "A" * 200, "!" * 100])
def test_what_looks_like_one(rest: str) -> None:
    assert refusal(PREFIX + rest) == DAMAGED


def test_a_newer_token_names_the_mend() -> None:
    with pytest.raises(InviteRefused) as caught:
        decode("mesh2-" + encode(SMALL, INVITER).removeprefix(PREFIX), now=NOW)

    assert caught.value.message == "the token was made by a newer mesh-llm"
    assert caught.value.hint == "update mesh-llm on this machine, then join again"


def test_expiry() -> None:
    token = encode(replace(SMALL, expires=NOW), INVITER)

    assert decode(token, now=NOW - 1).expires == NOW
    assert refusal(token) == "the token expired on 2027-01-15 at 08:00 UTC"


def resealed(content: bytes, identity: Identity = INVITER) -> str:
    body = content + identity.sign(invites._signed(content))
    text = base64.urlsafe_b64encode(body + invites._checksum(body)).rstrip(b"=").decode()
    return PREFIX + text


def test_the_signature_must_be_the_inviters() -> None:
    content = invites._pack(SMALL)
    other = Identity.from_secret(bytes(32))

    assert decode(resealed(content), now=NOW) == SMALL
    assert refusal(resealed(content, other)) == DAMAGED


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(invites._pack(SMALL) + b"\0", id="more than it needs"),
        pytest.param(invites._pack(SMALL)[:-1], id="less than it needs"),
        pytest.param(b"\x80" + invites._pack(SMALL)[1:], id="unknown flags"),
        pytest.param(b"\x41" + invites._pack(SMALL)[1:], id="an owner and a client"),
        pytest.param(
            b"\x02" + invites._pack(SMALL)[1:41] + bytes.fromhex(INVITER.id) + invites._pack(SMALL)[41:],
            id="a foreign mesh that is the inviter's",
        ),
        pytest.param(b"\x08" + invites._pack(SMALL)[1:] + b"\x07ftp://x", id="a relay that is no URL"),
        pytest.param(
            invites._pack(replace(SMALL, address=Address()))[:-1] + b"\x05", id="too many addresses"
        ),
        pytest.param(invites._pack(SMALL)[:-2] + b"\0\0", id="port 0"),
        pytest.param(b"\x20" + invites._pack(SMALL)[1:], id="an own relay that it does not name"),
    ],
)
def test_a_signed_token_in_another_form_is_refused(content: bytes) -> None:
    assert refusal(resealed(content)) == DAMAGED


def test_secrets_are_not_shown() -> None:
    assert "sixteen" not in repr(SMALL)
    assert "a-token-of" not in repr(LARGE)
    assert repr(INVITER) == f"Identity(id={INVITER.id!r})"


def test_commands_that_need_no_mesh_do_not_load_iroh() -> None:
    script = "import sys, mesh_llm.cli.main, mesh_llm.transport.network; sys.exit('iroh' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_nobody_else_can_sign_it() -> None:
    with pytest.raises(ValueError, match="signed by its inviter"):
        encode(replace(SMALL, inviter=NodeId("00" * 32)), INVITER)
