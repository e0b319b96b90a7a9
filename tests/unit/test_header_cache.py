"""Headers that are kept: good while the files and the engine are the same, and never trusted blindly."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.errors import ModelError
from mesh_llm.models import header_cache as headers_module
from mesh_llm.models.header_cache import NO_FINGERPRINT, Header, Headers, header_of
from mesh_llm.models.stores import LocalModel, Store
from mesh_llm.models.unsupported import Explanation
from tests.support import planning

READER = "1.2.3"


def local(folder: Path, name: str = "x") -> LocalModel:
    path = folder / f"{name}.gguf"
    path.write_bytes(b"GGUF")
    return LocalModel(name=name, path=path, files=(path,), size_bytes=4, store=Store.MODELS)


def header(model: LocalModel, **changes: Any) -> Header:
    facts = planning.model(files=model.files, fingerprint=NO_FINGERPRINT)
    plain = Header(architecture="llama", facts=facts, problem="", refusal=None)
    return replace(plain, **changes)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "headers.json"


@pytest.fixture
def model(tmp_path: Path) -> LocalModel:
    return local(tmp_path)


def kept(cache: Path, *models: LocalModel) -> Headers:
    """A cache that has been written and is read again."""
    first = Headers(cache, reader=READER)
    for model in models:
        first.learn(model, header(model))
    first.save()
    return Headers(cache, reader=READER)


def test_what_was_learnt_is_known_the_next_time(cache: Path, model: LocalModel) -> None:
    assert kept(cache, model).known(model) == header(model)
    assert [path.name for path in cache.parent.iterdir()] == ["headers.json"]


def test_a_problem_is_known_too(cache: Path, model: LocalModel) -> None:
    first = Headers(cache, reader=READER)
    damaged = Header(architecture="", facts=None, problem="is damaged", refusal=None)
    first.learn(model, damaged)
    first.save()

    assert Headers(cache, reader=READER).known(model) == damaged


def test_a_refusal_is_known_too(cache: Path, model: LocalModel) -> None:
    first = Headers(cache, reader=READER)
    foreign = header(model, refusal=Explanation(sentence="it is foreign", hint="take another"))
    first.learn(model, foreign)
    first.save()

    assert Headers(cache, reader=READER).known(model) == foreign


def test_another_reader_may_know_more(cache: Path, model: LocalModel) -> None:
    kept(cache, model)

    assert Headers(cache, reader="1.2.4").known(model) is None


def test_a_file_that_changed_is_read_again(cache: Path, model: LocalModel) -> None:
    headers = kept(cache, model)

    about = model.path.stat()
    os.utime(model.path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert headers.known(model) is None

    os.utime(model.path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert headers.known(model) is not None
    other = local(model.path.parent, "y")
    os.utime(other.path, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.path.replace(model.path)
    assert headers.known(model) is None

    model.path.unlink()
    assert headers.known(model) is None


def change(document: Any, way: list[Any], value: Any) -> None:
    for step in way[:-1]:
        document = document[step]
    document[way[-1]] = value


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (["format"], 1),
        (["format"], 3),
        (["headers"], []),
        (["headers", "KEY"], None),
        (["headers", "KEY", "refusal"], ["one"]),
        (["headers", "KEY", "refusal"], [1, 2]),
        (["headers", "KEY", "problem"], "is damaged"),
        (["headers", "KEY", "architecture"], None),
        (["headers", "KEY", "facts"], None),
        (["headers", "KEY", "facts", "hidden"], "64"),
        (["headers", "KEY", "facts", "hidden"], True),
        (["headers", "KEY", "facts", "hidden"], -1),
        (["headers", "KEY", "facts", "hidden"], 1e300),
        (["headers", "KEY", "facts", "hidden"], 1 << 60),
        (["headers", "KEY", "facts", "causal"], 1),
        (["headers", "KEY", "facts", "context_trained"], 0),
        (["headers", "KEY", "facts", "surprise"], 1),
        (["headers", "KEY", "layers"], []),
        (["headers", "KEY", "layers"], [[1, 1, 1, 1, 1]] * 2000),
        (["headers", "KEY", "layers", 0], [1, 2, 3, 4]),
        (["headers", "KEY", "layers", 0], [1, 2, 3, 4, "5"]),
        (["headers", "KEY", "layers", 0], 5),
    ],
)
def test_an_entry_that_is_not_as_it_was_written_is_none(
    cache: Path, model: LocalModel, way: list[Any], value: Any
) -> None:
    kept(cache, model)
    document = json.loads(cache.read_text())
    (key,) = document["headers"]
    change(document, [key if step == "KEY" else step for step in way], value)
    cache.write_text(json.dumps(document))

    assert Headers(cache, reader=READER).known(model) is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xff", b"[" * 100_000])
def test_a_cache_that_is_none_is_written_anew(cache: Path, model: LocalModel, text: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(text)
    headers = Headers(cache, reader=READER)
    assert headers.known(model) is None

    headers.learn(model, header(model))
    headers.save()

    assert Headers(cache, reader=READER).known(model) == header(model)


def test_a_cache_that_is_too_large_is_not_read(
    cache: Path, model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(cache, model)
    monkeypatch.setattr(headers_module, "HEADERS_BYTES", cache.stat().st_size - 1)

    assert Headers(cache, reader=READER).known(model) is None


def test_the_cache_is_bounded_and_keeps_what_was_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers_module, "HEADERS_KEPT", 3)
    old = [local(tmp_path, f"old{index}") for index in range(3)]
    headers = kept(cache, *old)
    headers.known(old[2])
    new = local(tmp_path, "new")

    headers.learn(new, header(new))
    headers.save()

    again = Headers(cache, reader=READER)
    assert [again.known(model) is not None for model in (*old, new)] == [True, False, True, True]


def test_a_cache_that_cannot_be_written_harms_nobody(tmp_path: Path, model: LocalModel) -> None:
    (tmp_path / "file").touch()
    headers = Headers(tmp_path / "file" / "headers.json", reader=READER)

    headers.learn(model, header(model))
    headers.save()


def test_nothing_new_is_not_written(cache: Path, model: LocalModel) -> None:
    headers = kept(cache, model)
    cache.unlink()

    headers.known(model)
    headers.save()

    assert not cache.exists()


# -- from what the engine printed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "clip"}, "is a projector, which"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "is a projector, which"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "is an adapter, which"),
        ({"general.architecture": "llama", "general.type": ["model"]}, "is damaged or not a language model"),
        ({}, "is damaged or not a language model: it does not say its general.architecture"),
    ],
)
def test_what_is_no_model_is_said(model: LocalModel, metadata: dict[str, Any], words: str) -> None:
    files = [{"path": str(model.path), "bytes": 4}]
    answer = {"metadata": metadata, "tensors": [], "files": files, "architecture_known": True}

    found = header_of(model, answer)

    assert found.facts is None
    assert found.problem.startswith(words)


def test_a_refusal_is_told_without_the_files_name(model: LocalModel) -> None:
    found = header_of(model, ModelError(f"{model.path} is cut short: it has 4 bytes"))

    assert found.problem == "is cut short: it has 4 bytes"
