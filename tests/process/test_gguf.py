"""What a model file says about itself, read by the real child; and files that were made to harm it."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.defaults import INSPECT_LINE_BYTES
from mesh_llm.engine import inspect
from mesh_llm.engine.inspect import read_gguf, read_headers
from mesh_llm.errors import ModelError
from mesh_llm.models.facts import model_facts
from tests.support import tiny_gguf

VARIANTS = 200

# One process loads the engine, and a copy of it reads each file: a crash takes only the copy down.
FORKS = """
import io, json, os, signal, sys
from mesh_llm.engine.children import gguf
from mesh_llm.engine.library import Engine
Engine.load()
for path in sys.argv[1:]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        request = {"paths": [path], "fingerprint": True}
        sys.stdin, sys.stdout = io.StringIO(json.dumps(request) + "\\n"), os.fdopen(write, "w")
        try:
            gguf.main()
            sys.stdout.flush()
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = answers.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([path, status, json.loads(answer) if status == 0 else None]), flush=True)
"""


async def fingerprint(path: Path) -> str:
    return str((await read_gguf(path))["fingerprint"])


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def bare(path: Path, architecture: str) -> None:
    """A header that says its architecture, and no more."""
    key = b"general.architecture"
    text = architecture.encode()
    path.write_bytes(
        b"GGUF" + struct.pack("<IqqQ", 3, 0, 1, len(key)) + key + struct.pack("<IQ", 8, len(text)) + text
    )


def data_offset(path: Path) -> int:
    """Where the first tensor begins, found without our own reader."""
    import gguf

    reader = gguf.GGUFReader(path)
    return int(min(tensor.data_offset for tensor in reader.tensors))


async def test_facts_of_a_real_model(smollm2: Path) -> None:
    facts = model_facts(await read_gguf(smollm2))

    assert facts.files == (smollm2,)
    assert facts.architecture == "llama"
    assert facts.quantisation == "Q4_1"
    assert len(facts.layers) == 30
    assert facts.vocabulary == 49152
    assert facts.hidden == 576
    assert facts.context_trained == 8192
    assert facts.size_bytes == 98362432
    assert facts.head_bytes == 0
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template


async def test_the_fingerprint_belongs_to_the_content(smollm2: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another name.gguf"
    shutil.copyfile(smollm2, copy)

    assert await fingerprint(copy) == await fingerprint(smollm2)


async def test_the_fingerprint_changes_with_what_it_covers(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    original = await fingerprint(path)
    start = data_offset(path)
    seen = {original}

    # A value in the header, a letter of the chat template, the first and a later byte of a sampled page.
    template = path.read_bytes().index(b"im_start")
    for offset in (template, start, start + 4000):
        change(path, offset)
        seen.add(await fingerprint(path))
        change(path, offset)

    assert len(seen) == 4
    assert await fingerprint(path) == original
    with path.open("ab") as file:
        file.write(b"\0")
    assert await fingerprint(path) not in seen


async def test_another_seed_is_another_fingerprint(tmp_path: Path) -> None:
    first = tiny_gguf.write(tmp_path / "first.gguf", "llama", seed=1)
    again = tiny_gguf.write(tmp_path / "again.gguf", "llama", seed=1)
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", seed=2)

    assert await fingerprint(first) == await fingerprint(again) != await fingerprint(other)


async def test_any_shard_stands_for_the_whole(tmp_path: Path) -> None:
    shards = tiny_gguf.write_shards(tmp_path / "split.gguf", 3, "llama")

    facts = [model_facts(await read_gguf(shard)) for shard in shards]

    assert facts[0] == facts[1] == facts[2]
    assert facts[0].files == tuple(shards)
    assert facts[0].size_bytes == sum(shard.stat().st_size for shard in shards)
    change(shards[2], data_offset(shards[2]))
    assert await fingerprint(shards[0]) != facts[0].fingerprint


async def test_missing_shards_are_named(tmp_path: Path) -> None:
    shards = tiny_gguf.write_shards(tmp_path / "split.gguf", 3, "llama")
    shards[1].unlink()

    with pytest.raises(ModelError) as caught:
        await read_gguf(shards[2])

    assert caught.value.message == (
        "split-00003-of-00003.gguf needs 3 files and 1 of them are missing: split-00002-of-00003.gguf"
    )
    assert caught.value.hint == f"put them beside it in {tmp_path}"


async def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    shard = tiny_gguf.write_shards(tmp_path / "split.gguf", 2, "llama")[0]
    renamed = shard.rename(tmp_path / "model.gguf")

    with pytest.raises(ModelError, match=r"^model.gguf is one of 2 files of a model, but its name"):
        await read_gguf(renamed)


async def test_seventy_gigabytes_take_no_time(tmp_path: Path) -> None:
    path = tiny_gguf.write_sparse(
        tmp_path / "large.gguf",
        layers=80,
        hidden=8192,
        feed_forward=12800,
        heads=64,
        kv_heads=8,
        head_size=128,
    )
    assert path.stat().st_size > 70e9
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    facts = model_facts(await read_gguf(path))

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(facts.layers) == 80
    # Half a second here, most of it for the interpreter; to read the weights would take tens of them.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 5


async def test_a_model_of_a_thousand_tensors_is_read_whole(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "deep.gguf", "qwen3moe", layers=120)

    document = await read_gguf(path)

    assert len(document["tensors"]) == 120 * 12 + 3
    assert len(model_facts(document).layers) == 120


async def test_a_link_keeps_its_own_name_and_neighbours(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for shard in tiny_gguf.write_shards(tmp_path / "tiny.gguf", 2, "llama"):
        blob = shard.rename(blobs / f"{len(shard.name)}{shard.stat().st_size:062x}{shard.name[6]}")
        (snapshot / shard.name).symlink_to(blob)

    facts = model_facts(await read_gguf(snapshot / "tiny-00002-of-00002.gguf"))

    assert [file.name for file in facts.files] == ["tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]


# -- many at once ---------------------------------------------------------------------------------


async def test_headers_of_many_files_come_in_their_order(tmp_path: Path, tiny_model: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_bytes(b"GGUF and nothing else of it")
    deep = tiny_gguf.write(tmp_path / "deep.gguf", "llama", layers=7)
    paths = [deep, text, *[tiny_model] * 40, tmp_path / "gone.gguf"]

    answers = [answer async for answer in read_headers(paths)]

    layers = [None if isinstance(a, ModelError) else a["metadata"]["llama.block_count"] for a in answers]
    assert layers == [7, None, *[4] * 40, None]
    assert isinstance(answers[1], ModelError)
    assert str(text) in answers[1].message
    assert all(a["fingerprint"] is None for a in answers if not isinstance(a, ModelError))


async def test_a_file_that_the_parser_dies_of_costs_that_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import json, os, sys\n"
        "for index, path in enumerate(json.loads(sys.stdin.readline())['paths']):\n"
        "    if 'deadly' in path: print('no more', file=sys.stderr, flush=True); os.abort()\n"
        "    print(json.dumps({'index': index, 'path': path}), flush=True)\n"
    )
    monkeypatch.setattr(inspect, "module", lambda name: [sys.executable, "-c", program])
    paths = [tmp_path / name for name in ("a", "deadly1", "deadly2", "b", "deadly3")]

    answers = [answer async for answer in read_headers(paths)]

    told = [a.message if isinstance(a, ModelError) else a["path"] for a in answers]
    died = "{} cannot be read as GGUF: the parser ended with status -6 (no more)"
    assert told == [
        str(paths[0]),
        died.format(paths[1]),
        died.format(paths[2]),
        str(paths[3]),
        died.format(paths[4]),
    ]


async def test_a_header_with_a_long_text_is_read_without_it(tmp_path: Path, tiny_model: Path) -> None:
    """And the next models keep their own answers."""
    text = {"general.description": "x" * (INSPECT_LINE_BYTES + 1)}
    wordy = tiny_gguf.write(tmp_path / "wordy.gguf", "llama", layers=5, metadata=text)

    answers = [answer async for answer in read_headers([wordy, tiny_model])]

    layers = [None if isinstance(a, ModelError) else a["metadata"]["llama.block_count"] for a in answers]
    assert layers == [5, 4]


async def test_a_header_that_is_too_long_to_tell_is_an_error_of_that_file(
    tmp_path: Path, tiny_model: Path
) -> None:
    deep = tiny_gguf.write(tmp_path / "deep.gguf", "llama", layers=7)
    texts = {f"general.text{number}": "x" * (1 << 20) for number in range(INSPECT_LINE_BYTES >> 20)}
    long = tiny_gguf.write(tmp_path / "long.gguf", "llama", metadata=texts)

    answers = [answer async for answer in read_headers([deep, long, tiny_model])]

    told = [str(a) if isinstance(a, ModelError) else a["metadata"]["llama.block_count"] for a in answers]
    assert told == [7, f"{long} has a header of more than {INSPECT_LINE_BYTES:,} bytes", 4]


async def test_a_line_that_cannot_be_read_is_an_error_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import json, sys\n"
        "for index, path in enumerate(json.loads(sys.stdin.readline())['paths']):\n"
        "    line = json.dumps({'index': index, 'path': path})\n"
        "    print(line[:5] if 'cut' in path else line, flush=True)\n"
    )
    monkeypatch.setattr(inspect, "module", lambda name: [sys.executable, "-c", program])
    paths = [tmp_path / name for name in ("a", "cut1", "cut2", "b", "cut3")]

    answers = [answer async for answer in read_headers(paths)]

    wrong = "{} cannot be read as GGUF: the parser ended with status 0"
    assert [a.message if isinstance(a, ModelError) else a["path"] for a in answers] == [
        str(paths[0]),
        wrong.format(paths[1]),
        wrong.format(paths[2]),
        str(paths[3]),
        wrong.format(paths[4]),
    ]


async def test_the_engine_says_which_architectures_it_knows(tmp_path: Path) -> None:
    """Of names that stand in its sources, and of some that do not."""
    names = dict.fromkeys(tiny_gguf.ARCHITECTURES, True) | {"glm4moelite": False, "gptoss": False}
    paths = [tmp_path / f"{name}.gguf" for name in names]
    for path, name in zip(paths, names, strict=True):
        bare(path, name)

    answers = [answer async for answer in read_headers(paths)]

    known = [None if isinstance(a, ModelError) else a["architecture_known"] for a in answers]
    assert dict(zip(names, known, strict=True)) == names


async def test_names_that_are_no_models_are_not_known(tmp_path: Path) -> None:
    """They are in its table all the same."""
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "three.gguf"]
    for path, name in zip(paths, ("clip", "(unknown)", "unknown"), strict=True):
        bare(path, name)

    answers = [answer async for answer in read_headers(paths)]

    assert [isinstance(a, dict) and a["architecture_known"] for a in answers] == [False] * 3


# -- harm -----------------------------------------------------------------------------------------


def read_in_forks(paths: list[Path]) -> list[tuple[str, int, dict[str, Any] | None]]:
    child = subprocess.run(
        [sys.executable, "-P", "-c", FORKS, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return [tuple(json.loads(line)) for line in child.stdout.splitlines()]


def corrupted(original: bytes, header: int, choice: random.Random) -> bytes:
    """One byte, four bytes, a slice gone, a slice doubled, or an end: somewhere before the weights."""
    data = bytearray(original)
    at = choice.randrange(4, header)
    match choice.randrange(5):
        case 0:
            data[at] = choice.randrange(256)
        case 1:
            data[at : at + 8] = struct.pack("<q", choice.choice((-1, 0, 1 << 31, 1 << 40, (1 << 62) + 1)))
        case 2:
            del data[at : at + choice.randrange(1, 64)]
        case 3:
            data[at:at] = data[at : at + choice.randrange(1, 64)]
        case _:
            del data[at:]
    return bytes(data)


def test_damaged_headers_give_facts_or_a_sentence(tmp_path: Path) -> None:
    seed = 11549
    choice = random.Random(seed)
    whole = tiny_gguf.write(tmp_path / "whole.gguf", "llama", layers=1)
    original, header = whole.read_bytes(), data_offset(whole)
    paths = [tmp_path / f"{index}.gguf" for index in range(VARIANTS)]
    for path in paths:
        path.write_bytes(corrupted(original, header, choice))

    answers = read_in_forks(paths)

    outcomes = {"facts": 0, "refused": 0, "crashed": 0}
    assert [path for path, _, _ in answers] == [str(path) for path in paths]
    for name, status, answer in answers:
        assert status != -signal.SIGALRM, f"{name} (seed {seed}) hangs"
        if answer is None:
            outcomes["crashed"] += 1
        elif "error" in answer:
            assert answer["error"].startswith(f"{name} ")
            outcomes["refused"] += 1
        else:
            try:
                model_facts(answer)
                outcomes["facts"] += 1
            except ModelError:
                outcomes["refused"] += 1
    # A crash would be a sentence, too, as a later test shows; the parser is better than that.
    assert outcomes["crashed"] == 0
    assert outcomes["facts"] > 10
    assert outcomes["refused"] > 50


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of the parser")
async def test_a_file_that_wants_all_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "greedy.gguf"
    # Version 3, no tensors, one key: an array of ten billion bytes, and a hole that holds them.
    key, count = b"general.name", 10 << 30
    header = b"GGUF" + struct.pack("<IqqQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 0, count)
    path.write_bytes(header)
    os.truncate(path, len(header) + count)

    with pytest.raises(ModelError) as caught:
        await read_gguf(path)

    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('GGML_ASSERT(x) failed', file=sys.stderr); os.abort()", "-6 (GGML_ASSERT(x) failed)"),
        ("print('not an answer')", "0"),
    ],
)
async def test_a_parser_that_dies_is_a_sentence(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    program = [sys.executable, "-c", f"import os, sys; sys.stdin.read(); {code}; sys.stdout.flush()"]
    monkeypatch.setattr(inspect, "module", lambda name: program)

    with pytest.raises(ModelError) as caught:
        await read_gguf(tiny_model)

    assert (
        caught.value.message == f"{tiny_model} cannot be read as GGUF: the parser ended with status {words}"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path} is empty"),
        (b"G", "{path} is not a GGUF file"),
        (b"PK\x03\x04 not a model", "{path} is not a GGUF file"),
        (b"GGUF", "{path} is not a readable GGUF file"),
        (b"GGUF" + bytes(range(256)) * 8, "{path} is not a readable GGUF file"),
        (b"GGUF" + b"\xff" * 2048, "{path} is not a readable GGUF file"),
    ],
)
async def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError) as caught:
        await read_gguf(path)

    assert caught.value.message == message.format(path=path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0, 1.5])
async def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    """Cut in the first bytes, the vocabulary, the tensor table, at the first weight and after it."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    cut = max(24, int(data_offset(path) * share))
    os.truncate(path, cut)

    with pytest.raises(ModelError) as caught:
        await read_gguf(path)

    if share < 1:
        assert caught.value.message == f"{path} is not a readable GGUF file"
    else:
        assert caught.value.message.startswith(
            f"{path} is cut short: it has {cut:,} bytes and its tensors need "
        )


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")

    with pytest.raises(ModelError, match=r"is not a regular file$"):
        await read_gguf(tmp_path / "model.gguf")
