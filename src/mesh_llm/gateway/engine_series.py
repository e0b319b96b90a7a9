"""The engines' own series, as one text: of several engines of a plan, added up."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TYPE = re.compile(rb"^# TYPE (\S+) (\S+)$")
_SERIES = re.compile(rb"^([^#\s]+) (\S+)$")
_REQUESTS = b"llamacpp:requests_"
"""Gauges that are counts of what goes on at the moment."""


def together(texts: Sequence[bytes]) -> bytes:
    """Counts are added up; of speeds and other measures the highest counts."""
    if len(texts) < 2:
        return b"".join(texts)
    values: dict[bytes, list[float]] = {}
    for text in texts:
        for line in text.splitlines():
            if found := _SERIES.match(line):
                values.setdefault(found[1], []).append(float(found[2]))
    kinds = {found[1]: found[2] for line in texts[0].splitlines() if (found := _TYPE.match(line))}
    lines = []
    for line in texts[0].splitlines():
        if found := _SERIES.match(line):
            name = found[1]
            adds = kinds.get(name) == b"counter" or name.startswith(_REQUESTS)
            line = b"%s %s" % (name, f"{(sum if adds else max)(values[name]):.12g}".encode())
        lines.append(line)
    return b"\n".join(lines) + b"\n"
