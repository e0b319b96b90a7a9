"""What was asked with each API key, today and in all; and that it stays within its limits.

A day is one of UTC. Answers under way count as far as they have come, so that many at once do not get
past a limit that one after the other would meet; the one that reaches a limit is finished.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mesh_llm.frozen import frozen
from mesh_llm.gateway import api_errors
from mesh_llm.gateway.keys import NODE_KEY, ApiKey, Keys
from mesh_llm.gateway.metrics import Exchange
from mesh_llm.home import write_private

KEY_USAGE_WRITE_S = 2.0
"""A node that is killed forgets so much of what was asked."""
_DAY_S = 86400

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class KeyCounts:
    day: int = 0
    """Which one `…_today` are of, counted from 1970."""
    requests_today: int = 0
    prompt_tokens_today: int = 0
    completion_tokens_today: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def on(self, now: float) -> KeyCounts:
        """The same, on that day."""
        if self.day != (today := int(now // _DAY_S)):
            self.day = today
            self.requests_today = self.prompt_tokens_today = self.completion_tokens_today = 0
        return self

    def add(self, *, requests: int = 0, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        self.requests_today += requests
        self.requests += requests
        self.prompt_tokens_today += prompt_tokens
        self.prompt_tokens += prompt_tokens
        self.completion_tokens_today += completion_tokens
        self.completion_tokens += completion_tokens


@frozen
class KeyReport:
    """A key and what was asked with it; nothing of it is secret."""

    key: ApiKey
    usage: KeyCounts


class KeyUsage:
    """`file` None: it is forgotten with the node."""

    def __init__(self, keys: Keys, file: Path | None) -> None:
        self._keys = keys
        self._file = file
        self._usage = _read(file)
        self._open: dict[Exchange, str] = {}
        self._is_written = True
        self._writing = threading.Lock()

    def begin(self, key: ApiKey, exchange: Exchange) -> None:
        """One more request; raises where that would be too many."""
        now = time.time()
        usage = self._usage.setdefault(key.id, KeyCounts()).on(now)
        retry_s = max(1, _DAY_S - int(now) % _DAY_S)
        if key.requests_per_day is not None and usage.requests_today >= key.requests_per_day:
            raise api_errors.over_limit(key.name, "requests", key.requests_per_day, retry_s)
        tokens = usage.prompt_tokens_today + usage.completion_tokens_today + self._under_way(key.id)
        if key.tokens_per_day is not None and tokens >= key.tokens_per_day:
            raise api_errors.over_limit(key.name, "tokens", key.tokens_per_day, retry_s)
        usage.add(requests=1)
        exchange.key = key.name
        self._open[exchange] = key.id
        self._is_written = False

    def end(self, exchange: Exchange) -> None:
        id = self._open.pop(exchange, None)
        if id is not None:
            prompt, answer = exchange.tokens()
            usage = self._usage.setdefault(id, KeyCounts()).on(time.time())
            usage.add(prompt_tokens=prompt, completion_tokens=answer)
            self._is_written = False

    def _under_way(self, id: str) -> int:
        return sum(sum(exchange.tokens()) for exchange, of in self._open.items() if of == id)

    def reports(self) -> list[KeyReport]:
        """All keys, by name; that of --api-key once it was used."""
        now = time.time()
        keys = {key.id: key for key in sorted(self._keys.all().values(), key=lambda key: key.name)}
        if NODE_KEY in self._usage:
            keys = {NODE_KEY: OWN, **keys}
        return [
            KeyReport(key=key, usage=self._usage.get(id, KeyCounts()).on(now)) for id, key in keys.items()
        ]

    async def keep(self) -> None:
        """Write it down now and then; returns only by being cancelled."""
        while True:
            await asyncio.sleep(KEY_USAGE_WRITE_S)
            await self.write()

    async def write(self) -> None:
        """What has changed; keys that are revoked are forgotten."""
        if self._is_written or self._file is None:
            return
        self._is_written = True
        # Not in the thread: requests would be let in by the old keys while it reads the new ones.
        known = {NODE_KEY, *self._keys.all(), *self._open.values()}
        document = {id: asdict(usage) for id, usage in self._usage.items() if id in known}
        try:
            await asyncio.to_thread(self._put, self._file, json.dumps(document))
        except OSError as error:
            self._is_written = False
            log.warning("the usage of API keys is not written reason=%s", error.strerror)
        except asyncio.CancelledError:
            # The thread may not have begun.
            self._is_written = False
            raise

    def _put(self, file: Path, text: str) -> None:
        # A thread goes on when its caller is cancelled, and the last write comes after that.
        with self._writing:
            write_private(file, text)


OWN = ApiKey(id=NODE_KEY, name=NODE_KEY, salt="", digest="", manage=True)
"""The key of --api-key, as far as its usage goes."""


def _read(file: Path | None) -> dict[str, KeyCounts]:
    try:
        document = json.loads(file.read_text()) if file is not None else {}
        return {id: _usage(entry) for id, entry in document.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        log.warning("the usage of API keys cannot be read; it is counted from now on file=%s", file)
        return {}


def _usage(entry: Mapping[str, Any]) -> KeyCounts:
    return KeyCounts(**{each.name: int(entry[each.name]) for each in fields(KeyCounts)})
