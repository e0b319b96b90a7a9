"""Takes out of a text what its reader must not know: secrets, names of people, public addresses."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_SECRET_VARIABLES = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|JOIN|CREDENTIAL")
_SECRET_CHARS = 6
"""Values of variables that are shorter are no secrets, and may be part of any word."""
_PATTERNS = (
    (re.compile(r"mesh1-[A-Za-z0-9_\-]+"), "[invite token]"),
    (
        re.compile(r"(?i)\b(bearer\s+|(?:api[-_]?key|token|secret|password)s?\"?\s*[=:]\s*\"?)[^\s\",]+"),
        r"\1[secret]",
    ),
    (re.compile(r"(://)[^/@\s]+@"), r"\1[secret]@"),
    (re.compile(r"\b(?:sk|hf|mk)[-_][A-Za-z0-9_\-]{8,}"), "[key]"),
    (re.compile(r"\b[0-9a-fA-F]{64}\b"), "[64 digits]"),
    (re.compile(r"(/(?:home|Users)/)[^/\s\"':]+"), r"\1[user]"),
)
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")
_EXAMPLES = tuple(map(ipaddress.ip_network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))
"""Ranges of documents. Python calls them private; somebody may use them all the same."""


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`secrets` are values that must not be in it, whatever they look like."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "[secret]")
    text = text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = _IPV6.sub(_address, _IPV4.sub(_address, text))
    for name, instead in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def secret_values(environment: Mapping[str, str] | None = None) -> set[str]:
    """Of variables whose names say that they hold one."""
    known = os.environ if environment is None else environment
    return {
        value
        for name, value in known.items()
        if _SECRET_VARIABLES.search(name.upper()) and len(value) >= _SECRET_CHARS
    }


def _address(match: re.Match[str]) -> str:
    try:
        ip = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    inner = ip.is_private or ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
    example = any(ip in network for network in _EXAMPLES if ip.version == network.version)
    return match[0] if inner and not example else "[public address]"


def _names() -> list[tuple[str, str]]:
    names = [(socket.gethostname(), "[this machine]")]
    with suppress(OSError, KeyError):
        user = getpass.getuser()
        # The system's own are no names of people, and words of many paths.
        if user not in ("root", "user", "admin", "nobody", "ubuntu", "debian"):
            names.append((user, "[user]"))
    return [(name, instead) for name, instead in names if len(name) > 2 and name != "localhost"]
