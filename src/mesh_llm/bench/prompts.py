"""Prompts that nobody has asked before: each begins with words of its own, and no cache holds it. Pure."""

from __future__ import annotations

_NAMES = (
    "harbour",
    "orchard",
    "library",
    "foundry",
    "station",
    "meadow",
    "bakery",
    "archive",
    "quarry",
    "theatre",
)
_DEEDS = (
    "counted",
    "mended",
    "painted",
    "measured",
    "sorted",
    "carried",
    "weighed",
    "listed",
    "moved",
    "cleaned",
)
_THINGS = (
    "boats",
    "ladders",
    "letters",
    "lanterns",
    "barrels",
    "maps",
    "bells",
    "wheels",
    "ropes",
    "baskets",
)


def unique(run: int, number: int, words: int) -> str:
    """At least so many words; `run` is one measurement, `number` the prompt in it.

    Both are in the first words: what an engine keeps of other prompts has another beginning.
    """
    sentences = [f"Report {run}-{number}."]
    have, line = 2, 0
    while have < words:
        line += 1
        at = run + 31 * number + 7 * line
        name, deed, thing = (
            each[(at // step) % 10] for each, step in ((_NAMES, 1), (_DEEDS, 3), (_THINGS, 9))
        )
        sentences.append(
            f"On day {line} the people of the {name} {deed} {at % 97} {thing} and wrote it down."
        )
        have += 15
    return " ".join(sentences)
