"""API keys with names: what each may do, until when, and how much a day.

The file holds a salted hash of each key and never the key itself, which is shown once, to whoever makes it.
Whoever checks a key looks at the file first: what was added or revoked holds for the next request.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mesh_llm.defaults import LOCK_POLL_S
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.home import write_private

KEYS_LIMIT = 200
"""More than people in a house; each has series of its own in /metrics."""
NODE_KEY = "api-key"
"""What the key of --api-key is called where usage is told."""
LIMIT_MOST = 10**12
LIFETIME_MOST_S = 10 * 366 * 86400.0

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_KEY = re.compile(r"mk-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")
_SECRET_BYTES = 32
_LOCK_S = 2.0
"""A node answers nobody meanwhile."""


@frozen
class ApiKey:
    id: str
    """Part of the key: it says which one is meant, and opens nothing."""
    name: str
    salt: str
    digest: str
    manage: bool = False
    """It may change what is served, and not only ask."""
    guest: bool = False
    """Made by `mesh-llm share`."""
    made: float = 0.0
    expires: float | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None

    def fits(self, offered: str) -> bool:
        return hmac.compare_digest(_digest(self.salt, offered), self.digest)

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


@frozen
class NewKey:
    """What somebody asks for."""

    name: str
    manage: bool = False
    guest: bool = False
    lifetime_s: float | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None or self.name == NODE_KEY:
            raise UsageError(
                f"{self.name[:60]!r} cannot be the name of a key",
                hint="up to 40 letters, digits, dots and dashes, such as anna-phone",
            )
        if self.lifetime_s is not None and not 0 < self.lifetime_s <= LIFETIME_MOST_S:
            raise UsageError("a key must last at least a second and at most ten years")
        for limit in (self.requests_per_day, self.tokens_per_day):
            if limit is not None and not 1 <= limit <= LIMIT_MOST:
                raise UsageError(f"a key can be limited to 1 to {LIMIT_MOST:,} requests or tokens a day")


class Keys:
    """The keys of one home. `file` None: there are none, and none can be made."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._keys: Mapping[str, ApiKey] = {}

    def all(self) -> Mapping[str, ApiKey]:
        """By id, as the file has them now. One that cannot be read opens nothing."""
        seen = _version(self._file)
        if seen != self._seen:
            self._seen = seen
            try:
                self._keys = self._read()
            except MeshError as error:
                log.warning("no named API key is accepted reason=%s", error.message)
                self._keys = {}
        return self._keys

    def find(self, offered: str) -> ApiKey | None:
        """The key that this is, an expired one, too."""
        match = _KEY.fullmatch(offered)
        key = self.all().get(match[1]) if match is not None else None
        return key if key is not None and key.fits(offered) else None

    def add(self, wanted: NewKey, now: float) -> tuple[ApiKey, str]:
        """The key's record, and the key, which is nowhere else."""
        with self._changing() as keys:
            if any(key.name == wanted.name for key in keys.values()):
                raise MeshError(
                    f"there is a key named {wanted.name} already",
                    hint=f"choose another name, or: mesh-llm keys revoke {wanted.name}",
                )
            if len(keys) >= KEYS_LIMIT:
                raise MeshError(
                    f"there are {KEYS_LIMIT} keys already", hint="revoke some: mesh-llm keys revoke NAME"
                )
            id = next(id for id in iter(lambda: secrets.token_hex(4), "") if id not in keys)
            secret, salt = f"mk-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}", secrets.token_hex(16)
            keys[id] = ApiKey(
                id=id,
                name=wanted.name,
                salt=salt,
                digest=_digest(salt, secret),
                manage=wanted.manage,
                guest=wanted.guest,
                made=now,
                expires=None if wanted.lifetime_s is None else now + wanted.lifetime_s,
                requests_per_day=wanted.requests_per_day,
                tokens_per_day=wanted.tokens_per_day,
            )
        return keys[id], secret

    def revoke(self, name: str) -> ApiKey:
        with self._changing() as keys:
            key = next((key for key in keys.values() if key.name == name), None)
            if key is None:
                raise MeshError(f"there is no key named {name}", hint="mesh-llm keys list shows them")
            del keys[key.id]
        return key

    def revoke_guests(self) -> list[str]:
        """All that `mesh-llm share` has made; returns their names."""
        with self._changing() as keys:
            guests = [key for key in keys.values() if key.guest]
            for key in guests:
                del keys[key.id]
        return sorted(key.name for key in guests)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, ApiKey]]:
        """The keys, to be changed, while nobody else does."""
        assert self._file is not None
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(lock)
            keys = dict(self._read())
            yield keys
            write_private(self._file, json.dumps({"keys": [asdict(key) for key in keys.values()]}))
        finally:
            os.close(lock)

    def _read(self) -> Mapping[str, ApiKey]:
        if self._file is None:
            return {}
        try:
            document = json.loads(self._file.read_text())
            keys = [_key(entry) for entry in document["keys"]]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError):
            raise MeshError(
                f"{self._file} cannot be read, or is damaged",
                hint="restore it, or remove it and make new keys",
            ) from None
        return {key.id: key for key in keys}


def _take(lock: int) -> None:
    """Others hold it for as long as it takes to write a small file."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise MeshError(
                    "another command is changing the keys", hint="try again in a moment"
                ) from None
            time.sleep(LOCK_POLL_S / 4)


def _key(entry: Any) -> ApiKey:
    """Raises where it is none; what a newer version wrote beside it does not matter."""
    key = ApiKey(**{each.name: entry[each.name] for each in fields(ApiKey) if each.name in entry})
    numbers = (key.made, key.expires, key.requests_per_day, key.tokens_per_day)
    if not all(isinstance(text, str) for text in (key.id, key.name, key.salt, key.digest)):
        raise TypeError("a key's texts are none")
    if not all(number is None or isinstance(number, int | float) for number in numbers):
        raise TypeError("a key's numbers are none")
    return key


def _version(file: Path | None) -> tuple[int, ...] | None:
    try:
        found = os.stat(file) if file is not None else None  # noqa: PTH116 (for every request)
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None


def _digest(salt: str, key: str) -> str:
    # A quick hash is enough: the key is random, and too long to be guessed from it.
    return hmac.digest(salt.encode(), key.encode(errors="surrogateescape"), "sha256").hex()
