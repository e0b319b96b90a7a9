"""The model hub, as `huggingface_hub` knows it: files, their sizes and hashes, tokens, mirrors, refusals.

Everything but the bytes comes from that library, and with it a person's own
settings: HF_TOKEN and the token of `hf auth login`, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_ETAG_TIMEOUT. It is imported when a hub is first asked: that takes a third
of a second. Its calls block, so each has a thread of its own, which nobody waits
for once it is no longer wanted.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from mesh_llm import __version__
from mesh_llm.download.http import (
    Passing,
    RemoteFile,
    Unreachable,
    answered,
    cannot_reach,
    check_redirect,
    host_of,
    passing_status,
    plausible,
    proxy_for,
    seconds,
    unusable_proxy,
)
from mesh_llm.errors import DownloadFailed, MeshError
from mesh_llm.frozen import frozen
from mesh_llm.models.catalog import (
    CatalogEntry,
    HubName,
    HubSource,
    file_count,
    is_address,
    is_model_file,
    quantisation_of,
    stem_of,
    unlisted,
)

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

HUB_ANSWER_S = 15.0
"""For a list of files: the largest repositories have thousands."""


T = TypeVar("T")

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4_1", "Q5_K_M", "Q4_K_XL", "UD-Q4_K_XL", "MXFP4", "Q8_0")
"""Of a repository's files, where none was named: what most people run, then what is nearest to it."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/(?:resolve|blob)/([^/]+)/(.+)")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.I)


def check() -> None:
    """That a hub can be asked at all. A lite client has no use for the library, and comes without it."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DownloadFailed(
            "downloading models needs huggingface_hub, which is not installed",
            hint="pip install 'mesh-llm[engine]'",
        )
    # Here: the library would not even let itself be imported.
    mirror = os.environ.get("HF_ENDPOINT")
    if mirror is not None and not is_address(mirror):
        raise DownloadFailed(
            f"HF_ENDPOINT is {mirror or 'empty'}, which is not a URL",
            hint="set it to a URL such as https://huggingface.co",
        )
    try:
        endpoint()
    except ValueError as error:
        raise DownloadFailed(
            f"a variable of huggingface_hub has a value that it does not take: {error}",
            hint="env | grep ^HF_ shows them; numbers are whole ones",
        ) from None


def endpoint() -> str:
    """The hub's address, or the mirror's that HF_ENDPOINT names."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def trust() -> ssl.SSLContext:
    """Whom the library trusts: metadata and bytes must not differ in it."""
    import httpx2

    return httpx2.create_ssl_context()


def source_of(url: str) -> HubSource | None:
    """A link to a file as the hub's pages give it: its token, hash and size come with it."""
    base = endpoint()
    if not url.startswith(f"{base}/"):
        return None
    found = _RESOLVE.fullmatch(url[len(base) :].split("?")[0].split("#")[0])
    if found is None:
        return None
    return HubSource(repo=found[1], revision=unquote(found[2]), files=(unquote(found[3]),))


async def locate(source: HubSource, file: str) -> RemoteFile:
    """Where `file` is now. Raises Passing, or DownloadFailed with a sentence that names it."""

    def ask() -> RemoteFile:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(source.repo, file, revision=source.revision)
        found = get_hf_file_metadata(url, library_name="mesh-llm", library_version=__version__)
        # A token is for the hub alone: its redirects lead to storage that must not see it.
        token = build_hf_headers().get("authorization")
        own = token is not None and _is_own(found.location, url)
        etag = found.etag
        return RemoteFile(
            url=found.location,
            headers={"Authorization": token} if own and token else {},
            identity=etag,
            size_bytes=found.size,
            sha256=etag if etag and _SHA256.fullmatch(etag) else None,
        )

    remote = await _asked(ask, repo=source.repo, revision=source.revision, file=file)
    return plausible(remote, PurePosixPath(file).name)


def _is_own(location: str, url: str) -> bool:
    """Whether the hub itself gives it: by the same scheme, and without a password of its own in it."""
    where = urlsplit(location)
    same = (where.scheme, host_of(location)) == (urlsplit(url).scheme, host_of(url))
    return same and where.username is None


# -- names ----------------------------------------------------------------------------------------


