"""`mesh-llm models`: what is on this disk, whoever brought it, and whether it would run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.inventory import Inventory, Listed, take_stock
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.defaults import USEFUL_CONTEXT
from mesh_llm.home import Home
from mesh_llm.models.stores import LocalModel, Places, Store
from mesh_llm.planning.would_fit import WouldFit
from mesh_llm.status_schema import ServedModelStatus, to_document
from mesh_llm.types import Progress, ProgressSink, State

_HEADERS = ("name", "quant", "size", "layers", "context", "architecture", "where", "fit")
_NUMBERS = (2, 3, 4)
"""Columns that are aligned to the right."""
_INDENT = 2
_GAP = "  "
_CELL_CHARS = 14
"""Of what files say of themselves: no name of an architecture is longer."""
_NOTES = 12
"""Of files that were left out; --json has all."""


@click.command()
@click.option("--fits", is_flag=True, help="list the catalog by what can be run here, best first")
@home_option
@json_option
@debug_option
def models(fits: bool, home: Path | None, as_json: bool, debug: bool) -> None:
    """List every model on this disk: ~/.models, and those of Hugging Face, LM Studio and Ollama.

    Any name in the first column can be given to --model. Whether it fits is shown for
    this machine and, if a node is running on this home, for its mesh; then the models
    that the mesh serves, loads or has at hand are listed, too.
    """
    if fits:
        _show_fitting(Home(home_path(home)), as_json)
        return
    with ExitStack() as ended:
        inventory = asyncio.run(take_stock(Home(home_path(home)), progress=_progress(ended)))
    if as_json:
        click.echo(json.dumps(_document(inventory), indent=2))
    else:
        show(inventory)


def _show_fitting(home: Home, as_json: bool) -> None:
    # Here: the catalog is of no use to a listing of files.
    from mesh_llm.cli.catalog_fit import show_fitting
    from mesh_llm.models import catalog

    asyncio.run(show_fitting(catalog.load(*home.catalog_files), home, as_json=as_json))


def _progress(ended: ExitStack) -> ProgressSink:
    """Drawn from the first step on: who has all headers in the cache does not wait for what draws."""
    drawn: list[ProgressSink] = []

    def show_step(step: Progress) -> None:
        if not drawn:
            from mesh_llm.cli.output import Output

            drawn.append(ended.enter_context(Output()).progress)
        drawn[0](step)

    return show_step


# -- for programs ---------------------------------------------------------------------------------


def _document(inventory: Inventory) -> dict[str, Any]:
    rooms = inventory.rooms
    return {
        "models": [_model(each) for each in inventory.listed],
        "skipped": [
            {"path": str(each.path), "store": each.store, "reason": each.reason} for each in inventory.skipped
        ],
        "stores": _stores(inventory.places),
        "nodes": len(rooms.mesh.nodes) if rooms is not None and rooms.mesh is not None else 1,
        "note": inventory.note or None,
        "served": [{**to_document(each), "state": _state(each)} for each in inventory.served],
        "catalog": list(inventory.catalog),
    }


def _state(model: ServedModelStatus) -> str:
    """In the words of this verb."""
    if model.state == State.SERVING:
        return "served"
    return "at hand" if model.on_demand and model.state == State.WAITING else model.state


def _stores(places: Places) -> dict[str, list[str]]:
    folders = {
        Store.MODELS: (places.models,),
        Store.HUB: (places.hub,),
        Store.LMSTUDIO: places.lmstudio,
        Store.OLLAMA: places.ollama,
    }
    return {store: [str(path) for path in paths] for store, paths in folders.items()}


def _model(listed: Listed) -> dict[str, Any]:
    model, header = listed.model, listed.header
    facts = header.facts if header is not None else None
    told = header.refusal if header is not None else None
    return {
        "name": model.name,
        "also": list(model.also),
        "title": model.title,
        "store": model.store,
        "repo": model.repo or None,
        "path": str(model.path),
        "files": [str(path) for path in model.files],
        "missing": list(model.missing),
        "size_bytes": model.size_bytes,
        "architecture": header.architecture if header is not None else None,
        "quantisation": facts.quantisation if facts is not None else None,
        "layers": len(facts.layers) if facts is not None else None,
        "context": facts.context_trained if facts is not None else None,
        "experts": facts.experts if facts is not None else None,
        "runs": told is None and not model.missing,
        "reason": told.sentence if told is not None else _missing(listed) or None,
        "hint": told.hint if told is not None else None,
        "fit": {"machine": _outlook(listed.here), "mesh": _outlook(listed.mesh)},
    }


def _outlook(fit: WouldFit | None) -> dict[str, Any] | None:
    if fit is None:
        return None
    return {
        "fits": fit.fits,
        "context": fit.context,
        "need_bytes": fit.need_bytes,
        "have_bytes": fit.have_bytes,
        "nodes": fit.nodes,
        "reason": fit.reason,
    }


# -- for people -----------------------------------------------------------------------------------


def show(inventory: Inventory) -> None:
    """As wide as the terminal: one line for each model, or its name on a line of its own."""
    if not inventory.listed:
        click.echo("No models on this disk yet; mesh-llm download lists models to download", err=True)
    else:
        rows = [_row(each) for each in inventory.listed]
        full = [(*row, _origin(each.model)) for row, each in zip(rows, inventory.listed, strict=True)]
        for line in _fitting(rows, full):
            click.echo(line)
    if inventory.served:
        # Here: it brings what draws along, and no other listing waits for that.
        from mesh_llm.cli import tables

        rows, headers = tables.with_priorities(
            inventory.served,
            [_served_row(each) for each in inventory.served],
            ("in the mesh", "state", "context", "slots"),
        )
        click.echo("\n" + "\n".join(_lines([headers, *rows], ())))
    _show_notes(inventory)
    if sys.stderr.isatty():
        names = ", ".join(inventory.catalog)
        click.echo(f"In the catalog: {names}; mesh-llm download NAME brings one here", err=True)


def _served_row(model: ServedModelStatus) -> tuple[str, ...]:
    name = f"{model.name} (default)" if model.default else model.name
    return name, _state(model), _tokens(model.context or 0) if model.context else "", str(model.slots or "")


def _fitting(rows: list[tuple[str, ...]], full: list[tuple[str, ...]]) -> list[str]:
    plain = _lines([_HEADERS, *rows])
    if not sys.stdout.isatty():
        # In a pipe each row is one line: it cuts well with awk.
        return plain
    width = shutil.get_terminal_size().columns
    wide = _lines([(*_HEADERS, "from"), *full])
    for lines in (wide, plain):
        if max(map(len, lines)) <= width:
            return lines
    below = _lines([_HEADERS[1:], *(row[1:] for row in rows)], numbers=[column - 1 for column in _NUMBERS])
    names = [_HEADERS[0], *(row[0] for row in rows)]
    return [line for name, facts in zip(names, below, strict=True) for line in (name, " " * _INDENT + facts)]


def _lines(rows: Sequence[tuple[str, ...]], numbers: Sequence[int] = _NUMBERS) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(listed: Listed) -> tuple[str, ...]:
    model, header = listed.model, listed.header
    facts = header.facts if header is not None else None
    return (
        model.name,
        _cell(facts.quantisation) if facts is not None else "",
        _size(model.size_bytes),
        str(len(facts.layers)) if facts is not None else "",
        _tokens(facts.context_trained) if facts is not None else "",
        _cell(header.architecture) if header is not None else "",
        model.store,
        _fit(listed),
    )


def _origin(model: LocalModel) -> str:
    """Where it came from, or else where it lies; a blob's own name tells nobody anything."""
    return model.repo or _short(model.path.parent if model.store is Store.OLLAMA else model.path)


