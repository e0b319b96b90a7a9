"""Figures that a running engine gives about itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import aiohttp

from mesh_llm.defaults import STATUS_ENGINE_S
from mesh_llm.types import StageCounters

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
    return figures_in(text)


def figures_in(text: str) -> dict[str, float]:
    """The engine's series by name."""
    return {name: float(value) for name, value in _SERIES.findall(text)}


@dataclass(slots=True, kw_only=True)
class Rates:
    """Tokens per second of the last answers.

    The engine's own rates start from nothing whenever somebody has read them,
    so they are made here from its sums.
    """

    prompt_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    _sums: dict[str, float] = field(default_factory=dict)

    def read(self, figures: Mapping[str, float]) -> None:
        self.prompt_tok_s = self._rate(
            figures, "prompt_tokens_total", "prompt_seconds_total", self.prompt_tok_s
        )
        self.decode_tok_s = self._rate(
            figures, "tokens_predicted_total", "tokens_predicted_seconds_total", self.decode_tok_s
        )

    def _rate(self, figures: Mapping[str, float], tokens: str, seconds: str, known: float) -> float:
        if tokens not in figures or seconds not in figures:
            return known
        more = figures[tokens] - self._sums.get(tokens, 0.0)
        took_s = figures[seconds] - self._sums.get(seconds, 0.0)
        self._sums |= {tokens: figures[tokens], seconds: figures[seconds]}
        # One token takes no time: the first one is a prompt's.
        return more / took_s if more > 1 and took_s > 0 else known


def paces(
    known: Mapping[str, StageCounters],
    before: Mapping[str, StageCounters],
    after: Mapping[str, StageCounters],
) -> dict[str, StageCounters]:
    """What each worker did between two reports, as far as that says how it works.

    Over its whole life a worker has mostly waited for somebody to ask. So an
    interval in which it did less than half of what it did in the one that is
    known leaves that one in place: the question ended somewhere in it.
    """
    found = dict(known)
    for link, now in after.items():
        # Sums start from nothing when the link is made.
        did = _since(before[link], now) if link in before else now
        if did.runs > 0 and (link not in known or 2 * did.runs >= known[link].runs):
            found[link] = did
    return found


def _since(then: StageCounters, now: StageCounters) -> StageCounters:
    return replace(
        now,
        runs=now.runs - then.runs,
        compute_ns=now.compute_ns - then.compute_ns,
        wait_ns=now.wait_ns - then.wait_ns,
        sent_bytes=now.sent_bytes - then.sent_bytes,
        received_bytes=now.received_bytes - then.received_bytes,
        worker_in_bytes=now.worker_in_bytes - then.worker_in_bytes,
        worker_out_bytes=now.worker_out_bytes - then.worker_out_bytes,
        weight_bytes=now.weight_bytes - then.weight_bytes,
    )