@frozen
class _Variant:
    """One model of a repository: a file, or all shards of one."""

    files: tuple[str, ...]
    sizes: tuple[int, ...]
    sha256: tuple[str, ...]

    @property
    def stem(self) -> str:
        return stem_of(self.files[0].rsplit("/", 1)[-1])

    @property
    def quantisation(self) -> str:
        return quantisation_of(self.stem)


async def resolve(name: HubName) -> CatalogEntry:
    """Which files `hf:OWNER/REPO[:FILE|QUANT]` means, with their sizes and hashes."""
    check()

    def ask() -> list[Any]:
        from huggingface_hub import HfApi

        info = HfApi(library_name="mesh-llm", library_version=__version__).model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=HUB_ANSWER_S
        )
        return list(info.siblings or [])

    listed = await answered(str(name), lambda: _asked(ask, repo=name.repo, revision=name.revision, file=None))
    variants = _variants(listed)
    if not variants:
        raise DownloadFailed(
            f"{name.repo} has no GGUF file",
            hint="look for a repository of the same model with GGUF in its name",
        )
    chosen = _choose(name, variants)
    if (count := file_count(chosen.files[0])) != len(chosen.files):
        raise DownloadFailed(
            f"{name.repo} has {len(chosen.files)} of the {count} files of {chosen.stem}",
            hint="look for another repository of the same model",
        )
    source = HubSource(repo=name.repo, files=chosen.files, revision=name.revision)
    return replace(unlisted(source), size_bytes=sum(chosen.sizes), sha256=chosen.sha256)


def _variants(listed: Sequence[Any]) -> list[_Variant]:
    groups: dict[str, list[Any]] = {}
    for file in listed:
        name = str(file.rfilename)
        # A projector belongs to a model, and is none.
        if is_model_file(name) and "mmproj" not in name.rsplit("/", 1)[-1].lower():
            # By how many there are, too: a model may have been cut anew.
            groups.setdefault(_SHARD.sub(r"-of-\2", name), []).append(file)
    variants = []
    for files in groups.values():
        files.sort(key=lambda file: str(file.rfilename))
        hashes = [str(file.lfs.sha256) for file in files if file.lfs is not None]
        variants.append(
            _Variant(
                files=tuple(file.rfilename for file in files),
                sizes=tuple(file.size or 0 for file in files),
                sha256=tuple(hashes) if len(hashes) == len(files) else (),
            )
        )
    return variants


def _choose(name: HubName, variants: list[_Variant]) -> _Variant:
    wanted = name.wanted
    if wanted is None:
        found = variants if len(variants) == 1 else _preferred(variants)
    elif wanted.lower().endswith(".gguf"):
        found = [variant for variant in variants if wanted in variant.files]
    else:
        key = wanted.casefold()
        found = [v for v in variants if v.quantisation.casefold() == key] or [
            v for v in variants if v.stem.casefold() == key
        ]
    if len(found) == 1:
        return found[0]
    kinds = list(dict.fromkeys(variant.quantisation or variant.files[0] for variant in variants))
    if len(found) > 1:
        raise DownloadFailed(
            f"{wanted or 'it'} means {len(found)} files of {name.repo}",
            hint=f"name one: {', '.join(variant.files[0] for variant in found[:8])}",
        )
    what = f"no {wanted}" if wanted else "none of the usual quantisations"
    raise DownloadFailed(f"{name.repo} has {what}", hint=f"it has {', '.join(kinds[:16])}")


def _preferred(variants: list[_Variant]) -> list[_Variant]:
    for kind in PREFERRED:
        if found := [variant for variant in variants if variant.quantisation == kind]:
            return found[:1]
    return []


# -- asking ---------------------------------------------------------------------------------------


async def _asked(work: Callable[[], T], *, repo: str, revision: str, file: str | None) -> T:
    """What the library answers; its exceptions as Passing, or as sentences."""
    try:
        # Names that nobody resolves are beyond the library's own bounds.
        async with asyncio.timeout(max(HUB_ANSWER_S, 2 * seconds("HF_HUB_ETAG_TIMEOUT", 0.0))):
            return await _in_a_thread(work)
    except MeshError:
        raise
    except Exception as error:
        raise _explained(error, repo=repo, revision=revision, file=file) from error


