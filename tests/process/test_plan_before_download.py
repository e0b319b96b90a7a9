"""`mesh-llm plan` and `models --fits` for models that are not here, and for machines that are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.download.remote_header import HEADER_FIRST_BYTES, HEADER_RANGE_BYTES
from tests.support import tiny_gguf
from tests.support.command import Ended, mesh_llm
from tests.support.downloads import FILE, REPO, TOKEN, Person
from tests.support.sampling import first, sampled

WAIT_S = 120.0
MACHINES = ("--with", "desktop=24GB:cuda,mac=16GB,mini=32GB", "--link", "1ms")


def plan(person: Person, *arguments: str, **env: str) -> Ended:
    return mesh_llm("plan", *arguments, env={**person.env, **env}, within_s=WAIT_S)


def planned(person: Person, *arguments: str, **env: str) -> dict[str, Any]:
    ended = plan(person, "--json", *arguments, **env)
    assert ended.status == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf", "llama", layers=6, hidden=256, vocabulary=4096)


# -- from the catalog -------------------------------------------------------------------------------


def test_machines_that_are_not_there(person: Person) -> None:
    document = planned(person, "--model", "gpt-oss-120b", *MACHINES)

    assert document["scope"] == "machines"
    assert document["model"]["layers"] == 36
    assert document["plan"]["mode"] == "split"
    held = {stage["node"]: stage["last"] - stage["first"] for stage in document["plan"]["stages"]}
    names = {node["id"]: node["name"] for node in document["nodes"]}
    assert {names[id] for id in held} == {"desktop", "mac", "mini"}
    assert sum(held.values()) == 36
    low, high = document["plan"]["predicted_tok_s_low"], document["plan"]["predicted_tok_s_high"]
    assert 0 < 2 * low < document["plan"]["predicted_tok_s"] < high
    # Nobody was asked for anything.
    assert person.hub.seen == []
    assert person.left() == []


def test_what_is_missing_is_said(person: Person) -> None:
    ended = plan(person, "--model", "Qwen3-235B-A22B", *MACHINES)

    assert ended.status == 0, ended.stderr
    assert "missing  " in ended.stdout
    assert ": more machines, or a smaller quantisation\n" in ended.stdout
    assert "machines that are not all there: desktop, mac, mini" in ended.stdout
    assert "note     Qwen3-235B-A22B is not here: its sizes are the catalog's" in ended.stdout


def test_this_machine_among_them(person: Person) -> None:
    document = planned(person, "--model", "Qwen3-32B", "--with", "here,big=64GB:cuda")

    assert len(document["nodes"]) == 2
    assert document["nodes"][0]["name"] == "big"


@pytest.mark.full
def test_this_machine_alone(person: Person) -> None:
    document = planned(person, "--model", "gpt-oss-120b", "--max-memory", "8GB")

    assert document["scope"] == "machine"
    assert document["plan"]["mode"] == "waiting"
    assert document["plan"]["have_bytes"] <= 8_000_000_000


# -- from the header --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sampled([f"hf:{REPO}/{FILE}", f"hf:{REPO}:{FILE}", f"hf:{REPO}"], f"hf:{REPO}/{FILE}")
)
def test_a_header_on_the_hub(person: Person, tiny: Path, name: str) -> None:
    person.hub.put(REPO, FILE, tiny.read_bytes())
    person.hub.token = TOKEN

    document = planned(person, "--model", name, "--with", "mini=32GB", HF_TOKEN=TOKEN)

    here = planned(person, "--model", str(tiny), "--with", "mini=32GB")
    for key in ("quantisation", "size_bytes", "layers", "context", "slots"):
        assert document["model"][key] == here["model"][key], key
    assert document["plan"] == here["plan"]
    assert document["notes"][0].startswith(
        f"{FILE.removesuffix('.gguf')} is not here: its header was read from hf:"
    )
    [asked] = person.hub.got("storage")
    assert asked.headers["Range"] == f"bytes=0-{HEADER_FIRST_BYTES - 1}"
    assert "Authorization" not in asked.headers
    assert person.left() == []


def test_a_long_header_comes_in_ranges(person: Person, tmp_path: Path) -> None:
    tiny = tiny_gguf.write(
        tmp_path / "long.gguf", "llama", metadata={"note": "x" * (HEADER_FIRST_BYTES + HEADER_RANGE_BYTES)}
    )
    person.hub.put(REPO, FILE, tiny.read_bytes())

    planned(person, "--model", f"hf:{REPO}:{FILE}", "--with", "mini=32GB")

    start, then = HEADER_FIRST_BYTES, HEADER_FIRST_BYTES + HEADER_RANGE_BYTES
    assert [asked.headers["Range"] for asked in person.hub.got("storage")] == [
        f"bytes=0-{start - 1}",
        f"bytes={start}-{then - 1}",
        f"bytes={then}-{then + HEADER_RANGE_BYTES - 1}",
    ]


@pytest.mark.full
def test_a_model_of_several_files(person: Person, tmp_path: Path) -> None:
    shards = tiny_gguf.write_shards(tmp_path / "many.gguf", 3, "llama")
    for shard in shards:
        person.hub.put(REPO, shard.name, shard.read_bytes())

    document = planned(person, "--model", f"hf:{REPO}:{shards[0].name}", "--with", "mini=32GB")

    assert document["model"]["size_bytes"] == sum(shard.stat().st_size for shard in shards)
    assert len(person.hub.got("storage")) == 3


@pytest.mark.full
def test_a_server_that_sends_everything_is_heard_as_far_as_it_was_asked(person: Person, tiny: Path) -> None:
    person.hub.plain["tiny.gguf"] = person.hub.put(REPO, FILE, tiny.read_bytes())
    person.hub.faults.ignore_ranges = True

    document = planned(person, "--model", f"{person.hub.storage_url}/plain/tiny.gguf", "--with", "mini=32GB")

    assert document["model"]["layers"] == 6


@pytest.mark.parametrize(
    ("data", "words"),
    first(
        1,
        [
            (b"PK" + bytes(5000), "is not a GGUF file: it does not begin with GGUF"),
            (b"GGUF\3\0\0\0" + (5).to_bytes(8, "little") * 2, "ends within its header"),
        ],
    ),
)
def test_what_is_no_model(person: Person, data: bytes, words: str) -> None:
    person.hub.put(REPO, FILE, data)

    ended = plan(person, "--model", f"hf:{REPO}:{FILE}", "--with", "mini=32GB")

    assert ended.status == 1
    assert words in ended.stderr
    assert ended.stdout == ""


def test_a_file_of_an_impossible_size(person: Person, tiny: Path) -> None:
    person.hub.put(REPO, FILE, tiny.read_bytes()).said_size = 10**30

    ended = plan(person, "--model", f"hf:{REPO}:{FILE}", "--with", "mini=32GB")

    assert ended.status == 1
    assert f"gives {FILE} an impossible size\n" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.full
def test_a_hub_that_has_no_such_file(person: Person, tiny: Path) -> None:
    person.hub.put(REPO, "other.gguf", tiny.read_bytes())

    ended = plan(person, "--model", f"hf:{REPO}:{FILE}")

    assert ended.status == 1
    assert f"has no file {FILE}" in ended.stderr


# -- the catalog --------------------------------------------------------------------------------------


def test_the_catalog_by_what_fits(person: Person) -> None:
    ended = mesh_llm("models", "--fits", "--json", env=person.env, within_s=WAIT_S)

    assert ended.status == 0, ended.stderr
    rows = json.loads(ended.stdout)["models"]
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    known = {row["name"]: row for row in rows}
    assert known["smollm2"]["fits"]
    assert known["smollm2"]["context"] == 8192
    assert not known["Kimi-K2.5"]["fits"]
    assert known["Kimi-K2.5"]["missing_bytes"] > 0
    assert person.hub.seen == []
