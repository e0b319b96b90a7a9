"""Curves as pictures, where matplotlib is installed."""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mesh_llm.results.document import Plot, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOW_TO_GET = "There are no plots: matplotlib is not installed; pip install 'mesh-llm[plots]'"

_INK = "#404142"
"""Text and lines that become the reader's own colour; no curve has it."""
_COLOURS = ("#2f6fde", "#d9622b", "#1d9a6c", "#b04fb8", "#8a7a1d", "#4a9ab5", "#c23b5e", "#777777")
"""Between light and dark: each can be told from white and from black, and from the others."""
_LINES = ("-", "--", ":", "-.")
_MARKS = "osD^vP*X"
_SIZE_INCHES = (7.0, 4.0)
_PNG_DOTS = 150
_STANDALONE = f"<style>svg{{color:{_INK}}}@media (prefers-color-scheme: dark){{svg{{color:#d8dade}}}}</style>"


def available() -> bool:
    return find_spec("matplotlib") is not None


def svg(plot: Plot, number: int, *, inline: bool = False) -> str:
    """The same text for the same plot. `inline`: for a page with several of them and its own text colour."""
    text = _drawn(plot, number, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    # Nothing refers to groups, and their ids would be those of the next picture on the page.
    text = re.sub(r'<g id="[^"]*"', "<g", text).replace(_INK, "currentColor")
    # The size in points goes: the page decides, and the view box keeps the shape.
    text = re.sub(r'(<svg [^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    text = re.sub(r'(<svg [^>]*?) (?:width|height)="[^"]*pt"', r"\1", text)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(plot.title)}" ', 1)
    if inline:
        return text[text.index("<svg ") :]
    head = f"<!-- {digest(plot)} -->{_STANDALONE}"
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + head, text, count=1)


def digest(plot: Plot) -> str:
    """Stands in each picture: whether it shows these values can be told without drawing it anew."""
    return "plot " + hashlib.sha256(json.dumps(asdict(plot)).encode()).hexdigest()


def png(plot: Plot, number: int) -> bytes:
    return _drawn(plot, number, "png")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _drawn(plot: Plot, number: int, kind: str) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    # Names of clip paths are drawn from the salt: those of two pictures on one page must differ.
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"mesh-llm {number}",
        "font.family": "sans-serif",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        _draw(figure.add_subplot(), plot)
        out = io.BytesIO()
        if kind == "svg":
            figure.savefig(out, format=kind, transparent=True, metadata={"Date": None})
        else:
            figure.savefig(out, format=kind, dpi=_PNG_DOTS)
    return out.getvalue()


def _draw(axes: Axes, plot: Plot) -> None:
    for number, series in enumerate(plot.series):
        _curve(axes, series, number)
    axes.set_title(plot.title, color=_INK)
    axes.set_xlabel(plot.x_label, color=_INK)
    axes.set_ylabel(plot.y_label, color=_INK)
    axes.tick_params(which="both", colors=_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    if plot.x_log:
        _whole_marks(axes, plot)
    if plot.y_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25, color=_INK)
    if len(plot.series) > 1:
        axes.legend(frameon=False, labelcolor=_INK)


def _curve(axes: Axes, series: Series, number: int) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    # Not by colour alone: some readers see few of them, and some printers none.
    style, mark = _LINES[number % len(_LINES)], _MARKS[number % len(_MARKS)]
    axes.plot(
        series.x, series.y, label=series.label, color=colour, linestyle=style, marker=mark, markersize=5
    )
    if series.low and series.high:
        axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _whole_marks(axes: Axes, plot: Plot) -> None:
    """Where the points are: prompts and streams double, and nobody reads 10 to the power of 2.1."""
    axes.set_xscale("log", base=2)
    found = sorted({x for series in plot.series for x in series.x})
    axes.set_xticks(found, [f"{x:g}" for x in found])
