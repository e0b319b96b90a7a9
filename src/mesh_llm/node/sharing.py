"""The API and the chat for guests on the local network: a port of its own, and a key for each of them.

Open from the first `share` until `stop` or the node's end, whichever comes first; never by itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import segno

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import SHARE_LIFETIME_S, SHARE_PORT
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.gateway import ports
from mesh_llm.gateway.certificate import certificate, fingerprint
from mesh_llm.gateway.server import Gateway
from mesh_llm.gateway.share_page import SHARE_PATH
from mesh_llm.home import Home
from mesh_llm.node.api_keys import wanted

_HOST_NAME = re.compile(r"[A-Za-z0-9-]{1,63}")
_TESTS_NET = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737), beyond every local network."""


class Sharing:
    def __init__(
        self, gateway: Gateway, home: Home, config: NodeConfig, say: Callable[[str, str], None]
    ) -> None:
        self._gateway = gateway
        self._home = home
        self._config = config
        self._say = say
        self._changing = asyncio.Lock()

    @property
    def url(self) -> str | None:
        """Where guests find it, without a key."""
        at = self._gateway.shared_at
        return None if at is None else _url(*at)

    async def share(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A key for one more guest, and the address that takes it to the chat."""
        keys = self._gateway.keys
        name = asked.get("name") or _free_name({key.name for key in keys.all().values()})
        key = wanted({"lifetime_s": SHARE_LIFETIME_S, **asked, "name": name, "manage": False})
        async with self._changing:
            made, secret = keys.add(replace(key, guest=True), time.time())
            try:
                await self._open(asked.get("listen"), asked.get("port"))
            except BaseException:
                keys.revoke(made.name)
                raise
        url = f"{self.url}{SHARE_PATH}#key={secret}"
        return {
            "name": made.name,
            "key": secret,
            "expires": made.expires,
            "url": url,
            "picture": picture(url),
            "api": f"{self.url}/v1",
            "fingerprint": fingerprint(self._certificate_file),
            "own_certificate": self._config.tls_cert is None,
        }

    async def stop(self, asked: dict[str, Any]) -> dict[str, Any]:
        async with self._changing:
            url = self.url
            await self._gateway.unshare()
            revoked = self._gateway.keys.revoke_guests() if asked.get("revoke") is True else []
        if url is not None:
            self._say("share", f"No longer shared at {url}")
        return {"stopped": url, "revoked": revoked}

    @property
    def _certificate_file(self) -> Path:
        return self._config.tls_cert or self._home.certificate_file

    async def _open(self, listen: object, port: object) -> None:
        listen, port = _asked_address(listen, port)
        if (at := self._gateway.shared_at) is not None:
            if (listen, port) not in ((None, None), at, (None, at[1]), (at[0], None)):
                raise MeshError(
                    f"this node is shared at {_url(*at)} already",
                    hint="end that first: mesh-llm share --stop",
                )
            return
        if not self._gateway.port:
            raise MeshError("the API of this node is not open yet", hint="try again in a moment")
        address = listen or local_address()
        taken = await asyncio.to_thread(ports.bind, address, SHARE_PORT if port is None else port)
        try:
            if self._config.tls_cert is None:
                await asyncio.to_thread(certificate, self._home.certificate_file, _names(address))
            context = ports.tls(self._certificate_file, self._config.tls_key)
            await self._gateway.share(taken, context)
        except BaseException:
            taken.close()
            raise
        self._say("share", f"Shared with the local network at {self.url}")


def picture(url: str) -> str:
    """As a QR code, for a page."""
    return str(segno.make(url, error="l", micro=False).svg_data_uri(scale=4, light="#fff"))


def local_address() -> str:
    """Of this machine, on the local network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            # Sends nothing: for datagrams this only looks up by which address they would leave.
            asking.connect(_TESTS_NET)
            address = str(asking.getsockname()[0])
        except OSError:
            address = ""
    found = ipaddress.ip_address(address or "127.0.0.1")
    if found.is_loopback:
        raise MeshError(
            "this machine is on no local network",
            hint="connect it to one, or name an address: --listen ADDRESS",
        )
    if not found.is_private:
        raise MeshError(
            f"{address} can be reached from the whole internet, not only from a local network",
            hint=f"if that is what you want: --listen {address}",
        )
    return address


def _asked_address(listen: object, port: object) -> tuple[str | None, int | None]:
    if port is not None and (type(port) is not int or not 0 <= port <= 65535):
        raise UsageError("--port is a number between 0 and 65535")
    if listen is None:
        return None, port
    try:
        address = ipaddress.ip_address(str(listen))
    except ValueError:
        raise UsageError(f"--listen {str(listen)[:60]} is not an IP address") from None
    if address.is_unspecified:
        # A guest has to be told one, and the certificate has to name it.
        raise UsageError("--listen takes one address of this machine, such as 192.168.1.7")
    return str(address), port


def _url(address: str, port: int) -> str:
    return f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}"


def _names(address: str) -> list[str]:
    host = socket.gethostname().partition(".")[0]
    return [address, *([host.lower(), f"{host.lower()}.local"] if _HOST_NAME.fullmatch(host) else [])]


def _free_name(taken: set[str]) -> str:
    """guest, guest-2, …"""
    names = (f"guest-{number}" if number > 1 else "guest" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)
