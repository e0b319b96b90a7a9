"""Figures that a running engine gives about itself."""

from __future__ import annotations

import re

import aiohttp

from mesh_llm.defaults import STATUS_ENGINE_S

_SERIES = re.compile(r"^llamacpp:(\w+) ([-+\d.eE]+|nan)$", re.MULTILINE)


async def engine_figures(url: str, key: str) -> dict[str, float]:
    """The engine's Prometheus series by name; empty when it is too busy to tell."""
    timeout = aiohttp.ClientTimeout(total=STATUS_ENGINE_S)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/metrics") as answer,
        ):
            text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return {}
    return {name: float(value) for name, value in _SERIES.findall(text)}
