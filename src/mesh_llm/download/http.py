"""A file on somebody else's server: what is said of it, and what can go wrong on the way to it."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import field
from pathlib import PurePosixPath
from typing import TypeVar
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from mesh_llm.defaults import FETCH_SIZE_LIMIT_BYTES
from mesh_llm.errors import DownloadFailed
from mesh_llm.frozen import frozen
from mesh_llm.models.catalog import is_address

DOWNLOAD_CONNECT_S = 10.0
"""For a connection: a server that is there takes a second."""
DOWNLOAD_STALL_S = 30.0
"""Without a byte for this long a connection is given up (HF_HUB_DOWNLOAD_TIMEOUT changes it)."""
DOWNLOAD_TRIES = 5
"""After a failure, before it is said: with their pauses half a minute, in which a server restarts."""
DOWNLOAD_PAUSE_S = 1.0
"""Before the first of them (MESH_LLM_DOWNLOAD_PAUSE_S changes it); each further one waits twice as long."""
DOWNLOAD_PAUSE_LIMIT_S = 16.0
DOWNLOAD_WAIT_LIMIT_S = 60.0
"""That a server may ask for (Retry-After): who is to wait longer is better told."""


T = TypeVar("T")

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_RATE_LIMIT = re.compile(r";\s*r=0\s*;\s*t=(\d+)")
"""Of a quota that is used up: seconds until there is another one."""
_AGAIN = "what has arrived is kept; run it again later to continue"


@frozen
class RemoteFile:
    """Where a file's bytes are right now, and what its server says about them."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """With a token, where the server asks for one: never to be shown."""
    identity: str | None
    """Another one for other bytes; None where the server says nothing that would tell."""
    if_range: str | None = None
    """For a server that can tell by itself whether the rest belongs to what is here."""
    size_bytes: int | None
    sha256: str | None = None


Locate = Callable[[], Awaitable[RemoteFile]]