async def _in_a_thread(work: Callable[[], T]) -> T:
    """Nobody waits for the thread when this is cancelled; the process may end without it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            _keep_to_the_point()
            proxy_for(endpoint())
            _guard_redirects()
            result = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return await future


def _keep_to_the_point() -> None:
    """No telemetry, which would cost a request before the first one; what it would log is said here."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    if not os.environ.keys() & {"HF_HUB_VERBOSITY", "HF_DEBUG"}:
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def _guard_redirects() -> None:
    """The library follows any redirect, and takes any address of a file: both are checked as ours are."""
    from huggingface_hub import get_session

    client = get_session()
    if _check_answer not in client.event_hooks["response"]:
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}


def _check_answer(answer: httpx2.Response) -> None:
    if answer.has_redirect_location:
        check_redirect(str(answer.request.url), answer.headers["Location"])


def _explained(error: Exception, *, repo: str, revision: str, file: str | None) -> Exception:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    host = host_of(endpoint())
    if isinstance(error, TimeoutError):
        return Unreachable(f"{host} does not answer")
    if isinstance(error, OfflineModeIsEnabled):
        return DownloadFailed(
            f"{repo} is not downloaded: HF_HUB_OFFLINE is set, which keeps this machine away from {host}",
            hint="unset HF_HUB_OFFLINE, or name a model that is here (mesh-llm models)",
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(error, host=host, repo=repo, revision=revision, file=file)
    if isinstance(error, HFValidationError):
        return DownloadFailed(f"{repo} is not the name of a repository", hint="write it as OWNER/NAME")
    if isinstance(error, UnicodeEncodeError | httpx2.LocalProtocolError):
        return DownloadFailed("HF_TOKEN has characters that no token has", hint="set it again, or unset it")
    if isinstance(error, ImportError) and "socks" in str(error).lower():
        return unusable_proxy("socks")
    if isinstance(error, httpx2.ConnectError | httpx2.TimeoutException | httpx2.ProxyError):
        return Unreachable(cannot_reach(endpoint(), error))
    if isinstance(error, httpx2.TransportError):
        return Passing(f"the connection to {host} was lost")
    return DownloadFailed(f"{host} sent an invalid answer about {repo} ({type(error).__name__})")


def _refused(error: HfHubHTTPError, *, host: str, repo: str, revision: str, file: str | None) -> Exception:
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RevisionNotFoundError

    status, headers = error.response.status_code, error.response.headers
    if (passing := passing_status(status, host, headers)) is not None:
        return passing
    if isinstance(error, GatedRepoError) or status in (401, 403):
        return _not_for_everybody(status, host=host, repo=repo, gated=isinstance(error, GatedRepoError))
    if isinstance(error, RevisionNotFoundError):
        return DownloadFailed(f"{repo} on {host} has no revision {revision}")
    if isinstance(error, EntryNotFoundError) or (status == 404 and file and _says_entry(error)):
        return DownloadFailed(
            f"{repo} on {host} has no file {file}", hint=f"see {endpoint()}/{repo}/tree/{revision}"
        )
    if status == 404:
        where = f" (asked for {file})" if file else ""
        return DownloadFailed(f"there is no {repo} on {host}{where}", hint="check its spelling on its page")
    return DownloadFailed(f"{host} answers {status} to the question about {repo}")


def _says_entry(error: HfHubHTTPError) -> bool:
    return "entry" in (error.server_message or "").lower()


def _not_for_everybody(status: int, *, host: str, repo: str, gated: bool) -> DownloadFailed:
    from huggingface_hub import get_token

    page = f"{endpoint()}/{repo}"
    if get_token():
        return DownloadFailed(
            f"{host} does not give the account of this HF_TOKEN access to {repo} ({status})",
            hint=f"accept its licence at {page} with that account, or set another HF_TOKEN",
        )
    what = (
        "is only for accounts that have accepted its licence"
        if gated
        else "is private, gated, or does not exist"
    )
    return DownloadFailed(
        f"{repo} on {host} {what} ({status})",
        hint=f"accept the licence at {page}, and set HF_TOKEN to a token of that account",
    )
