"""Another node at the other end of a connection, and what it says about whom its requests are for."""

from __future__ import annotations

import math
from typing import Any

from mesh_llm.frozen import frozen

GUEST_CLIENT_CHARACTERS = 64
"""Of the name under which another node's client waits for its turn; they come as 32."""


@frozen
class Guest:
    account: str
    """Whose share of the engine its requests take: the node's, or that of all who came in by one token."""
    epoch: int
    """The plan whose engine it asks."""
    client: str = ""
    """Which of its own clients, in words that mean nothing here."""
    name: str = ""
    """Which of that client's names, likewise."""
    resumed: bool = False
    within_s: float | None = None
    """Both as in `upstream.Turn`."""

    @classmethod
    def of(cls, account: str, header: dict[str, Any]) -> Guest:
        """From the header of a stream; raises `ValueError` where that makes no sense."""
        client, name = header.get("client", ""), header.get("name", "")
        resumed, within_s = header.get("resumed", False), header.get("within_s")
        epoch = header.get("epoch")
        if not (_is_name(client) and _is_name(name) and isinstance(resumed, bool)):
            raise ValueError("no client")
        if not (within_s is None or _is_time(within_s)):
            raise ValueError("no turn")
        if not isinstance(epoch, int) or isinstance(epoch, bool):
            raise ValueError("no plan")
        return cls(account=account, epoch=epoch, client=client, name=name, resumed=resumed, within_s=within_s)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= GUEST_CLIENT_CHARACTERS


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
