"""API keys of this node, as its page and its command line ask for them."""

from __future__ import annotations

import time
from typing import Any

from mesh_llm.errors import UsageError
from mesh_llm.gateway.keys import NewKey
from mesh_llm.gateway.server import Gateway
from mesh_llm.report.key_status import key_statuses
from mesh_llm.status_schema import to_document


class ApiKeys:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def listed(self) -> dict[str, Any]:
        return {"keys": to_document(key_statuses(self._gateway.key_usage.reports()))}

    def add(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The only time that the key is told."""
        key, secret = self._gateway.keys.add(wanted(asked), time.time())
        return {"name": key.name, "key": secret, "manage": key.manage, "expires": key.expires}

    def revoke(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"revoked": self._gateway.keys.revoke(str(asked.get("name"))).name}


def wanted(asked: dict[str, Any]) -> NewKey:
    """Checked, whoever asks."""
    lifetime_s, requests, tokens = (
        asked.get(name) for name in ("lifetime_s", "requests_per_day", "tokens_per_day")
    )
    if lifetime_s is not None and type(lifetime_s) not in (int, float):
        raise UsageError("a key's lifetime is a number of seconds")
    for limit in (requests, tokens):
        if limit is not None and type(limit) is not int:
            raise UsageError("a key's limits are whole numbers")
    return NewKey(
        name=str(asked.get("name") or ""),
        manage=asked.get("manage") is True,
        lifetime_s=lifetime_s,
        requests_per_day=requests,
        tokens_per_day=tokens,
    )
