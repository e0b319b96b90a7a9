"""What the headers of models say, kept for the next time: reading them takes a child process.

One file in the cache holds them all. An entry is good while every file of the
model has the same place, size, time of last change and inode, and while whoever
read it is the same; whatever is not as it should be counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mesh_llm.defaults import HEADERS_KEPT
from mesh_llm.errors import ModelError
from mesh_llm.frozen import frozen
from mesh_llm.models.facts import model_facts
from mesh_llm.models.stores.local import LocalModel
from mesh_llm.models.unsupported import Explanation, refusal
from mesh_llm.types import Fingerprint, Layer, LayerCache, ModelFacts

HEADERS_BYTES = 64 << 20
"""Of that cache; what is larger was not written by us."""


NO_FINGERPRINT = Fingerprint("-")
"""Of facts that come from a header alone: it takes samples of all the weights to make one."""

_FORMAT = 2
_NO_MODEL = {
    "adapter": "is an adapter, which only goes with the model that it was made for",
    "mmproj": "is a projector, which only goes with the model that it was made for",
    "imatrix": "is an importance matrix, not a model",
}
_ELSEWHERE = {"files", "fingerprint", "layers", "chat_template"}
_KINDS = {"int": int, "str": str, "bool": bool}
_PLAIN = {
    field.name: _KINDS[str(field.type)]
    for field in fields(ModelFacts)
    if field.name not in _ELSEWHERE and str(field.type) in _KINDS
}
"""Fields of the facts that are kept as they are."""
_LARGEST = 1 << 48
_LAYERS_LIMIT = 1024
_ROW = 5
"""Figures of one layer."""


@frozen
class Header:
    architecture: str
    """Empty where it is not even told."""
    facts: ModelFacts | None
    problem: str
    """Why there are no facts."""
    refusal: Explanation | None
    """Why the engine cannot run it; None where nothing is known to speak against it."""


def header_of(model: LocalModel, answer: Mapping[str, Any] | ModelError) -> Header:
    """From what the engine printed about a model's files, or why it did not."""
    if isinstance(answer, ModelError):
        return Header(architecture="", facts=None, problem=_reason(model, answer), refusal=None)
    metadata = answer["metadata"]
    told = metadata.get("general.architecture")
    architecture = told if isinstance(told, str) else ""
    kind = "mmproj" if architecture == "clip" else metadata.get("general.type")
    if isinstance(kind, str) and kind in _NO_MODEL:
        return Header(architecture=architecture, facts=None, problem=_NO_MODEL[kind], refusal=None)
    facts, problem = None, ""
    try:
        facts = replace(model_facts({**answer, "fingerprint": NO_FINGERPRINT}), chat_template=None)
    except ModelError as error:
        problem = _reason(model, error)
    return Header(architecture=architecture, facts=facts, problem=problem, refusal=refusal(answer))


def _reason(model: LocalModel, error: ModelError) -> str:
    """Without the name of the file, which stands beside it."""
    for name in (str(model.path), model.path.name):
        if error.message.startswith(f"{name} "):
            return error.message.removeprefix(f"{name} ")
    return error.message


class Headers:
    """All that are known, by the files that they were read from."""

    def __init__(self, file: Path, *, reader: str) -> None:
        """`reader`: the versions of all that reads headers and judges them."""
        self._file = file
        self._reader = reader
        self._entries = self._read()
        self._asked: dict[str, Any] = {}
        self._changed = False

    def known(self, model: LocalModel) -> Header | None:
        key = _key(model)
        entry = self._entries.get(key) if key is not None else None
        header = _parsed(entry, model)
        if key is not None and header is not None:
            self._asked[key] = entry
        return header

    def learn(self, model: LocalModel, header: Header) -> None:
        if (key := _key(model)) is not None:
            self._asked[key] = _entry(header)
            self._changed = True

    def save(self) -> None:
        """If it can be: a full or read-only cache only costs the next one time."""
        if not self._changed:
            return
        # What was asked for now is what is likely to be asked for again.
        others = {key: entry for key, entry in self._entries.items() if key not in self._asked}
        kept = dict([*self._asked.items(), *others.items()][:HEADERS_KEPT])
        document = {"format": _FORMAT, "reader": self._reader, "headers": kept}
        scratch = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                scratch.write_text(json.dumps(document, separators=(",", ":")))
                scratch.replace(self._file)
            finally:
                scratch.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            with self._file.open("rb") as file:
                text = file.read(HEADERS_BYTES + 1)
            document = json.loads(text) if len(text) <= HEADERS_BYTES else None
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict):
            return {}
        if (document.get("format"), document.get("reader")) != (_FORMAT, self._reader):
            return {}
        entries = document.get("headers")
        return entries if isinstance(entries, dict) else {}


def _key(model: LocalModel) -> str | None:
    """None where the files are gone meanwhile."""
    digest = hashlib.sha256()
    try:
        for path in model.files:
            about = path.stat()
            figures = f"{about.st_size} {about.st_mtime_ns} {about.st_ino}"
            digest.update(os.fsencode(path) + b"\0" + figures.encode() + b"\0")
    except OSError:
        return None
    return digest.hexdigest()


def _entry(header: Header) -> dict[str, Any]:
    facts, told = header.facts, header.refusal
    return {
        "architecture": header.architecture,
        "problem": header.problem,
        "refusal": None if told is None else [told.sentence, told.hint],
        "facts": None if facts is None else {name: getattr(facts, name) for name in _PLAIN},
        "layers": [] if facts is None else [_row(layer) for layer in facts.layers],
    }


def _row(layer: Layer) -> list[int]:
    cache = layer.cache
    return [layer.weight_bytes, cache.k_width, cache.v_width, cache.window, cache.state_bytes]


def _parsed(entry: Any, model: LocalModel) -> Header | None:
    match entry:
        case {
            "architecture": str(architecture),
            "problem": str(problem),
            "refusal": (None | [str(), str()]) as told,
            "facts": (None | dict()) as plain,
            "layers": list(rows),
        }:
            facts = _facts(plain, rows, model) if plain is not None else None
            if (facts is None) == (problem == ""):
                return None
            explained = Explanation(sentence=told[0], hint=told[1]) if told else None
            return Header(architecture=architecture, facts=facts, problem=problem, refusal=explained)
    return None


def _facts(plain: dict[str, Any], rows: list[Any], model: LocalModel) -> ModelFacts | None:
    if plain.keys() != _PLAIN.keys() or not all(_is(plain[name], kind) for name, kind in _PLAIN.items()):
        return None
    if plain["context_trained"] < 1 or not 1 <= len(rows) <= _LAYERS_LIMIT or not all(map(_is_row, rows)):
        return None
    layers = tuple(
        Layer(
            weight_bytes=weights,
            cache=LayerCache(k_width=k_width, v_width=v_width, window=window, state_bytes=state),
        )
        for weights, k_width, v_width, window, state in rows
    )
    return ModelFacts(
        files=model.files, fingerprint=NO_FINGERPRINT, layers=layers, chat_template=None, **plain
    )


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == _ROW and all(_is(part, int) for part in row)


def _is(value: Any, kind: type) -> bool:
    # type(), as a bool is an int.
    return type(value) is kind and (not isinstance(value, int) or 0 <= value <= _LARGEST)
