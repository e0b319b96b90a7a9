"""A catalog that somebody else keeps: fetched when its user asks for it, and taken by its signature alone.

It is a catalog as `models/catalog.toml` is one, with a line before it that has the signature of all the
rest: ed25519, by a key that the user names. So it may lie on any server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mesh_llm.download import hub
from mesh_llm.download.http import answered, get, host_of, open_session, passing_status, shown
from mesh_llm.errors import DownloadFailed, ModelError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home, write_whole
from mesh_llm.models import catalog
from mesh_llm.models.catalog import CatalogEntry, is_address
from mesh_llm.transport.identity import Identity, is_node_id, verify
from mesh_llm.types import NodeId

CATALOG_BYTES = 1 << 20
"""Ours has a twentieth of it."""

_FIRST_LINE = re.compile(rb"# mesh-llm catalog, signed: ([\w-]{86})\r?\n")
_PURPOSE = b"mesh-llm catalog 1\0"
"""What else a key signs is never a catalog."""


@frozen
class CatalogSource:
    url: str
    key: str
    """64 hexadecimal digits: the public half."""
    at: float
    """When it was fetched, in seconds since 1970."""


def sign(text: bytes, identity: Identity) -> bytes:
    """The same with its signature in front."""
    catalog.check(_text(text, "the catalog"), "the catalog")
    signature = base64.urlsafe_b64encode(identity.sign(_PURPOSE + text)).rstrip(b"=")
    return b"# mesh-llm catalog, signed: " + signature + b"\n" + text


def opened(signed: bytes, key: str, where: str) -> tuple[CatalogEntry, ...]:
    """Its entries; raises where it was not signed by `key`, or is no catalog."""
    found = _FIRST_LINE.match(signed)
    if found is None:
        raise ModelError(
            f"{where} is not a signed catalog",
            hint="mesh-llm catalog sign FILE signs one, with a key of its own",
        )
    try:
        signature = base64.urlsafe_b64decode(found[1] + b"==")
    except binascii.Error:
        signature = b""
    if not verify(NodeId(key), _PURPOSE + signed[found.end() :], signature):
        raise ModelError(
            f"{where} was not signed with the key {key[:12]}…, or has been altered since",
            hint="ask its maker for the key; nothing was changed here",
        )
    return catalog.check(_text(signed, where), where)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ModelError(f"{where} is not a catalog: it is not UTF-8") from None


# -- the user's ------------------------------------------------------------------------------------


def source(home: Home) -> CatalogSource | None:
    """Where the list in this home came from; None where there is none."""
    try:
        document = json.loads(home.catalog_source_file.read_text())
        return CatalogSource(url=str(document["from"]), key=str(document["key"]), at=float(document["at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def update(
    home: Home, url: str | None, key: str | None
) -> tuple[CatalogSource, tuple[CatalogEntry, ...]]:
    """Fetch, check and keep it. What is not given is as it was the last time."""
    if (before := source(home)) is not None:
        url, key = url or before.url, key or before.key
    if not url or not key:
        raise UsageError(
            "--from and --key say where a catalog is and who signs it",
            hint="mesh-llm catalog update --from https://example.org/catalog.toml --key HEX",
        )
    key = key.strip().lower()
    if not is_node_id(key):
        raise UsageError("--key is not 64 hexadecimal digits", hint="mesh-llm catalog sign prints it")
    signed = await _fetched(url)
    entries = opened(signed, key, shown(url) if is_address(url) else url)
    new = CatalogSource(url=url, key=key, at=time.time())
    home.path.mkdir(parents=True, exist_ok=True)
    document = {"from": new.url, "key": new.key, "at": new.at}
    texts = {home.catalog_update_file: signed.decode(), home.catalog_source_file: json.dumps(document)}
    await asyncio.to_thread(write_whole, texts, mode=0o600)
    return new, entries


def reset(home: Home) -> bool:
    """Whether there was one."""
    was = home.catalog_update_file.exists()
    for path in (home.catalog_update_file, home.catalog_source_file):
        with suppress(FileNotFoundError):
            path.unlink()
    return was


async def _fetched(url: str) -> bytes:
    scheme = urlsplit(url).scheme.lower()
    if scheme == "https" and is_address(url):
        hub.check()
        return await answered(shown(url), lambda: _from_server(url))
    if scheme in ("", "file"):
        return await asyncio.to_thread(_from_file, Path(unquote(urlsplit(url).path) if scheme else url))
    raise UsageError(
        f"{url} is neither an https:// address nor a file", hint="--from https://… or --from FILE"
    )


async def _from_server(url: str) -> bytes:
    host = host_of(url)
    async with open_session(await asyncio.to_thread(hub.trust)) as session, get(session, url, {}) as answer:
        if (passing := passing_status(answer.status, host, answer.headers)) is not None:
            raise passing
        if answer.status != 200:
            raise DownloadFailed(f"{host} answers {answer.status} to the request for {shown(url)}")
        data = b""
        async for chunk in answer.content.iter_any():
            data += chunk
            if len(data) > CATALOG_BYTES:
                break
    return _bounded(data, shown(url))


def _from_file(path: Path) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return _bounded(file.read(CATALOG_BYTES + 1), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > CATALOG_BYTES:
        raise ModelError(f"{where} is larger than {CATALOG_BYTES >> 20} MB, which no catalog is")
    return data
