"""The table of docs/design/engine-upgrade.md: python -m tests.support.third_party_table prints it."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path

from mesh_llm.engine import build
from mesh_llm.third_party import AIOHTTP, ENGINE_TEXTS, IROH, EngineSymbol

_CHILD = """\
import dataclasses, json, pathlib, sys
from mesh_llm.engine.library import Engine, MeshLibrary
path = pathlib.Path(sys.argv[1])
Engine.load({"mesh": path})
print(json.dumps([dataclasses.asdict(symbol) for symbol in MeshLibrary(path).engine_symbols()]))
"""


def engine_symbols(library: Path) -> tuple[EngineSymbol, ...]:
    """As the library finds them in the installed engine."""
    said = subprocess.run(
        [sys.executable, "-c", _CHILD, library], check=True, stdout=subprocess.PIPE, timeout=60
    )
    return tuple(EngineSymbol(**symbol) for symbol in json.loads(said.stdout.splitlines()[-1]))


def table(symbols: tuple[EngineSymbol, ...]) -> str:
    rows = ["| what we rely on | for | where it is missing |", "| --- | --- | --- |"]
    for feature, group in groupby(symbols, lambda symbol: symbol.feature):
        known = list(group)
        names = ", ".join(f"`{symbol.name}`{'' if symbol.replaced else '*'}" for symbol in known)
        rows.append(f"| {names} | {feature} | {known[0].without} |")
    for text in ENGINE_TEXTS:
        literals = ", ".join(f"`{literal}`" for literal in text.literals)
        rows.append(f"| {literals} | {text.read_by} | {text.without} |")
    for owner in (*AIOHTTP, *IROH):
        names = ", ".join(f"`{name}`" for name in owner.names)
        rows.append(f"| {names} of `{owner.owner}` | {owner.read_by} | {owner.without} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(engine_symbols(build.at_hand().libraries["mesh"])), end="")
