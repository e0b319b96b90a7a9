"""Figures that a running engine gives about itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from mesh_llm.defaults import ENGINE_STAGES_S
from mesh_llm.frozen import frozen
from mesh_llm.types import StageCounters

STATUS_ENGINE_S = 0.5
"""For the engine's own figures; `status` answers without them rather than late."""
STATUS_FRESH_S = 0.5
"""How old the engine's figures may be: however many nodes and pages ask, it is asked twice a second."""


_SERIES = re.compile(r"^llamacpp:(\w+) ([-+\d.eE]+|nan)$", re.MULTILINE)


async def engine_figures(url: str, key: str) -> dict[str, float]:
    """The engine's Prometheus series by name; empty when it is too busy to tell."""
    return figures_in((await _asked(url, key, "/metrics"))[0])


async def _asked(url: str, key: str, *paths: str) -> list[str]:
    """What the engine says at these paths, one after the other; empty what it does not say in time."""
    timeout = aiohttp.ClientTimeout(total=STATUS_ENGINE_S)
    headers = {"Authorization": f"Bearer {key}"}
    texts = []
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for path in paths:
            try:
                async with session.get(url + path) as answer:
                    texts.append(await answer.text(errors="replace") if answer.status == 200 else "")
            except (aiohttp.ClientError, TimeoutError):
                texts.append("")
    return texts


def figures_in(text: str) -> dict[str, float]:
    """The engine's series by name."""
    return {name: float(value) for name, value in _SERIES.findall(text)}


@frozen
class Work:
    """What an engine has done since it was started, answers under way included."""

    generated: float
    prompt: float
    """Tokens that were computed, and not found in a cache."""
    processing: int
    """Answers under way."""


def work_in(figures: Mapping[str, float], slots: str) -> Work | None:
    """From both reports: the sums count the tokens of an answer when it ends, the slots at once."""
    if not figures:
        return None
    under_way = _under_way(slots)
    return Work(
        generated=figures.get("tokens_predicted_total", 0.0) + sum(under_way),
        prompt=figures.get("prompt_tokens_total", 0.0),
        processing=len(under_way) or int(figures.get("requests_processing", 0.0)),
    )


def _under_way(slots: str) -> list[int]:
    """Tokens of each answer that has begun."""
    try:
        listed = json.loads(slots or "[]")
    except ValueError:
        listed = []
    return [_decoded(slot) for slot in listed if isinstance(slot, dict) and slot.get("is_processing")]


def _decoded(slot: Mapping[str, Any]) -> int:
    match slot:
        case {"next_token": [{"n_decoded": int(count)}, *_]} if count >= 0:
            return count
    return 0


class Gauge:
    """The figures of one engine: asked for once, however many want them at the same time."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._asked_at = 0.0
        self.figures: dict[str, float] = {}
        self.work: Work | None = None

    async def read(self, url: str, key: str) -> dict[str, float]:
        """No older than half a second; empty, as is `work` then, when the engine is too busy to tell."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= STATUS_FRESH_S:
                # In this order: an answer that ends in between is missed once, and never counted twice.
                sums, slots = await _asked(url, key, "/metrics", "/slots")
                self.figures = figures_in(sums)
                self.work = work_in(self.figures, slots)
                self._asked_at = time.monotonic()
            return self.figures


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


@frozen
class Flow:
    """Bytes a second over one link, both ways together."""

    bytes_per_s: float = 0.0
    """In the last second in which there were any."""
    peak_bytes_per_s: float = 0.0

    def plus(self, other: Flow) -> Flow:
        return Flow(
            bytes_per_s=self.bytes_per_s + other.bytes_per_s,
            peak_bytes_per_s=self.peak_bytes_per_s + other.peak_bytes_per_s,
        )

    def after(self, grown_bytes: int, seconds: float) -> Flow:
        rate = max(0, grown_bytes) / seconds
        return Flow(bytes_per_s=rate, peak_bytes_per_s=max(rate, self.peak_bytes_per_s))


@frozen
class Flows:
    """Over the links of one worker."""

    host: Flow = Flow()
    """Between it and the engine."""
    following: Flow = Flow()
    """What it pushes to the next worker."""

    def plus(self, other: Flows) -> Flows:
        """Of two engines together."""
        return Flows(host=self.host.plus(other.host), following=self.following.plus(other.following))

    def idle(self) -> Flows:
        """Where no report has come for a while: they come as long as there is something to report."""
        return Flows(
            host=replace(self.host, bytes_per_s=0.0), following=replace(self.following, bytes_per_s=0.0)
        )


def flows(
    known: Mapping[str, Flows],
    before: Mapping[str, StageCounters],
    after: Mapping[str, StageCounters],
    *,
    seconds: float,
) -> dict[str, Flows]:
    """What crossed the links of each worker between two reports, which came `seconds` apart."""
    # After a pause all of it belongs to the last look: the one before that had nothing to report.
    spent_s = seconds if ENGINE_STAGES_S / 2 < seconds < 2 * ENGINE_STAGES_S else ENGINE_STAGES_S
    found = {}
    for link, now in after.items():
        did = _since(before[link], now) if link in before else now
        last = known.get(link, Flows())
        found[link] = Flows(
            host=last.host.after(did.sent_bytes + did.received_bytes, spent_s),
            following=last.following.after(pushed_bytes(did), spent_s),
        )
    return found


def pushed_bytes(counters: StageCounters) -> int:
    """What a worker sent, and not to the host."""
    return max(0, counters.worker_out_bytes - counters.received_bytes)


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
