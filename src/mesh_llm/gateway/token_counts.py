"""How many tokens a prompt and an answer had, as an engine's answer tells them in any dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FIGURE = re.compile(
    rb'"(prompt_tokens|tokens_evaluated|input_tokens|cache_read_input_tokens|prompt_n|cache_n'
    rb'|completion_tokens|output_tokens|tokens_predicted|predicted_n)"\s*:\s*([0-9]{1,9})'
)
_PROMPT = (
    ("prompt_tokens",),
    ("tokens_evaluated",),
    ("input_tokens", "cache_read_input_tokens"),
    ("prompt_n", "cache_n"),
)
_ANSWER = (("completion_tokens",), ("output_tokens",), ("tokens_predicted",), ("predicted_n",))


def tokens_in(parts: Iterable[bytes]) -> tuple[int | None, int | None]:
    """Of the prompt and of the answer; None where it is not told.

    What a model writes cannot pass for it: in a JSON text quotation marks are escaped.
    """
    found: dict[str, int] = {}
    for part in parts:
        for name, number in _FIGURE.findall(part):
            found[name.decode()] = max(found.get(name.decode(), 0), int(number))
    return _first(_PROMPT, found), _first(_ANSWER, found)


def _first(choices: Iterable[tuple[str, ...]], found: dict[str, int]) -> int | None:
    told = (sum(found.get(name, 0) for name in names) for names in choices if names[0] in found)
    return next(told, None)
