"""A certificate that this machine makes itself, for a port on the local network.

ECDSA over P-256, which every browser takes; Ed25519, which nodes use, is taken by none.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_llm.home import write_private

if TYPE_CHECKING:
    from cryptography import x509

CERTIFICATE_DAYS = 396
"""A day less than browsers take at most: it begins a day ago, for clocks that are behind."""
_RENEWED_BEFORE_S = 30 * 86400
_PREFIX = "# mesh-llm "


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
    # Here: of all commands only those that open such a port need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    # The first name alone; browsers look at the others.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"mesh-llm {names[0]}"[:64])])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(since, UTC))
        .not_valid_after(datetime.fromtimestamp(until, UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(server, critical=False)
        .add_extension(x509.SubjectAlternativeName(list(map(_alternative, names))), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(
        pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return secret.decode().strip(), made.public_bytes(pem).decode().strip()


def _alternative(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.encode("idna").decode())
