"""A small program around a real iroh endpoint, to run on this machine or in a network namespace.

    iroh_peer.py answer IP [--relay URL]
        says its id and address, echoes streams, ends with its input
    iroh_peer.py ask IP ID BYTES [--relay URL] [--direct ADDRESS …]
        sends BYTES, says how many came back and over which paths

The relay's token is taken from MESH_LLM_RELAY_TOKEN. Nothing is looked up anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any

from iroh.iroh_ffi import (
    Endpoint,
    EndpointAddr,
    EndpointId,
    EndpointOptions,
    IrohError,
    RelayConfig,
    RelayMap,
    RelayMode,
    preset_minimal,
    uniffi_set_event_loop,
)

ALPN = b"mesh-llm-test/echo"
LIMIT = 1 << 20
CONNECT_S = 30.0


async def bind(ip: str, relay: str | None, *, token: str | None = None, secret: bytes | None = None) -> Any:
    """An endpoint that knows this relay and nothing else."""
    uniffi_set_event_loop(asyncio.get_running_loop())
    mode = RelayMode.disabled()
    if relay is not None:
        relays = RelayMap.empty()
        relays.insert(RelayConfig(url=relay, auth_token=token))
        mode = RelayMode.custom(relays)
    options = EndpointOptions(
        preset=preset_minimal(), bind_addr=f"{ip}:0", alpns=[ALPN], relay_mode=mode, secret_key=secret
    )
    return await Endpoint.bind(options)


async def echo(endpoint: Any) -> None:
    """Answer one connection after the other until the endpoint closes."""
    while (incoming := await endpoint.accept_next()) is not None:
        # Who gives up half-way must not keep the next one from being answered.
        with suppress(IrohError):
            connection = await (await incoming.accept()).connect()
            stream = await connection.accept_bi()
            await stream.send().write_all(await stream.recv().read_to_end(LIMIT))
            await stream.send().finish()
            await connection.closed()


async def ask(
    endpoint: Any, id: bytes, payload: bytes, *, relay: str | None, direct: list[str]
) -> tuple[bytes, list[str]]:
    """What came back, and the kinds of path that exist then, the one in use first."""
    address = EndpointAddr(EndpointId.from_bytes(id), relay, direct)
    connection = await endpoint.connect(address, ALPN)
    stream = await connection.open_bi()
    await stream.send().write_all(payload)
    await stream.send().finish()
    answer = bytes(await stream.recv().read_to_end(LIMIT))
    paths = sorted(connection.paths(), key=lambda path: not path.is_selected)
    connection.close(0, b"")
    return answer, ["relay" if path.is_relay else "direct" for path in paths]


async def _answer(options: argparse.Namespace) -> None:
    endpoint = await bind(options.ip, options.relay, token=os.environ.get("MESH_LLM_RELAY_TOKEN"))
    echoing = asyncio.create_task(echo(endpoint), name="echo")
    if options.relay is not None:
        await endpoint.online()
    line = {"id": endpoint.id().to_bytes().hex(), "direct": endpoint.bound_sockets()}
    print(json.dumps(line), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    echoing.cancel()
    await endpoint.close()


async def _ask(options: argparse.Namespace) -> None:
    endpoint = await bind(options.ip, options.relay, token=os.environ.get("MESH_LLM_RELAY_TOKEN"))
    payload = os.urandom(options.bytes)
    async with asyncio.timeout(CONNECT_S):
        answer, paths = await ask(
            endpoint, bytes.fromhex(options.id), payload, relay=options.relay, direct=options.direct
        )
    print(json.dumps({"echoed": len(answer) if answer == payload else -1, "paths": paths}), flush=True)
    await endpoint.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(required=True)
    answer = verbs.add_parser("answer")
    answer.set_defaults(verb=_answer)
    answer.add_argument("ip")
    asking = verbs.add_parser("ask")
    asking.set_defaults(verb=_ask)
    asking.add_argument("ip")
    asking.add_argument("id")
    asking.add_argument("bytes", type=int)
    asking.add_argument("--direct", nargs="*", default=[])
    for verb in (answer, asking):
        verb.add_argument("--relay")
    options = parser.parse_args()
    asyncio.run(options.verb(options))


if __name__ == "__main__":
    main()
