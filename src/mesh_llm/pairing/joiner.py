"""The side that wants in: dials an offer, proves the code, waits for the token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from mesh_llm.errors import JoinRefused, PeerLost
from mesh_llm.pairing import exchange
from mesh_llm.pairing.announcement import FoundMesh
from mesh_llm.pairing.exchange import ALPN
from mesh_llm.pairing.offer import CONVERSATION_S, OPEN_S
from mesh_llm.tasks import task_group
from mesh_llm.transport.endpoint import NetworkConfig, bind, remote_address
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.iroh_library import iroh, message_of


async def pair(
    found: FoundMesh, *, code: str, name: str, bind_ip: str | None, on_proven: Callable[[], None]
) -> str:
    """The token by which this machine joins; `on_proven`: the code was right, and a person is asked now."""
    identity = Identity.from_secret(secrets.token_bytes(32))
    endpoint = await bind(NetworkConfig(identity=identity, bind_ip=bind_ip, no_relay=True, alpn=ALPN))
    try:
        async with asyncio.timeout(CONVERSATION_S) as bound:
            connection = await endpoint.connect(remote_address(found.node, found.address), ALPN)
            async with task_group() as group:
                stream = exchange.stream_in(group, await connection.open_bi())
                await exchange.prove(stream, code=code, name=name, own=identity.id, other=found.node)
                bound.reschedule(asyncio.get_running_loop().time() + OPEN_S)
                on_proven()
                token = await exchange.receive(stream)
            connection.close(0, b"paired")
            return token
    except TimeoutError:
        raise JoinRefused(f"{found.label} does not answer", hint="is the pairing still open there?") from None
    except iroh().IrohError as error:
        raise JoinRefused(
            f"no connection to {found.label}: {message_of(error)}",
            hint="a firewall may keep the machines apart; an invite token works through relays, too",
        ) from None
    except PeerLost as error:
        raise JoinRefused(f"{found.label} ended the pairing: {error.message}") from None
    finally:
        await endpoint.close()
