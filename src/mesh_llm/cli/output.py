"""How things look in a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from mesh_llm.defaults import NODE_LOG_BYTES, NODE_LOG_COUNT, PROGRESS_LINE_S
from mesh_llm.errors import MeshError
from mesh_llm.types import Event, Progress

# `rich` is imported where something is drawn: in a pipe nothing is, and a node starts sooner.
if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_LINE = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Picture(Protocol):
    """What is drawn of a running node where somebody watches: lines go above it, bars into it."""

    def tell(self, text: str) -> None: ...

    def progress(self, step: Progress) -> None: ...


class Output:
    """Events on stdout as they happen; progress on stderr, drawn only where somebody watches."""

    def __init__(self, *, log_format: str = "text") -> None:
        self._json = log_format == "json"
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}
        self.live: Picture | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bars()

    def event(self, event: Event) -> None:
        self._end_bars()
        if self.live is not None:
            self.live.tell(event.text)
        elif self._json:
            print(json.dumps({"time": time.time(), "event": event.kind, "text": event.text}), flush=True)
        else:
            print(event.text, flush=True)

    def note_event(self, event: Event) -> None:
        """For verbs whose stdout is one JSON document."""
        self.note(event.text)

    def note(self, text: str) -> None:
        """For the person at the terminal, beside the events."""
        self._end_bars()
        if self.live is not None and is_terminal(sys.stderr):
            self.live.tell(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, step: Progress) -> None:
        if self.live is not None:
            self.live.progress(step)
        if is_terminal(sys.stderr) and not self._json:
            if self.live is None:
                self._draw(step)
        else:
            self._print_step(step)

    def _draw(self, step: Progress) -> None:
        from rich import progress
        from rich.console import Console

        if self._bars is None:
            self._bars = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[far]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        if step.what not in self._tasks:
            self._tasks[step.what] = self._bars.add_task(step.what, total=None, far="")
        bar = self._tasks[step.what]
        self._bars.update(bar, completed=step.done, total=step.total or None, far=_far(step))
        if 0 < step.total <= step.done:
            self._bars.remove_task(self._tasks.pop(step.what))

    def _print_step(self, step: Progress) -> None:
        """In a pipe: the first step, the last, and one every few seconds."""
        now = time.monotonic()
        finished = step.total > 0 and step.done >= step.total
        if not finished and now - self._last_line.get(step.what, 0.0) < PROGRESS_LINE_S:
            return
        self._last_line[step.what] = now
        share = f" {100 * step.done // step.total} %" if step.total else " …"
        print(f"{step.what}{share}", file=sys.stderr, flush=True)

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks = {}


def _far(step: Progress) -> str:
    if not step.total:
        return ""
    if step.unit == "bytes":
        return f"{step.done / 1e6:.0f}/{step.total / 1e6:.0f} MB"
    return f"{step.done}/{step.total}"


def is_terminal(stream: TextIO | None) -> bool:
    """None is one that was closed before this program began."""
    return stream is not None and stream.isatty()


def print_error(error: MeshError) -> None:
    print(f"Error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"Hint: {error.hint}", file=sys.stderr)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_table(rows: Sequence[tuple[str, ...]], *, headers: tuple[str, ...] = ()) -> None:
    """Aligned columns without a frame. In a pipe each row is one line: it cuts well with awk."""
    if not is_terminal(sys.stdout):
        lines = [headers, *rows] if headers else rows
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(map(str.ljust, line, widths)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=bool(headers), pad_edge=False, header_style="bold")
    for index in range(len(rows[0]) if rows else 0):
        table.add_column(headers[index] if headers else "", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Names of nodes and models are no markup: a bracket in one is a bracket.
    Console(markup=False, emoji=False, highlight=False).print(table)


def set_up_logging(log_file: Path | None, *, debug: bool, log_format: str) -> None:
    """The node's own log: a bounded file in its home; with --debug also on stderr.

    Requests have a file beside it, so that many of them do not push out what happened to the node.
    """
    root, access = logging.getLogger(), logging.getLogger("mesh_llm.access")
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    # Chatty at their debug level, and about nothing of ours.
    for name in ("asyncio", "aiohttp"):
        logging.getLogger(name).setLevel(logging.INFO)
    if log_file is not None:
        access.propagate = False
        _log_to(access, _file(log_file.with_name("access.log")), "%(asctime)s %(message)s", log_format)
        _log_to(root, _file(log_file), _LINE, log_format)
    if debug:
        for logger in (root, *([] if access.propagate else [access])):
            _log_to(logger, logging.StreamHandler(), _LINE, log_format)
    if not root.handlers:
        root.addHandler(logging.NullHandler())


def _file(path: Path) -> logging.Handler:
    from mesh_llm.engine.log_file import PrivateLog

    return PrivateLog(path, maxBytes=NODE_LOG_BYTES, backupCount=NODE_LOG_COUNT, encoding="utf-8")


def _log_to(logger: logging.Logger, handler: logging.Handler, text: str, log_format: str) -> None:
    handler.setFormatter(_JsonFormatter() if log_format == "json" else logging.Formatter(text))
    logger.addHandler(handler)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": record.created, "level": record.levelname, "logger": record.name}
        fields["message"] = record.getMessage()
        # Of a line that is made of fields, each by its name.
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields)
