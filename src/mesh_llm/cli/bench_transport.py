"""`mesh-llm bench transport`: what the links to another node carry, or those of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from mesh_llm.bench.transport import KERNEL, SIZES, Carried, KindFigures, document, measured, on_loopback
from mesh_llm.cli.control import call
from mesh_llm.cli.measuring import Facts, command, run_measurement
from mesh_llm.cli.options import home_option, home_path, json_option
from mesh_llm.cli.results import show
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import UsageError
from mesh_llm.home import Home
from mesh_llm.local import model_names
from mesh_llm.models.facts import model_facts
from mesh_llm.models.names import Here
from mesh_llm.results.document import Document

_PATH = click.Path(path_type=Path, file_okay=False)


@click.command(short_help="links by kind and message size, here or to a node")
@click.argument("node", required=False)
@click.option("--model", metavar="NAME|PATH", help="say what the figures mean for this one, of this disk")
@click.option("--hidden", type=click.IntRange(1, 1 << 20), help="the same for a hidden size  [default: 4096]")
@click.option("--sizes", metavar="BYTES[,BYTES…]", help="of the messages  [default: 64 bytes to 16 MiB]")
@click.option("-o", "--output", "folder", type=_PATH, metavar="FOLDER", help="write the result there, too")
@home_option
@json_option
def transport(
    node: str | None,
    model: str | None,
    hidden: int | None,
    sizes: str | None,
    folder: Path | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """Measure the links to NODE, a member of the running node's mesh; without NODE those of this machine.

    Round trip and throughput of every kind of link, by size of message, idle and while
    another link is busy: about a minute. It sends as much as the links carry, and slows down
    what the mesh computes meanwhile.
    """
    if model is not None and hidden is not None:
        raise UsageError("--model has a hidden size of its own: leave out --hidden")
    found = run_measurement(_measure(node, model, hidden or 4096, _sizes(sizes), Home(home_path(home))))
    show(found, folder=folder, as_json=as_json)


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return SIZES
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        sizes = (0,)
    if sizes[0] < 1 or sizes[-1] > SIZES[-1]:
        raise UsageError(f"--sizes {text}: give bytes between 1 and {SIZES[-1]}", hint="for example 64,16384")
    return sizes


async def _measure(
    node: str | None, model: str | None, hidden: int, sizes: Sequence[int], home: Home
) -> Document:
    facts = Facts()
    carried = Carried(name=f"a hidden size of {hidden}", hidden=hidden)
    if model is not None:
        carried = await _carried(model, home)
    if node is None:
        where, kinds = "on this machine", await on_loopback(sizes, _tell)
    else:
        where, kinds = f"to {node}", await _between(home, node, sizes)
    return document(
        kinds,
        where=where,
        carried=carried,
        command=command(sys.argv[1:]),
        facts=await facts.gather(),
    )


async def _between(home: Home, node: str, sizes: Sequence[int]) -> list[KindFigures]:
    """The running node measures; what this pair does not have is named."""
    why_not = (await call(home, "POST", "/api/measure", {"node": node}))["why_not"]
    found = []
    for kind, reason in why_not.items():
        if reason is not None:
            found.append(KindFigures(kind=kind, missing=reason))
            continue
        found.append(await measured(kind, partial(_ask, home, node, kind), sizes, _tell))
    return [
        *found,
        KindFigures(kind=KERNEL, missing="between nodes, local and tcp links are the kernel's own"),
    ]


async def _ask(home: Home, node: str, kind: str, size: int) -> dict[str, Any]:
    return await call(home, "POST", "/api/measure", {"node": node, "kind": kind, "size": size})


async def _carried(model: str, home: Home) -> Carried:
    named = await model_names.resolve(model, home)
    if not isinstance(named, Here):
        raise UsageError(f"{model} is not on this disk", hint="`mesh-llm models` lists what is")
    described = model_facts(await read_gguf(named.path))
    return Carried(name=described.name, hidden=described.hidden)


def _tell(step: str) -> None:
    print(f"Measuring {step}", file=sys.stderr, flush=True)
