"""The log of a run: one JSON document per line, with the seconds since the run began.

Kinds: `run` (how it was asked for), `begin`, `fault` (its number and `begin`, `end` or `failed`), `member`
(`started`, `ready`, `gone`, `revoked`), `told` (a line of a node's log), `reference` (an undisturbed answer),
`answer`, `status` (what a node says of the mesh), `usage` (what a process holds), `disk`, `orphan`, `settled`
and `end`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from mesh_llm import __version__
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.lab.chaos.schedule import Fault

FORMAT = 1

Record = dict[str, Any]


class ChaosLog:
    """Kept, and written at once: a run that is broken off leaves what it saw."""

    def __init__(self, file: Path | None) -> None:
        self._file: TextIO | None = file.open("w", encoding="utf-8") if file is not None else None
        self._began_s = time.monotonic()
        self.records: list[Record] = []

    def now_s(self) -> float:
        return self.since(time.monotonic())

    def since(self, monotonic_s: float) -> float:
        return round(monotonic_s - self._began_s, 3)

    def begin(self) -> None:
        """Now is second 0; what came before has a negative time."""
        before_s, self._began_s = self.now_s(), time.monotonic()
        _shift(self.records, before_s)
        self.write("begin", at=0.0, before_s=before_s)

    def write(self, kind: str, /, at: float | None = None, **fields: Any) -> None:
        record = {"kind": kind, "at": self.now_s() if at is None else at, **fields}
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@frozen
class Asked:
    """What a log says of the run itself: enough to run it again."""

    seed: int
    minutes: float
    model: str | None
    clients: int
    faults: tuple[Fault, ...]
    embeddings: bool = False
    """Whether vectors were asked for, and nothing else."""
    command: str = ""


def _shift(records: Iterable[Record], before_s: float) -> None:
    for record in records:
        record["at"] = round(record["at"] - before_s, 3)


def read(path: Path) -> list[Record]:
    try:
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
        # In the file, times before the begin count from when the nodes were started.
        for index, record in enumerate(records):
            if record["kind"] == "begin":
                _shift(records[:index], record["before_s"])
        if records[0]["kind"] == "run" and records[0]["format"] == FORMAT:
            return records
    except OSError as error:
        raise MeshError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        pass
    raise MeshError(f"{path} is not a log of mesh-llm lab chaos", hint="give the file that --log wrote")


def write_asked(log: ChaosLog, asked: Asked, *, left_out: Mapping[str, str]) -> None:
    log.write(
        "run",
        format=FORMAT,
        version=__version__,
        seed=asked.seed,
        minutes=asked.minutes,
        model=asked.model,
        clients=asked.clients,
        embeddings=asked.embeddings,
        command=asked.command,
        left_out=dict(left_out),
        faults=[each.to_document() for each in asked.faults],
    )


def asked(records: list[Record]) -> Asked:
    run = records[0]
    return Asked(
        seed=run["seed"],
        minutes=run["minutes"],
        model=run["model"],
        clients=run["clients"],
        faults=tuple(Fault.from_document(each) for each in run["faults"]),
        embeddings=run.get("embeddings", False),
        command=run["command"],
    )
