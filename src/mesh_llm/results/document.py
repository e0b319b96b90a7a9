"""A result: tables, curves, and what they depend on. Everything that is shown or written comes from it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen

FORMAT = 1


@frozen
class ResultTable:
    """Cells are text as people read it; the numbers behind them are figures of the document."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@frozen
class Figure:
    """One measured quantity with every value that was seen, so that two results can be compared."""

    name: str
    unit: str
    values: tuple[float, ...]
    higher_is_better: bool


@frozen
class Series:
    """One curve. `low` and `high` are its spread, where it has one."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@frozen
class Plot:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False


@frozen
class Document:
    """`name` is the bench; `command` repeats it; `facts` are versions, hardware, load, model."""

    name: str
    title: str
    command: str
    facts: dict[str, str]
    tables: tuple[ResultTable, ...] = ()
    plots: tuple[Plot, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()


def to_json(document: Document) -> str:
    return json.dumps({"format": FORMAT, **asdict(document)}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> Document:
    """Raises MeshError for anything but a document that `to_json` wrote."""
    try:
        raw = json.loads(text)
        if raw.pop("format") != FORMAT:
            raise MeshError("this result was written by another version of mesh-llm")
        return Document(
            **_texts(raw, "name", "title", "command"),
            facts={str(key): str(value) for key, value in raw["facts"].items()},
            tables=tuple(_table(each) for each in raw["tables"]),
            plots=tuple(_plot(each) for each in raw["plots"]),
            figures=tuple(_figure(each) for each in raw["figures"]),
            notes=tuple(str(note) for note in raw["notes"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MeshError("this is not a result of mesh-llm bench") from error


def _texts(raw: dict[str, Any], *names: str) -> dict[str, str]:
    return {name: str(raw[name]) for name in names}


def _numbers(raw: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in raw)


def _table(raw: dict[str, Any]) -> ResultTable:
    return ResultTable(
        **_texts(raw, "title", "note"),
        columns=tuple(str(name) for name in raw["columns"]),
        rows=tuple(tuple(str(cell) for cell in row) for row in raw["rows"]),
    )


def _figure(raw: dict[str, Any]) -> Figure:
    return Figure(
        **_texts(raw, "name", "unit"),
        values=_numbers(raw["values"]),
        higher_is_better=bool(raw["higher_is_better"]),
    )


def _plot(raw: dict[str, Any]) -> Plot:
    return Plot(
        **_texts(raw, "title", "x_label", "y_label"),
        series=tuple(_series(each) for each in raw["series"]),
        x_log=bool(raw["x_log"]),
        y_log=bool(raw["y_log"]),
    )


def _series(raw: dict[str, Any]) -> Series:
    return Series(
        label=str(raw["label"]),
        x=_numbers(raw["x"]),
        y=_numbers(raw["y"]),
        low=_numbers(raw["low"]),
        high=_numbers(raw["high"]),
    )
