"""What a plan has shown while it ran, and what follows for the next prediction of it. Pure.

Only reports use it: plans are chosen by what every node knows, and this only the host does.
"""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import replace

from mesh_llm.frozen import frozen
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import Fingerprint, Plan, Prediction

KEPT = 8
"""Of each kind, the latest: a machine changes, and one of them may have been disturbed."""
LEAST_WITHIN = 0.1
"""Texts differ, and so do moments."""
_FARTHEST = 20.0
"""From what was predicted: beyond it something else was measured."""


@frozen
class Experience:
    """Seconds that were measured, as shares of those that were predicted."""

    token: tuple[float, ...] = ()
    first_token: tuple[float, ...] = ()

    def with_token(self, share: float) -> Experience:
        return replace(self, token=_added(self.token, share))

    def with_first_token(self, share: float) -> Experience:
        return replace(self, first_token=_added(self.first_token, share))


def _added(before: tuple[float, ...], share: float) -> tuple[float, ...]:
    if not 1 / _FARTHEST <= share <= _FARTHEST:
        return before
    return (*before, share)[-KEPT:]


def plan_key(plan: Plan, snapshot: Snapshot, fingerprint: Fingerprint) -> str:
    """Equal for plans that should be equally fast: by machines, as nodes come back under other names."""
    parts = [fingerprint, str(plan.head_on_worker)]
    for stage in plan.stages:
        node = snapshot.node(stage.node)
        # By its code, too: a library for the very processor is several times as fast as the wheel's own.
        facts = node.facts if node is not None else None
        machine = (
            (facts.machine, facts.threads, facts.cpu_library) if facts is not None else (stage.node, 0, "")
        )
        parts.append(f"{machine} {stage.device} {stage.first} {stage.last} {stage.node == plan.host}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def corrected(predicted: Prediction, seen: Experience) -> Prediction:
    """By what the same plan has shown; prompts of any length are off by what the first token was off by."""
    if seen.token:
        predicted = replace(
            predicted, tok_s=predicted.tok_s / statistics.median(seen.token), tok_s_within=_within(seen.token)
        )
    if seen.first_token:
        share = statistics.median(seen.first_token)
        predicted = replace(
            predicted,
            first_token_s=predicted.first_token_s * share,
            prompt_tok_s=predicted.prompt_tok_s / share,
            first_token_within=_within(seen.first_token),
        )
    return predicted


def _within(shares: tuple[float, ...]) -> float:
    """Half of them are nearer than the median distance; twice that is where most are."""
    middle = statistics.median(shares)
    distances = [abs(share / middle - 1) for share in shares]
    return min(1.0, max(LEAST_WITHIN, 2 * statistics.median(distances)))
