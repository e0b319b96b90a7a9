"""Prompts by kind of text: how well the next tokens can be guessed depends on it."""

from __future__ import annotations

import json

_LEDGER = (
    "The harbour master kept a ledger of every ship that came in: her name, her cargo, her captain and the "
    "hour of the tide. On the third of May he wrote of the Amelia, with salt and timber, and of a storm "
    "that had kept her out for two days.\n"
)
_PROGRAM = '''def parse_size(text):
    """Bytes from a text such as 10MB."""
    units = {"KB": 1000, "MB": 1000000, "GB": 1000000000}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(text[:-2]) * factor
    return int(text)


def format_size(count):
    """A text such as 10MB from bytes."""
    for unit, factor in (("GB", 1000000000), ("MB", 1000000), ("KB", 1000)):
        if count >= factor:
            return f"{count // factor}{unit}"
    return str(count)
'''
_GOODS = json.dumps(
    [
        {"id": number, "name": name, "price": 3 * number + 2, "in_stock": True, "tags": ["fruit", name[0]]}
        for number, name in enumerate(("apple", "pear", "plum", "fig", "lemon"))
    ],
    indent=1,
)

REPEATING = _LEDGER * 4
PROSE = "Once upon a time there was a sailor who"
CODE = (
    f"Here is a file:\n```python\n{_PROGRAM}```\nHere is the same file with the name text changed to value:\n"
    "```python\ndef parse_size(value):\n"
)
JSON = (
    f"Here is a document:\n```json\n{_GOODS}\n```\nHere is the same document with every price raised by 1:\n"
    "```json\n[\n"
)
