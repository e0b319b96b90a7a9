"""API keys and what was asked with them, as they are shown; nothing of it opens anything."""

from __future__ import annotations

import time
from collections.abc import Iterable

from mesh_llm.gateway.key_usage import KeyReport
from mesh_llm.status_schema import KeyStatus


def key_statuses(reports: Iterable[KeyReport]) -> tuple[KeyStatus, ...]:
    now = time.time()
    return tuple(_key_status(report, now) for report in reports)


def _key_status(report: KeyReport, now: float) -> KeyStatus:
    key, usage = report.key, report.usage
    return KeyStatus(
        name=key.name,
        manage=key.manage,
        guest=key.guest,
        expires=key.expires,
        expired=key.is_expired(now),
        requests_per_day=key.requests_per_day,
        tokens_per_day=key.tokens_per_day,
        requests_today=usage.requests_today,
        prompt_tokens_today=usage.prompt_tokens_today,
        completion_tokens_today=usage.completion_tokens_today,
        requests=usage.requests,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )
