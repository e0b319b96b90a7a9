"""The live view of a node, as lines: from its status to what fits into a terminal. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from mesh_llm.agents.config_files import as_typed
from mesh_llm.cli import tables
from mesh_llm.frozen import frozen
from mesh_llm.status_schema import MemberStatus, PlanStageStatus, Status
from mesh_llm.types import Progress

_STYLES = {"bold": "1", "dim": "2", "good": "32", "busy": "33", "bad": "31", "accent": "36"}
_OF_STATE = {"serving": "good", "failed": "bad"}
_BAR_CELLS = 24
_LEAST_BAR_CELLS = 6
_HINT = "q quits"

Line = list[tuple[str, str]]
"""Texts, each with the name of a style, or with none."""


@frozen
class Size:
    columns: int
    rows: int


@frozen
class LiveState:
    """Everything that is to be seen."""

    status: Status | None = None
    """None until the node answers."""
    progress: Sequence[Progress] = ()
    events: Sequence[str] = ()
    layers: bool = False
    keys: bool = True
    question: str = ""
    """To the person at the keys."""


def frame(live: LiveState, size: Size) -> list[Line]:
    """At most `size.rows` lines, each narrower than `size.columns`; what matters least goes first."""
    width = max(1, size.columns - 1)
    title = _title(live, width)
    asked: list[Line] = [[(live.question, "bold")]] if live.question else []
    details = [*asked, *_details(live.status)]
    bars = [_bar(step, width) for step in live.progress]
    events: list[Line] = [[(text, "dim")] for text in live.events]
    nodes = _nodes(live.status, width)
    layers = _layers(live.status) if live.layers else []
    room = max(1, size.rows) - 1
    bars = bars[: max(0, room)]
    room -= len(bars)
    details = details[:room]
    room -= len(details)
    nodes = _cut(nodes, room, "nodes")
    room -= len(nodes)
    layers = _cut(layers, room, "layers")
    room -= len(layers)
    events = events[-room:] if room > 0 else []
    return [_clipped(line, width) for line in [title, *details, *nodes, *layers, *bars, *events]]


def painted(line: Line, *, colour: bool) -> str:
    if not colour:
        return "".join(text for text, _ in line)
    return "".join(f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style else text for text, style in line)


def width_of(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def rows_taken(lines: Sequence[Line], columns: int) -> int:
    """Of a terminal that was made `columns` wide after they were drawn, and wraps what is longer."""
    return sum(max(1, -(-width_of(line) // columns)) for line in lines)


def _printable(text: str) -> str:
    """Names and reasons come from other machines: nothing in them may move the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _clipped(line: Line, width: int) -> Line:
    line = [(_printable(text), style) for text, style in line]
    if width_of(line) <= width:
        return line
    clipped: Line = []
    room = width - 1
    for text, style in line:
        cells = cell_len(text)
        clipped.append((text if cells <= room else set_cell_size(text, room).rstrip(), style))
        room -= cells
        if room <= 0:
            break
    return [*clipped, ("…", "")]


def _cut(lines: list[Line], room: int, what: str) -> list[Line]:
    """The first of them: the host and the stages stand at the top."""
    if len(lines) <= room:
        return lines
    # Of a table's head alone nobody learns anything.
    if room < 3:
        return []
    return [*lines[: room - 1], [(f"… and {len(lines) - room + 1} more {what}", "dim")]]


def _title(live: LiveState, width: int) -> Line:
    """A line across: what is above it stays, what is below it lives."""
    node = live.status.node if live.status is not None else None
    name, role, state = (node.name, f"{node.role} ", node.state) if node else ("mesh-llm", "", "starting")
    line: Line = [("── ", "dim"), (name, "bold"), (f" {role}", ""), (state, _OF_STATE.get(state, "busy"))]
    hint = f" {_HINT} ──" if live.keys else ""
    gap = width - width_of(line) - 1 - len(hint)
    if gap < 2:
        return line
    return [*line, (" " + "─" * gap + hint, "dim")]