def _fit(listed: Listed) -> str:
    if listed.model.missing:
        return "files missing"
    if listed.header is not None and listed.header.refusal is not None:
        return "cannot run"
    here, mesh = listed.here, listed.mesh
    if here is None:
        return ""
    if here.fits:
        return "fits" if _is_useful(here, listed) else f"fits, ctx {_tokens(here.context)}"
    if mesh is not None and mesh.fits:
        return "fits the mesh"
    return f"needs {_size(here.need_bytes)}"


def _is_useful(fit: WouldFit, listed: Listed) -> bool:
    facts = listed.header.facts if listed.header is not None else None
    return facts is None or fit.context >= min(USEFUL_CONTEXT, facts.context_trained)


def _show_notes(inventory: Inventory) -> None:
    notes = [note for each in inventory.listed if (note := _note(each))]
    skipped = [f"Not listed: {_short(each.path)} {each.reason}" for each in inventory.skipped]
    if len(skipped) > _NOTES:
        more = len(skipped) - _NOTES
        skipped = [*skipped[:_NOTES], f"Not listed: {more} more; --json names them"]
    for note in [inventory.note, *notes, *skipped]:
        if note:
            click.echo(note, err=True)


def _note(listed: Listed) -> str:
    name, header = listed.model.name, listed.header
    if header is not None and (told := header.refusal) is not None:
        return f"{name}: {told.sentence}; {told.hint}"
    missing = _missing(listed)
    return f"{name}: {missing}" if missing else ""


def _missing(listed: Listed) -> str:
    names = listed.model.missing
    if not names:
        return ""
    count = len(names) + len(listed.model.files)
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    return f"{len(names)} of its {count} files are missing: {shown}"


def _cell(text: str) -> str:
    """What a file says of itself, as it may be shown."""
    clean = "".join(sign if sign.isprintable() else "?" for sign in text)
    return clean if len(clean) <= _CELL_CHARS else f"{clean[: _CELL_CHARS - 1]}…"


def _size(count: int) -> str:
    if count >= 100e9:
        return f"{count / 1e9:.0f} GB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _tokens(count: int) -> str:
    """8192 is 8k, as models' pages have it."""
    return f"{count // 1024}k" if count >= 1024 else str(count)


def _short(path: Path) -> str:
    """Below the home folder with a tilde; printable."""
    text, home = str(path), str(Path.home())
    text = f"~{text[len(home) :]}" if text.startswith(home + os.sep) else text
    return "".join(sign if sign.isprintable() else "?" for sign in text)
