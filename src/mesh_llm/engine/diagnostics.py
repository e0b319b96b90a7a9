"""Read the engine's log: how large its buffers are, and why it died. Pure: lines in, facts out."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import field
from enum import StrEnum

from mesh_llm.frozen import frozen
from mesh_llm.sanitise import clean

_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_STAMP = re.compile(r"^\d+\.\d{2}\.\d{3}\.\d{3} [A-Z] ")
_SECRET = re.compile(r"(api_keys?: ).*")
_SENTENCE_CHARS = 1000
"""Of what a child says about itself or a worker: several workers' sentences, at most 400 characters each."""


class Cause(StrEnum):
    OUT_OF_MEMORY = "out of memory"
    BAD_MODEL = "bad model"
    PORT = "port"
    ABORT = "abort"
    SIGNAL = "signal"
    EXIT = "exit"
    STOPPED = "stopped"
    LINK = "link"
    SILENT = "silent"


@frozen
class Death:
    """Why an engine child is no more, in a sentence."""

    cause: Cause
    sentence: str
    evidence: tuple[str, ...] = field(default=())

    @property
    def hopeless(self) -> bool:
        """Trying again with the same model would end the same way."""
        return self.cause is Cause.BAD_MODEL


def printable(line: str) -> str:
    """A line of a child's, fit for logs and terminals: without what would move somebody's cursor."""
    return line if line.isprintable() else clean(line.replace("\t", " "), len(line))


def sentence(text: object) -> str:
    """What a child reports, in which a worker of somebody else's may have had a say."""
    return clean(str(text), _SENTENCE_CHARS)


def redacted(line: str) -> str:
    """A line of the engine's log without the part of its key that llama-server prints."""
    return _SECRET.sub(r"\1…", line)


def buffer_bytes(line: str) -> tuple[str, int] | None:
    """`("KV", 94371840)` from a line that reports a buffer."""
    if match := _BUFFER.search(line):
        return match[2], round(float(match[3]) * (1 << 20))
    return None


def explain(*, status: int, failed: str | None, lines: Sequence[str], oom_killed: bool) -> Death:
    """From exit status, the child's own last word, its log and the kernel's count of kills."""
    said = [_STAMP.sub("", line).strip() for line in lines if line.strip()]
    evidence = tuple(said[-8:])
    text = "\n".join(said)
    if status == -signal.SIGKILL and oom_killed:
        return Death(
            cause=Cause.OUT_OF_MEMORY,
            sentence="the engine was killed by the kernel: the machine ran out of memory",
            evidence=evidence,
        )
    if re.search(r"failed to allocate|out of memory|bad_alloc|cudaMalloc failed|alloc.* failed", text):
        return Death(
            cause=Cause.OUT_OF_MEMORY,
            sentence=f"the engine ran out of memory ({_last(said, 'alloc', 'memory')})",
            evidence=evidence,
        )
    if status == -signal.SIGABRT or "GGML_ASSERT" in text:
        return Death(
            cause=Cause.ABORT,
            sentence=f"the engine aborted ({_last(said, 'GGML_ASSERT', 'terminate', 'what()')})",
            evidence=evidence,
        )
    if status < 0:
        return Death(cause=Cause.SIGNAL, sentence=_signal_sentence(-status), evidence=evidence)
    if re.search(r"couldn't bind|failed to bind|HTTP server error", text):
        return Death(
            cause=Cause.PORT, sentence="the engine could not open a port on 127.0.0.1", evidence=evidence
        )
    if re.search(r"error loading model|failed to load model|model loading error", text):
        return Death(
            cause=Cause.BAD_MODEL,
            sentence=f"the engine cannot load this model ({_model_reason(said)})",
            evidence=evidence,
        )
    reason = failed or (said[-1] if said else f"exit status {status}")
    return Death(cause=Cause.EXIT, sentence=f"the engine ended: {reason}", evidence=evidence)


def _signal_sentence(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return "the engine was killed (SIGKILL)"
    if number == signal.SIGILL:
        return "the engine met an instruction that this CPU lacks (SIGILL)"
    return f"the engine crashed ({name})"


def _model_reason(lines: Sequence[str]) -> str:
    """The most precise line: 'error loading model …: unknown model architecture' before the rest."""
    for line in lines:
        if match := re.search(r"error loading model[^:]*:\s*(.+)", line):
            return match[1].strip()
    return _last(lines, "error", "failed")


def _last(lines: Sequence[str], *words: str) -> str:
    for line in reversed(lines):
        if any(word in line for word in words):
            return line
    return lines[-1] if lines else "it left no message"