def _details(status: Status | None) -> list[Line]:
    """In the order in which a person asks; cut from below where there is no room."""
    if status is None:
        return []
    plan, engine, model = status.plan, status.engine, status.model
    names = tables.members(status.mesh)
    rows: list[tuple[str, str, str]] = []
    reason = status.node.reason
    if reason and reason != status.node.state:
        rows.append(("why", reason, "busy"))
    if status.node.paused and status.node.paused not in reason:
        rows.append(("paused", status.node.paused, "busy"))
    if engine.state == "ready":
        rows.append(("speed", tables.speed(plan, engine), "accent"))
    if (token := engine.token) and token.parts:
        rows.append(("time", token.sentence, ""))
    if plan is not None:
        rows.append(("plan", tables.how_planned(plan, names), ""))
    if model is not None:
        context = f", {tables.context(model)}" if model.context else ""
        rows.append(("model", tables.model(model) + context, ""))
        # What guesses well or badly is worth a line; that it might guess is not.
        if (draft := model.draft) and draft.drafted:
            rows.append(("drafts", tables.drafts(draft), ""))
    if url := status.api.url:
        rows.append(("api", as_typed(url), ""))
    if url := status.console.url:
        rows.append(("console", as_typed(url), ""))
    widest = max((len(name) for name, _, _ in rows), default=0)
    return [[(f"{name:{widest}}  ", "dim"), (text, style)] for name, text, style in rows]


# -- nodes -----------------------------------------------------------------------------------------

_COLUMNS = ("node", "role", "state", "layers", "memory", "link", "rtt", "traffic")
_LEAST_WANTED = ("traffic", "memory", "state", "role", "link", "rtt")
"""Left out in this order, until the table is narrow enough."""


def _nodes(status: Status | None, width: int) -> list[Line]:
    if status is None or not status.mesh.nodes:
        return []
    nodes = status.mesh.nodes
    names = tables.members(status.mesh)
    stages = status.plan.stages if status.plan is not None else ()
    rows = [_cells(node, names, [each for each in stages if each.node == node.id]) for node in nodes]
    columns = list(_COLUMNS)
    for name in ("", *_LEAST_WANTED):
        columns = [column for column in columns if column != name]
        widths = [max(cell_len(row[column]) for row in [_HEAD, *rows]) for column in columns]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
    head = "  ".join(set_cell_size(column, wide) for column, wide in zip(columns, widths, strict=True))
    lines: list[Line] = [[(head.rstrip(), "dim")]]
    for node, row in zip(nodes, rows, strict=True):
        style = "" if node.standing == "alive" else "bad"
        texts = [set_cell_size(row[column], wide) for column, wide in zip(columns, widths, strict=True)]
        lines.append([("  ".join(texts).rstrip(), style)])
    return lines


_HEAD = {column: column for column in _COLUMNS}


def _cells(node: MemberStatus, names: tables.Names, stages: list[PlanStageStatus]) -> dict[str, str]:
    link = node.link
    lent = f"{tables.size(node.lent_bytes)} of " if node.lent_bytes else ""
    # What a client has free, nobody uses.
    memory = "-" if node.role == "client" else f"{lent}{tables.size(node.memory_bytes)}"
    return {
        "node": names[node.id],
        "role": node.role,
        "state": node.state if node.standing == "alive" else node.standing,
        "layers": ", ".join(tables.layers(stage) for stage in stages) or "-",
        "memory": memory,
        "link": link.kind,
        "rtt": tables.milliseconds(link.rtt_ms) if link.kind != "self" else "-",
        "traffic": tables.throughput(link.bytes_per_s) if link.kind != "self" else "-",
    }


def _layers(status: Status | None) -> list[Line]:
    if status is None or not status.plan:
        return []
    names = tables.members(status.mesh)
    rows = tables.layer_rows(status.plan, names)
    widest = max(len(layer) for layer, _ in [("layer", ""), *rows])
    lines: list[Line] = [[(f"{'layer':{widest}}  node", "dim")]]
    return lines + [[(f"{layer:{widest}}  {name}", "")] for layer, name in rows]


# -- progress --------------------------------------------------------------------------------------


def _bar(step: Progress, width: int) -> Line:
    """What, a bar, and how far; the bar gives way first."""
    if step.total <= 0:
        return [(step.what, "busy"), (" …", "")]
    share = min(1.0, step.done / step.total)
    far = f" {100 * share:3.0f} %"
    if step.unit == "bytes":
        far += f"  {tables.size(step.done)} of {tables.size(step.total)}"
    room = min(_BAR_CELLS, width - cell_len(step.what) - len(far) - 1)
    if room < _LEAST_BAR_CELLS:
        return [(step.what, "busy"), (far, "")]
    full = round(share * room)
    return [(f"{step.what} ", "busy"), ("━" * full, "accent"), ("─" * (room - full), "dim"), (far, "")]
