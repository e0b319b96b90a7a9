"""`mesh-llm models` over real stores, and models of those stores that are planned and served."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Ended, mesh_llm
from tests.support.mesh import MeshProcesses
from tests.support.node import SKY, SMALL, NodeProcess, temporary_home
from tests.support.stores import Home, put
from tests.support.waiting import until

WAIT_S = 100.0
MANY = 200
MANY_S = 20.0
"""With every header in the cache. A quiet machine takes half a second; this one is never quiet."""


@pytest.fixture
def home() -> Iterator[Home]:
    """Short, and not pytest's own: nodes keep sockets in it."""
    with temporary_home() as folder:
        yield Home(folder)


@pytest.fixture(scope="session")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Tiny models by architecture, as bytes to put anywhere."""
    folder = tmp_path_factory.mktemp("contents")
    return {
        name: tiny_gguf.write(folder / f"{name}.gguf", name, layers=2).read_bytes()
        for name in ("llama", "qwen3", "gemma3", "deepseek2")
    }


def renamed(content: bytes, old: bytes, new: bytes) -> bytes:
    """The header of the same model under another architecture's name; its weights are noise then."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    changed = content.replace(text(old), text(new))
    for key in set(_keys(content, old)):
        changed = changed.replace(text(key), text(new + key[len(old) :]))
    # The weights begin behind the header, which may end 32 bytes later than its length tells.
    return changed + bytes(32)


def _keys(content: bytes, prefix: bytes) -> Iterator[bytes]:
    at = content.find(prefix + b".")
    while at != -1:
        (length,) = struct.unpack("<Q", content[at - 8 : at])
        if length < 100:
            yield content[at : at + length]
        at = content.find(prefix + b".", at + 1)


def listed(home: Home, *arguments: str) -> dict[str, Any]:
    ended = mesh_llm("models", "--json", *arguments, env=home.env, within_s=WAIT_S)
    assert (ended.status, ended.stderr) == (0, "")
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    return {model["name"]: model for model in document["models"]}


def nodes_of(node: NodeProcess) -> list[Any]:
    status = node.status_or_none()
    return [] if status is None else [each for each in status["mesh"]["nodes"] if each["memory_bytes"]]


