"""`mesh-llm bench compare A B`: what differs beyond noise."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.options import debug_option, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.errors import MeshError
from mesh_llm.results.compare import Comparison, table
from mesh_llm.results.compare import compare as compared
from mesh_llm.results.write import read

_RESULT = click.Path(exists=True, path_type=Path)


@click.command(short_help="what differs beyond noise between two results")
@click.argument("before", metavar="A", type=_RESULT)
@click.argument("after", metavar="B", type=_RESULT)
@click.option("--all", "everything", is_flag=True, help="list what is within noise, too")
@json_option
@debug_option
def compare(before: Path, after: Path, everything: bool, as_json: bool, debug: bool) -> None:
    """Say which figures of two results differ beyond noise.

    A and B are JSON files of mesh-llm bench or mesh-llm lab, or folders (-o) with results of the same names.
    """
    found = {name: compared(read(one), read(other)) for name, (one, other) in _pairs(before, after).items()}
    if as_json:
        print_json({name: _document(each) for name, each in found.items()})
        return
    for name, each in found.items():
        _show(name, each, everything=everything)


def _pairs(before: Path, after: Path) -> dict[str, tuple[Path, Path]]:
    if before.is_dir() != after.is_dir():
        raise MeshError(
            "one of the two is a folder and the other a file", hint="name two files, or two folders"
        )
    if not before.is_dir():
        return {after.stem: (before, after)}
    names = sorted(
        {file.name for file in before.glob("*.json")} & {file.name for file in after.glob("*.json")}
    )
    if not names:
        raise MeshError(f"{before} and {after} have no result of the same name")
    return {Path(name).stem: (before / name, after / name) for name in names}


def _document(found: Comparison) -> dict[str, Any]:
    return {
        "differ": len(found.beyond_noise),
        "changes": [{**asdict(each), "ratio": each.ratio} for each in found.changes],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "facts": [{"name": name, "before": old, "after": new} for name, old, new in found.facts],
    }


def _show(name: str, found: Comparison, *, everything: bool) -> None:
    shown = table(found.changes if everything else found.beyond_noise)
    count = len(found.beyond_noise)
    print(f"{name}: {count or 'none'} of {len(found.changes)} figures differ beyond noise")
    if shown.rows:
        print_table(shown.rows, headers=shown.columns)
        print(shown.note)
    for side, names in (("A", found.only_before), ("B", found.only_after)):
        if names:
            print(f"Only in {side}: {', '.join(names)}")
    if found.facts:
        print_table([(fact, old, new) for fact, old, new in found.facts], headers=("differs", "A", "B"))