class Passing(Exception):
    """A failure that may be over in a moment; its text is the end of a sentence about the server."""

    def __init__(self, why: str, *, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.wait_s = wait_s
        """What the server asks for, if it does."""


class Unreachable(Passing):
    """Nobody answers. The first time that is final: there is no network, or no such host."""


class Patience:
    """How often and how long one file's failures are waited for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0
        self._pause_s = seconds("MESH_LLM_DOWNLOAD_PAUSE_S", DOWNLOAD_PAUSE_S)

    def gained(self) -> None:
        """Enough has come for the next failure to be a first one."""
        self._failures = 0

    async def after(self, failure: Passing) -> None:
        """Wait for better times; raises where there is no point in it."""
        self._failures += 1
        if self._failures > DOWNLOAD_TRIES:
            raise DownloadFailed(
                f"{self._what} could not be downloaded: {failure.why}, "
                f"and {DOWNLOAD_TRIES} more tries failed",
                hint=_AGAIN,
            )
        if failure.wait_s is not None and failure.wait_s > DOWNLOAD_WAIT_LIMIT_S:
            raise DownloadFailed(
                f"{self._what} cannot be downloaded now: {failure.why} "
                f"and asks for {failure.wait_s:.0f} s before the next try",
                hint=_AGAIN,
            )
        pause_s = min(self._pause_s * 2 ** (self._failures - 1), DOWNLOAD_PAUSE_LIMIT_S)
        await asyncio.sleep(max(pause_s, failure.wait_s or 0.0))


async def answered(name: str, ask: Callable[[], Awaitable[T]]) -> T:
    """A first question about a file: a busy server gets time, one that is not there ends it at once."""
    patience = Patience(name)
    while True:
        try:
            return await ask()
        except Unreachable as error:
            raise DownloadFailed(
                f"{name} cannot be downloaded: {error.why}",
                hint="check the network; HF_ENDPOINT sets a mirror, HTTPS_PROXY a proxy",
            ) from error
        except Passing as failure:
            await patience.after(failure)


def seconds(name: str, default: float) -> float:
    """A person's own bound, where the environment names one that is a number."""
    try:
        return max(0.0, float(os.environ[name]))
    except (KeyError, ValueError):
        return default


def stall_s() -> float:
    """The setting that other programs for the hub read, too."""
    return seconds("HF_HUB_DOWNLOAD_TIMEOUT", DOWNLOAD_STALL_S)


# -- over HTTP ------------------------------------------------------------------------------------


def open_session(trust: ssl.SSLContext) -> aiohttp.ClientSession:
    """For bytes: no bound on the whole, one on each silence.

    Nothing of the environment is taken but what `get` is told: the password that ~/.netrc has
    for a host, or for all, would go beside a token or a signature, and be refused with it.
    """
    redirects = aiohttp.TraceConfig()
    redirects.on_request_redirect.append(_on_redirect)
    return aiohttp.ClientSession(
        trace_configs=[redirects],
        connector=aiohttp.TCPConnector(limit=0, ssl=trust),
        timeout=aiohttp.ClientTimeout(
            total=None,
            # With the search for its address, and all addresses that it has.
            connect=2 * DOWNLOAD_CONNECT_S,
            sock_connect=DOWNLOAD_CONNECT_S,
            sock_read=stall_s(),
        ),
        headers={"Accept-Encoding": "identity", "User-Agent": "mesh-llm"},
        read_bufsize=256 << 10,
        trust_env=False,
        auto_decompress=False,
    )


async def _on_redirect(
    session: aiohttp.ClientSession, context: object, params: aiohttp.TraceRequestRedirectParams
) -> None:
    """Called before a redirect is followed."""
    headers = params.response.headers
    try:
        check_redirect(str(params.url), headers.get("Location") or headers.get("URI") or "")
    except DownloadFailed:
        params.response.close()
        raise


def check_redirect(url: str, location: str) -> None:
    """Refuse to leave encryption: whoever sits on the way could read the request and alter the file.

    From http to http is a person's own choice of a mirror.
    """
    target = urljoin(url, location)
    scheme = urlsplit(target).scheme
    if scheme not in ("http", "https"):
        raise DownloadFailed(
            f"{host_of(url)} redirects {file_of(url)} to {scheme}:, which is not a web address"
        )
    if urlsplit(url).scheme == "https" and scheme == "http":
        raise DownloadFailed(
            f"{host_of(url)} redirects {file_of(url)} from https to {shown(target)}, which is not encrypted",
            hint="download it from elsewhere: what arrives that way may have been altered",
        )


@asynccontextmanager
async def get(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """An answer's body to be read in the block; what breaks there, or before, is raised as Passing."""
    host = host_of(url)
    try:
        async with session.get(_as_given(url), headers=headers, proxy=proxy_for(url)) as answer:
            yield answer
    except (
        aiohttp.ClientConnectorError,
        aiohttp.ConnectionTimeoutError,
        aiohttp.ClientHttpProxyError,
    ) as error:
        raise Unreachable(cannot_reach(url, error)) from error
    except aiohttp.SocketTimeoutError as error:
        raise Passing(f"{host} sent nothing for {stall_s():g} s") from error
    except (aiohttp.InvalidURL, aiohttp.TooManyRedirects, aiohttp.NonHttpUrlClientError) as error:
        raise DownloadFailed(f"{host} redirects {shown(url)} to nowhere") from error
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Passing(f"the connection to {host} was lost") from error


def _as_given(url: str) -> URL:
    """Addresses of storage are signed as they are: %27 must not become an apostrophe."""
    return URL(url, encoded=url.isascii() and url.isprintable() and " " not in url)


def proxy_for(url: str) -> str | None:
    """What the environment names, as huggingface_hub reads it: ALL_PROXY, and hosts without a scheme, too."""
    parts, named = urlsplit(url), getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    if not proxy or not parts.hostname or proxy_bypass(parts.hostname):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not is_address(proxy):
        kind = proxy.partition("://")[0].lower()
        raise unusable_proxy(kind if kind not in ("http", "https") else "malformed")
    return proxy


def unusable_proxy(kind: str) -> DownloadFailed:
    return DownloadFailed(
        f"the environment sets a {kind} proxy, but models can only be downloaded through http proxies",
        hint="set one in HTTPS_PROXY and unset ALL_PROXY, or use none: NO_PROXY='*'",
    )


def cannot_reach(url: str, error: Exception) -> str:
    host, proxy = host_of(url), proxy_for(url)
    if isinstance(error, aiohttp.ClientConnectorCertificateError) or "certificate" in str(error).lower():
        return f"{host} cannot prove that it is {host}: its certificate is not trusted here"
    if proxy is None:
        return _unreached(host, error)
    return f"{host} cannot be reached: {_unreached(f'the proxy {host_of(proxy)}', error)}"


def _unreached(host: str, error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, aiohttp.ClientConnectorDNSError) or any(word in text for word in _NO_NAME):
        return f"{host} cannot be found: there is no network, or no such host"
    if "refused" in text or "connect call failed" in text:
        return f"{host} refuses the connection"
    if "407" in text:
        return f"{host} asks for a name and a password"
    if isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text:
        return f"{host} does not answer"
    return f"{host} cannot be reached"


_NO_NAME = ("name or service not known", "name resolution", "nodename nor servname", "no address associated")


def waits_s(headers: Mapping[str, str]) -> float | None:
    """By Retry-After in seconds (a date, its other form, is worth nothing between clocks) or RateLimit."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    limit = _RATE_LIMIT.search(headers.get("RateLimit", ""))
    return float(limit[1]) if limit else None


def passing_status(status: int, host: str, headers: Mapping[str, str]) -> Passing | None:
    """The failure behind a status that may change by itself; None for all others."""
    if status == 429:
        return Passing(f"{host} has had too many requests (429)", wait_s=waits_s(headers))
    if status == 408 or status >= 500:
        return Passing(f"{host} has an internal problem ({status})", wait_s=waits_s(headers))
    return None


def content_range(answer: aiohttp.ClientResponse) -> tuple[int, int | None] | None:
    """Where a partial answer begins, and how long the whole file is."""
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    if found is None:
        return None
    return int(found[1]), int(found[3]) if found[3] != "*" else None


def plausible(remote: RemoteFile, name: str) -> RemoteFile:
    """The same; raises DownloadFailed where no file is as large as the server says."""
    size_bytes = remote.size_bytes
    if size_bytes is not None and not 0 <= size_bytes <= FETCH_SIZE_LIMIT_BYTES:
        raise DownloadFailed(
            f"{host_of(remote.url)} gives {name} an impossible size",
            hint="try again later, or another mirror (HF_ENDPOINT)",
        )
    return remote


async def locate_url(session: aiohttp.ClientSession, url: str) -> RemoteFile:
    """What a plain server says of a file: asked for its first byte, since not all of them answer HEAD."""
    host = host_of(url)
    async with get(session, url, {"Range": "bytes=0-0"}) as answer:
        if (passing := passing_status(answer.status, host, answer.headers)) is not None:
            raise passing
        if answer.status in (404, 410):
            raise DownloadFailed(f"there is no {file_of(url)} at {shown(url)} ({answer.status})")
        if answer.status in (401, 403):
            raise DownloadFailed(f"{host} does not give everybody access to {file_of(url)} ({answer.status})")
        if answer.status == 206 and (found := content_range(answer)) is not None:
            size_bytes = found[1]
        elif answer.status == 200:
            size_bytes = answer.content_length
        else:
            raise DownloadFailed(f"{host} answers {answer.status} to the request for {shown(url)}")
        etag = answer.headers.get("ETag")
        strong = etag if etag and not etag.startswith("W/") else None
        mark = strong or answer.headers.get("Last-Modified")
        identity = mark and f"{mark} of {size_bytes}"
        remote = RemoteFile(url=url, identity=identity, if_range=mark, size_bytes=size_bytes)
        return plausible(remote, file_of(url))


# -- in words -------------------------------------------------------------------------------------


def host_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.hostname or url if parts.port is None else f"{parts.hostname}:{parts.port}"


def file_of(url: str) -> str:
    return PurePosixPath(unquote(urlsplit(url).path)).name


def shown(url: str) -> str:
    """Without what may be secret in it: a password, a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"
