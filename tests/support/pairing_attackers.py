"""Programs that attack a pairing from another machine of its network.

pairing_attackers.py listen FILE
    writes every frame that passes this machine to FILE, until it is ended
pairing_attackers.py between LABEL OFFER
    announces itself as LABEL, and passes on whatever is said between whoever comes and OFFER;
    says "ready", and at the end of each conversation what it has read, as hexadecimal digits
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from mesh_llm.pairing.announcement import announced, find
from mesh_llm.pairing.exchange import ALPN
from mesh_llm.transport.endpoint import NetworkConfig, address_of, bind, remote_address
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.iroh_library import iroh

ALL_FRAMES = 0x0003


def listen(path: str) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES)) as wire:
        print("ready", flush=True)
        with Path(path).open("wb", buffering=0) as file:
            while True:
                file.write(wire.recv(65535))


async def between(label: str, target: str) -> None:
    [offer] = [each for each in await find(within_s=15, ip=None, label=target) if each.label == target]
    config = NetworkConfig(identity=Identity.from_secret(secrets.token_bytes(32)), no_relay=True, alpn=ALPN)
    endpoint = await bind(config)
    direct = address_of(endpoint, config).direct
    async with announced(label, config.identity.id, direct, ip=None):
        print("ready", flush=True)
        while (incoming := await endpoint.accept_next()) is not None:
            near = await (await incoming.accept()).connect()
            far = await endpoint.connect(remote_address(offer.node, offer.address), ALPN)
            one, other = await near.accept_bi(), await far.open_bi()
            heard = bytearray()
            await asyncio.gather(_pass_on(one, other, heard), _pass_on(other, one, heard))
            print(heard.hex(), flush=True)


async def _pass_on(source: Any, target: Any, heard: bytearray) -> None:
    with contextlib.suppress(iroh().IrohError):
        while data := await source.recv().read(4096):
            heard += data
            await target.send().write_all(data)
        await target.send().finish()


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2])
    else:
        asyncio.run(between(sys.argv[2], sys.argv[3]))
