"""`mesh-llm logs`: the end of a node's logs, and what is added to them."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

import click

from mesh_llm.cli.control import running_home
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.sanitise import clean

NAMES = ("node", "engine", "access")
USUAL = ("node", "engine")
"""Without a name: a line for each request is for those who ask for it."""
FOLLOW_S = 0.25
"""Between two looks at the files."""
_LINE_CHARS = 64 << 10
_READ_BYTES = 1 << 20


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[node|engine|access]...")
@click.option("-f", "--follow", is_flag=True, help="go on with new lines until Ctrl-C")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="last lines of each log"
)
@home_option
@json_option
@debug_option
def logs(
    names: Sequence[str], follow: bool, lines: int, home: Path | None, as_json: bool, debug: bool
) -> None:
    """Show the logs of the node and its engine, whether it runs or not.

    Requests have a log of their own, access. Each is kept up to a size, and the two before it.
    """
    names = tuple(dict.fromkeys(names or USUAL))
    folder = Home(home_path(home)).log_folder
    if not _written(chosen := _files(folder, names)):
        folder = running_home(home).log_folder
        chosen = _files(folder, names)
    if not follow and not _written(chosen):
        raise MeshError(f"there is no log in {folder}", hint="start a node with mesh-llm, or give its --home")
    shown = _Shown(as_json=as_json, titled=len(chosen) > 1)
    with ExitStack() as stack:
        tails = {name: stack.enter_context(closing(_Tail(path))) for name, path in chosen.items()}
        for name, path in chosen.items():
            # Before the end is read: a line that is written now may come twice, and none is lost.
            tails[name].skip()
            shown.lines(name, _last(path, lines))
        while follow:
            for name, tail in tails.items():
                shown.lines(name, tail.new())
            time.sleep(FOLLOW_S)


def _files(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    return {name: folder / f"{name}.log" for name in names}


def _written(files: Mapping[str, Path]) -> bool:
    # A command that failed before it was a node leaves an empty one.
    return any(path.exists() and path.stat().st_size for path in files.values())


class _Shown:
    """Lines of several logs: as `tail` shows them, or each as a JSON object."""

    def __init__(self, *, as_json: bool, titled: bool) -> None:
        self._as_json = as_json
        self._titled = titled
        self._name = ""

    def lines(self, name: str, lines: Sequence[str]) -> None:
        if not lines:
            return
        if self._as_json:
            click.echo("\n".join(json.dumps({"log": name, "line": line}) for line in lines))
            return
        if self._titled and name != self._name:
            click.echo(f"==> {name} <==")
            self._name = name
        click.echo("\n".join(clean(line.replace("\t", " "), _LINE_CHARS) for line in lines))


def _last(path: Path, count: int) -> list[str]:
    """Lines from the end, over what was rotated away."""
    kept: deque[str] = deque()
    for part in (path, *(path.with_name(f"{path.name}.{number}") for number in (1, 2))):
        if len(kept) >= count:
            break
        kept.extendleft(_from_the_end(part, count - len(kept)))
    return list(kept)


def _from_the_end(path: Path, count: int) -> Iterator[str]:
    """The last line first."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return
    yield from list(reversed(text.splitlines()))[:count]


class _Tail:
    """What is added to a file, also when another one takes its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._half = b""

    def skip(self) -> None:
        """What is there already is shown by others."""
        if (file := self._opened()) is not None:
            file.seek(0, os.SEEK_END)

    def new(self) -> list[str]:
        lines = self._rest()
        if self._was_rotated():
            self.close()
            lines += self._rest()
        return lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rest(self) -> list[str]:
        file = self._opened()
        if file is None:
            return []
        *lines, self._half = (self._half + file.read(_READ_BYTES)).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def _opened(self) -> BinaryIO | None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return None
        return self._file

    def _was_rotated(self) -> bool:
        if self._file is None:
            return False
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        opened = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino)
