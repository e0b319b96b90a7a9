"""What plans have shown while this node hosted them, kept in its home for the next prediction."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_llm.home import write_private
from mesh_llm.planning.experience import KEPT, Experience

log = logging.getLogger(__name__)

_PLANS = 64
"""Those that ran last."""
_FILE_BYTES = 64 << 10


class ExperienceFile:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._plans = _read(file)

    def of(self, key: str) -> Experience:
        return self._plans.get(key, Experience())

    def learn(self, key: str, seen: Experience) -> None:
        """If it can be kept: without it, the next prediction is that of a plan that never ran."""
        if seen == self._plans.pop(key, Experience()):
            self._plans[key] = seen
            return
        self._plans = dict([*self._plans.items(), (key, seen)][-_PLANS:])
        try:
            write_private(self._file, json.dumps({"plans": _document(self._plans)}))
        except OSError as error:
            log.warning("experience not kept file=%s cause=%s", self._file, error.strerror)


def _document(plans: Mapping[str, Experience]) -> dict[str, Any]:
    return {
        key: {"token": list(seen.token), "first_token": list(seen.first_token)} for key, seen in plans.items()
    }


def _read(file: Path) -> dict[str, Experience]:
    """What is not as it should be counts as not there."""
    try:
        with file.open("rb") as stream:
            document = json.loads(stream.read(_FILE_BYTES))
    except (OSError, ValueError):
        return {}
    plans = document.get("plans") if isinstance(document, dict) else None
    if not isinstance(plans, dict):
        return {}
    return {key: _parsed(seen) for key, seen in list(plans.items())[-_PLANS:]}


def _parsed(document: Any) -> Experience:
    seen = Experience()
    if not isinstance(document, dict):
        return seen
    for share in _shares(document.get("token")):
        seen = seen.with_token(share)
    for share in _shares(document.get("first_token")):
        seen = seen.with_first_token(share)
    return seen


def _shares(values: Any) -> list[float]:
    found = values[-KEPT:] if isinstance(values, list) else []
    return [value for value in found if isinstance(value, float)]
