"""Downloads as a person watches them: a bar for each file and one for all, or a line now and then."""

from __future__ import annotations

import re
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from mesh_llm.cli.tables import size
from mesh_llm.defaults import PROGRESS_LINE_S
from mesh_llm.types import Progress

_NAME_WIDTH = 30
_BAR_WIDTH = 10
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


class Transfers:
    """On stderr. Steps of several files may come in any order; their names tell them apart."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars: Bars | None = None
        self._tasks: dict[str, tuple[str, TaskID]] = {}
        """By the name of the file: what is being done with it, and its bar."""
        self._all: TaskID | None = None
        self._steps: dict[str, Progress] = {}
        self._line = _Line()

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def progress(self, step: Progress) -> None:
        verb, _, name = step.what.partition(" ")
        before = self._steps.get(name)
        known = before is not None and before.what == step.what
        self._steps[name] = step
        if self._console.is_terminal:
            self._draw(step, verb, name)
        elif (line := self._line.after(step, list(self._steps.values()), new=not known)) is not None:
            print(line, file=sys.stderr, flush=True)

    def _draw(self, step: Progress, verb: str, name: str) -> None:
        if self._bars is None:
            self._bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(_BAR_WIDTH),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        doing, task = self._tasks.get(name, (None, None))
        if task is None or doing != verb:
            if task is not None:
                self._bars.remove_task(task)
            if self._all is not None:  # made anew, so that it stays the last one
                self._bars.remove_task(self._all)
                self._all = None
            # What is here from an earlier run is no speed of this one.
            task = self._bars.add_task(_short(step.what), total=None, completed=step.done)
            self._tasks[name] = verb, task
        self._bars.update(task, completed=step.done, total=step.total or None)
        if len(self._tasks) > 1:
            self._draw_all(self._bars)

    def _draw_all(self, bars: Bars) -> None:
        done, total = _sums(list(self._steps.values()))
        if self._all is None:
            self._all = bars.add_task("all files", total=None, completed=done)
        bars.update(self._all, completed=done, total=total or None)


def _short(what: str) -> str:
    """The verb is clear from the bars; of a long name both ends tell something."""
    name = what.removeprefix("Downloading ").removesuffix(".gguf")
    shard = _SHARD.search(name)
    tail = f" {int(shard[1])}/{int(shard[2])}" if shard else ""
    name, width = name.removesuffix(shard[0] if shard else ""), _NAME_WIDTH - len(tail)
    if len(name) > width:
        head = width // 2
        name = f"{name[:head]}…{name[head + 1 - width :]}"
    return name + tail


class _Line:
    """What to print where nobody watches: what begins, all that comes every few seconds, what is done."""

    def __init__(self) -> None:
        self._printed_at: float | None = None
        self._done_then = 0

    def after(self, step: Progress, steps: list[Progress], *, new: bool) -> str | None:
        now = time.monotonic()
        finished = step.total > 0 and step.done >= step.total
        done = sum(each.done for each in steps if each.unit == step.unit)
        if not new and not finished and self._printed_at is not None:
            if now - self._printed_at < PROGRESS_LINE_S:
                return None
            took_s, came = now - self._printed_at, done - self._done_then
        else:
            took_s, came = 0.0, 0
        if not new or self._printed_at is None:
            self._printed_at, self._done_then = now, done
        text = f"{step.what} {100 * step.done // step.total} %" if step.total else f"{step.what} …"
        if step.unit != "bytes" or not step.total:
            return text
        return f"{text} of {size(step.total)}{_pace(came, took_s, steps)}"


def _sums(steps: list[Progress]) -> tuple[int, int]:
    """Bytes that are here, and bytes that there will be."""
    known = [step for step in steps if step.unit == "bytes" and step.total]
    return sum(step.done for step in known), sum(step.total for step in known)


def _pace(came: int, took_s: float, steps: list[Progress]) -> str:
    """Of all files together; the time that is left is theirs, too."""
    if took_s <= 0 or came <= 0:
        return ""
    done, total = _sums(steps)
    left = total - done
    return f", {size(came / took_s)}/s, {_duration(left / (came / took_s))} left"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