def in_terminal(home: Home, columns: int) -> list[str]:
    """What it prints to a terminal of that width, line by line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**os.environ, **home.env, "TERM": "xterm", "COLUMNS": ""}
    with subprocess.Popen([*MESH_LLM, "models"], stdout=theirs, stderr=subprocess.DEVNULL, env=env) as child:
        os.close(theirs)
        screen = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            screen += data
        assert child.wait(WAIT_S) == 0
    os.close(ours)
    return screen.decode().replace("\r\n", "\n").splitlines()


# -- what is listed -------------------------------------------------------------------------------


def test_nothing_there_yet(home: Home) -> None:
    ended = mesh_llm("models", env=home.env, within_s=WAIT_S)

    assert ended == Ended(
        status=0,
        stdout="",
        stderr="No models on this disk yet; mesh-llm download lists models to download\n",
    )
    assert listed(home)["models"] == []


def test_all_stores(home: Home, contents: dict[str, bytes]) -> None:
    mine = home.add("mine-Q8_0.gguf", contents["llama"])
    home.add_hub("owner/repo", "hub.gguf", contents["qwen3"], main=True)
    home.add_lmstudio("publisher/studio", "studio.gguf", contents["gemma3"])
    blob = home.add_ollama("library/deep/7b", contents["deepseek2"])
    home.add_ollama("library/deep/latest", contents["deepseek2"])

    document = listed(home)

    models = by_name(document)
    assert [(m["name"], m["store"], m["repo"], m["architecture"]) for m in models.values()] == [
        ("mine-Q8_0", "models", None, "llama"),
        ("hub", "huggingface", "owner/repo", "qwen3"),
        ("studio", "lmstudio", "publisher/studio", "gemma3"),
        ("ollama:deep:7b", "ollama", None, "deepseek2"),
    ]
    assert models["ollama:deep:7b"]["also"] == ["ollama:deep:latest"]
    assert models["ollama:deep:7b"]["files"] == [str(blob)]
    own = models["mine-Q8_0"]
    assert (own["path"], own["size_bytes"]) == (str(mine), mine.stat().st_size)
    assert (own["quantisation"], own["layers"], own["runs"]) == ("F32", 2, True)
    assert own["fit"]["machine"]["fits"] is True
    assert own["fit"]["mesh"] is None
    assert document["skipped"] == []
    assert document["stores"]["ollama"][0] == str(home.ollama)


def test_a_pipe_gets_one_line_for_each(home: Home, contents: dict[str, bytes]) -> None:
    home.add("mine.gguf", contents["llama"])
    home.add_ollama("library/deep/latest", contents["deepseek2"])

    ended = mesh_llm("models", env=home.env, within_s=WAIT_S)

    head, first, second = ended.stdout.splitlines()
    assert head.split() == ["name", "quant", "size", "layers", "context", "architecture", "where", "fit"]
    assert first.split() == ["mine", "F32", "1", "MB", "2", "8k", "llama", "models", "fits"]
    assert second.split()[0] == "ollama:deep:latest"
    assert ended.stderr == ""


def test_it_reads_well_in_eighty_columns(home: Home, contents: dict[str, bytes]) -> None:
    name = "Qwen3-Coder-480B-A35B-Instruct-UD-Q4_K_XL"
    home.add_hub("unsloth/Qwen3-Coder-480B-A35B-Instruct-GGUF", f"{name}.gguf", contents["qwen3"])
    huge = tiny_gguf.write_sparse(home.path / "huge.gguf", layers=40, hidden=16384, feed_forward=131072)
    home.models.mkdir()
    huge.rename(home.models / "huge.gguf")

    lines = in_terminal(home, 80)

    assert max(map(len, lines)) <= 80
    assert lines[0] == "name"
    assert lines[1].split() == ["quant", "size", "layers", "context", "architecture", "where", "fit"]
    assert [lines[2], lines[4]] == ["huge", name]
    assert lines[3].split()[:5] == ["F16", "516", "GB", "40", "8k"]
    assert lines[3][lines[1].index("fit") :].startswith("needs 5")
    assert lines[5].split()[-2:] == ["huggingface", "fits"]
    # Aligned: every fact begins where its heading does.
    for heading, fact in (("architecture", "qwen3"), ("where", "huggingface"), ("fit", "fits")):
        assert lines[5].index(fact) == lines[1].index(heading)


@pytest.mark.full
def test_a_wide_terminal_shows_more(home: Home, contents: dict[str, bytes]) -> None:
    home.add_hub("owner/repo", "hub.gguf", contents["qwen3"])
    home.add("mine.gguf", contents["llama"])
    home.add_ollama("library/deep/latest", contents["deepseek2"])

    lines = in_terminal(home, 140)

    assert lines[0].split()[-2:] == ["fit", "from"]
    assert [line.split()[-1] for line in lines[1:]] == [
        "~/.models/mine.gguf",
        "owner/repo",
        "~/.ollama/models/blobs",
    ]


# -- what does not fit, or does not run -----------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("libraries")
def test_the_fit_of_a_running_mesh(home: Home, contents: dict[str, bytes]) -> None:
    served = put(home.path / "served.gguf", contents["llama"])
    home.models.mkdir()
    # 1.3 GB of weights that take no room on the disk.
    tiny_gguf.write_sparse(home.models / "middle.gguf", layers=50, hidden=1024, feed_forward=4096)
    with MeshProcesses(home.path / "nodes", served) as mesh:
        (home.path / "nodes").mkdir()
        one = mesh.create("one", "--max-memory", "1GB")
        mesh.join("two", "--max-memory", "1GB")
        one.until(lambda: len(nodes_of(one)) == 2, what="it knows of two nodes", within_s=WAIT_S)
        # Whoever stands still for seconds is not counted for as long.
        document = until(
            lambda: of_two_nodes(listed(home, "--home", str(one.home))),
            within_s=WAIT_S,
            what="a list of what two nodes can do",
        )
        shown = until(
            lambda: first_line(home, one.home, "  fits the mesh"),
            within_s=WAIT_S,
            what="the same list for people",
        )

    fit = by_name(document)["middle"]["fit"]
    assert (fit["machine"]["fits"], fit["machine"]["have_bytes"]) == (False, 10**9)
    assert (fit["mesh"]["fits"], fit["mesh"]["nodes"]) == (True, 2)
    assert shown.startswith("middle ")


def of_two_nodes(document: dict[str, Any]) -> dict[str, Any] | None:
    return document if document["nodes"] == 2 else None


def first_line(home: Home, node: Path, end: str) -> str | None:
    """What is said of the first model, if it ends like that."""
    shown = mesh_llm("models", "--home", node, env=home.env, within_s=WAIT_S)
    line = shown.stdout.splitlines()[1]
    return line if line.endswith(end) else None


def test_missing_shards(home: Home, tmp_path: Path) -> None:
    home.models.mkdir()
    for path in tiny_gguf.write_shards(home.models / "big.gguf", 3, "llama")[1:]:
        path.unlink()

    ended = mesh_llm("models", env=home.env, within_s=WAIT_S)

    assert ended.stdout.splitlines()[1].split()[-2:] == ["files", "missing"]
    missing = "big-00002-of-00003.gguf, big-00003-of-00003.gguf"
    assert ended.stderr == f"big: 2 of its 3 files are missing: {missing}\n"
    model = by_name(listed(home))["big"]
    assert (model["runs"], model["missing"]) == (False, missing.split(", "))


def test_ollamas_own_architectures_are_explained(home: Home, contents: dict[str, bytes]) -> None:
    blob = home.add_ollama(
        "library/glm-4.7-flash/latest", renamed(contents["deepseek2"], b"deepseek2", b"glm4moelite")
    )
    sentence = "glm4moelite is Ollama's own name for GLM-4.7-Flash; upstream calls it deepseek2"

    shown = mesh_llm("models", env=home.env, within_s=WAIT_S)
    model = by_name(listed(home))["ollama:glm-4.7-flash:latest"]
    served = mesh_llm("--model", blob, "--port", "0", env=home.env, within_s=WAIT_S)

    assert shown.stdout.splitlines()[1].split()[-4:] == ["glm4moelite", "ollama", "cannot", "run"]
    assert shown.stderr == f"ollama:glm-4.7-flash:latest: {sentence}; mesh-llm download GLM-4.7-Flash\n"
    assert (model["runs"], model["reason"], model["hint"]) == (
        False,
        sentence,
        "mesh-llm download GLM-4.7-Flash",
    )
    assert served == Ended(
        status=1,
        stdout="",
        stderr=f"Error: {blob.name} cannot be run: {sentence}\nHint: mesh-llm download GLM-4.7-Flash\n",
    )


def test_a_projector_inside_the_file_is_explained(home: Home) -> None:
    """The engine counts the tensors, and refuses those that it has no use for."""
    home.models.mkdir()
    path = tiny_gguf.write(
        home.models / "sees.gguf", "gemma3", layers=2, tensors={"v.blk.0.attn_q.weight": (64, 64)}
    )
    sentence = "its projector is inside the file, as only Ollama has it; the engine takes two files"

    model = by_name(listed(home))["sees"]
    served = mesh_llm("--model", path, "--port", "0", env=home.env, within_s=WAIT_S)

    assert (model["runs"], model["reason"]) == (False, sentence)
    assert served.status == 1
    assert served.stderr.startswith(f"Error: sees.gguf cannot be run: {sentence}\nHint: take the GGUF ")


def test_what_is_no_model_is_left_out_with_a_reason(home: Home, contents: dict[str, bytes]) -> None:
    whole = contents["llama"]
    home.add("good.gguf", whole)
    home.add("cut.gguf", whole[: len(whole) // 2])
    home.add("noise.gguf", b"GGUF" + bytes(range(256)) * 8)
    home.add("text.gguf", b"hello")
    os.mkfifo(home.models / "pipe.gguf")
    (home.models / "loop.gguf").symlink_to("loop.gguf")
    tiny_gguf.write_projector(home.models / "eyes.gguf")
    tiny_gguf.write_projector(home.models / "mmproj-good.gguf")

    document = listed(home)
    shown = mesh_llm("models", env=home.env, within_s=WAIT_S)

    reasons = {Path(each["path"]).name: each["reason"] for each in document["skipped"]}
    assert list(by_name(document)) == ["good"]
    assert reasons.pop("cut.gguf").startswith("is cut short: it has ")
    assert reasons == {
        "noise.gguf": "is not a readable GGUF file",
        "text.gguf": "is not GGUF",
        "pipe.gguf": "cannot be read: it is not a regular file",
        "loop.gguf": "cannot be read: Too many levels of symbolic links",
        "eyes.gguf": "is a projector, which only goes with the model that it was made for",
    }
    assert "Not listed: ~/.models/text.gguf is not GGUF\n" in shown.stderr
    assert len(shown.stdout.splitlines()) == 2


def test_names_that_are_made_to_harm_are_shown_harmless(home: Home, contents: dict[str, bytes]) -> None:
    put(home.models / os.fsdecode(b"\x1b[31m\xff\n.gguf"), contents["llama"])
    put(home.models / os.fsdecode(b"\x1b[2J.gguf"), b"no")

    ended = mesh_llm("models", env=home.env, within_s=WAIT_S)

    assert ended.stdout.splitlines()[1].startswith("?[31m??  ")
    assert ended.stderr == "Not listed: ~/.models/?[2J.gguf is not GGUF\n"
    listed(home)


# -- many -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_hundred_models_come_from_the_cache(home: Home, contents: dict[str, bytes]) -> None:
    kinds = list(contents.values())
    for index in range(MANY):
        home.add(f"model-{index:03d}.gguf", kinds[index % len(kinds)])

    first = mesh_llm("models", env=home.env, within_s=WAIT_S)
    started = time.monotonic()
    second = mesh_llm("models", env=home.env, within_s=WAIT_S)
    took_s = time.monotonic() - started

    assert len(first.stdout.splitlines()) == MANY + 1
    assert first.stdout == second.stdout
    assert first.stderr.splitlines()[-1] == "Reading headers 100 %"
    assert second.stderr == ""
    assert took_s < MANY_S


@pytest.mark.full
def test_what_changed_is_read_again(home: Home, contents: dict[str, bytes]) -> None:
    home.add("x.gguf", contents["llama"])
    assert by_name(listed(home))["x"]["architecture"] == "llama"

    home.add("x.gguf", contents["gemma3"])
    (home.path / "cache" / "headers.json").chmod(0o400)

    assert by_name(listed(home))["x"]["architecture"] == "gemma3"


@pytest.mark.full
def test_a_damaged_cache_is_none(home: Home, contents: dict[str, bytes]) -> None:
    home.add("x.gguf", contents["llama"])
    cache = put(home.path / "cache" / "headers.json", b'{"format": 1, "headers": [')

    assert by_name(listed(home))["x"]["layers"] == 2
    assert json.loads(cache.read_text())["format"] == 2


# -- served ---------------------------------------------------------------------------------------


def test_a_link_of_the_hub_cache_is_planned_by_its_name(home: Home, tmp_path: Path) -> None:
    shards = tiny_gguf.write_shards(tmp_path / "tiny.gguf", 2, "llama")
    links = [home.add_hub("owner/repo", shard.name, shard.read_bytes()) for shard in shards]

    ended = mesh_llm("plan", "--model", links[0], "--json", env=home.env, within_s=WAIT_S)

    assert json.loads(ended.stdout)["model"]["name"] == "tiny"


@pytest.mark.full
def test_a_blob_of_ollamas_is_served_under_its_name(home: Home, smollm2: Path) -> None:
    blob = home.add_ollama("library/smollm2/135m", b"GGUF")
    blob.unlink()
    shutil.copy(smollm2, blob)

    with NodeProcess(*SMALL, home=home.path / "node", model=blob) as node:
        node.until_ready()
        node.until_said("Engine ready", within_s=WAIT_S)
        model = node.ask("/v1/models").json()["data"][0]["id"]
        answer = node.ask("/v1/chat/completions", {**SKY, "model": model}).json()

    assert model == "smollm2:135m"
    assert len(answer["choices"][0]["message"]["content"]) > 20
