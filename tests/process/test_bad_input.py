"""What people get wrong, and what goes wrong around them: one sentence, the right exit code, nothing left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from mesh_llm.defaults import ENGINE_VERSION
from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Ended, Running, mesh_llm
from tests.support.node import SMALL, NodeProcess
from tests.support.packaged import ROOT, interpreter
from tests.support.sampling import first, sampled

HINT_MODEL = "Hint: mesh-llm --model takes the path of a .gguf file, or a name such as smollm2\n"
NOBODY = 65534


def run_node(home: Path, *options: str | Path, env: Mapping[str, str] | None = None) -> Ended:
    """A node that is expected to end by itself, soon."""
    ended = mesh_llm("--home", home, "--port", "0", *options, env=env)
    assert "Traceback" not in ended.stderr
    return ended


# -- model files ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder full of things that are no models."""
    whole = tiny_gguf.write(tmp_path / "whole.gguf", "llama")
    content = whole.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "picture.gguf").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    (tmp_path / "garbage.gguf").write_bytes(b"GGUF" + content[::-1])
    (tmp_path / "header.gguf").write_bytes(content[:1000])
    (tmp_path / "half.gguf").write_bytes(content[: len(content) // 2])
    (tmp_path / "unknown.gguf").write_bytes(content.replace(b"llama", b"lxmax"))
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "dangling.gguf").symlink_to("nowhere")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    first(
        3,
        [
            ("missing.gguf", "Error: there is no file {path}\n" + HINT_MODEL),
            ("dangling.gguf", "Error: there is no file {path}\n" + HINT_MODEL),
            ("folder", "Error: {path} is a folder, not a GGUF file\n" + HINT_MODEL),
            ("pipe.gguf", "Error: {path} is not a regular file\n" + HINT_MODEL),
            ("empty.gguf", "Error: {path} is empty\nHint: download it again\n"),
            (
                "picture.gguf",
                "Error: {path} is not a GGUF file\n"
                "Hint: llama.cpp runs GGUF files; look for one on the model's page\n",
            ),
            (
                "garbage.gguf",
                "Error: {path} is not a readable GGUF file\n"
                "Hint: download it again; the file is damaged or in another format\n",
            ),
            (
                "header.gguf",
                "Error: {path} is not a readable GGUF file\n"
                "Hint: download it again; the file is damaged or in another format\n",
            ),
            ("x" * 300 + ".gguf", "Error: cannot read {path}: File name too long\n"),
        ],
    ),
)
def test_what_is_no_model(files: Path, home: Path, tmp_path: Path, name: str, words: str) -> None:
    cache = tmp_path / "cache"

    ended = run_node(home, "--model", files / name, env={"MESH_LLM_CACHE": str(cache)})

    assert ended.status == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith(words.format(path=files / name))
    # Looked at first: nothing is built for a file that cannot be used.
    assert not cache.exists()


def test_a_model_that_is_cut_short(files: Path, home: Path) -> None:
    path = files / "half.gguf"

    ended = run_node(home, "--model", path)

    size, whole = path.stat().st_size, (files / "whole.gguf").stat().st_size
    assert ended.status == 1
    assert ended.stderr == (
        f"Error: {path} is cut short: it has {size:,} bytes and its tensors need {whole:,}\n"
        "Hint: download it again\n"
    )


def test_a_missing_shard(home: Path, tmp_path: Path) -> None:
    shards = tiny_gguf.write_shards(tmp_path / "split.gguf", 3, "llama")
    shards[0].unlink()

    ended = run_node(home, "--model", shards[1])

    assert ended.status == 1
    assert ended.stderr == (
        "Error: split-00002-of-00003.gguf needs 3 files and 1 of them are missing: "
        "split-00001-of-00003.gguf\n"
        f"Hint: put them beside it in {tmp_path}\n"
    )


def test_an_unknown_architecture(files: Path, home: Path, libraries: dict[str, Path]) -> None:
    ended = run_node(home, "--model", files / "unknown.gguf", *SMALL)

    assert ended.status == 1
    assert ended.stderr == (
        "Error: unknown.gguf cannot be run: lxmax is an architecture that this engine does not know\n"
        "Hint: a newer mesh-llm may; mesh-llm download lists models that work\n"
    )


def test_an_unknown_name_suggests_the_nearest(home: Path) -> None:
    ended = run_node(home, "--model", "smolm2")

    assert ended.status == 1
    assert ended.stderr == (
        "Error: smolm2 is neither a file nor a model that mesh-llm knows by name\n"
        "Hint: did you mean smollm2?\n"
    )


@pytest.mark.parametrize("closed", sampled(["file", "folder"], "file"))
def test_a_model_that_may_not_be_read(home: Path, tiny_model: Path, closed: str) -> None:
    place = home / "place"
    place.mkdir(mode=0o755)
    path = place / "tiny.gguf"
    shutil.copyfile(tiny_model, path)
    home.chmod(0o755)
    own = home / "own"
    own.mkdir()
    as_nobody: list[str] = []
    if os.geteuid() == 0:
        os.chown(own, NOBODY, NOBODY)
        as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if not shutil.which("setpriv") or not can_run(as_nobody):
            pytest.skip("root may read everything, and nobody else can run mesh-llm here")
    (path if closed == "file" else place).chmod(0)

    with Running(
        [*as_nobody, *MESH_LLM, "--home", own, "--port", "0", "--model", path], env={"HOME": str(own)}
    ) as running:
        ended = running.wait()

    place.chmod(0o755)
    assert ended.status == 1
    assert ended.stderr == f"Error: cannot read {path}: Permission denied\nHint: chmod +r {path}\n"


def can_run(prefix: list[str]) -> bool:
    tried = subprocess.run([*prefix, *MESH_LLM, "--version"], capture_output=True, check=False)
    return tried.returncode == 0


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    first(
        6,
        [
            (["--ctx-size", "0"], "--ctx-size 0 is not between 1 and 134,217,728"),
            (["--ctx-size", "-1"], "--ctx-size -1 is not between 1 and 134,217,728"),
            (
                ["--ctx-size", "1000000000"],
                "--ctx-size 1000000000 is not between 1 and 134,217,728",
            ),
            (["--parallel", "0"], "--parallel 0 is not between 1 and 256"),
            (["--parallel", "-1"], "--parallel -1 is not between 1 and 256"),
            (
                ["--parallel", "1000000000"],
                "--parallel 1000000000 is not between 1 and 256",
            ),
            (
                ["--listen", "0.0.0.0"],
                "--listen 0.0.0.0 opens the API to the network, but there is no --api-key",
            ),
            (["--tls-cert", "cert.pem"], "--tls-cert and --tls-key belong together"),
            (["--engine-set", "n_bath=1"], "--engine-set n_bath=1: no such setting"),
            (["--max-memory", "lots"], "'lots' is not a size"),
            (["--max-memory", "0"], "--max-memory 0 leaves no memory for a model"),
            (["--max-memory", "0.4"], "--max-memory 0.4 would be 0.4 bytes"),
            (["--max-memory", "8"], "--max-memory 8 would be 8 bytes\nHint: did you mean 8GB?"),
            (["--max-memory", ""], "'' is not a size"),
            (["--mmproj", "/no/such"], "--mmproj /no/such: there is no such file"),
            (["--lora", "/no/such"], "--lora /no/such: there is no such file"),
            (["--lora-scaled", "/no/such:1"], "--lora /no/such: there is no such file"),
            (
                ["--lora-scaled", "a.gguf"],
                "--lora-scaled a.gguf: the scale is missing, or not a number",
            ),
            (
                ["--lora-scaled", "/dev/null:x"],
                "--lora-scaled /dev/null:x: the scale is missing, or not a number",
            ),
            (["--model", ""], "--model is empty"),
        ],
    ),
)
def test_absurd_options_end_with_2(home: Path, options: list[str], words: str) -> None:
    ended = run_node(home, "--model", "/never/looked/at.gguf", *options)

    assert ended.status == 2
    assert ended.stderr.startswith(f"Error: {words}\n")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("damaged", "is not a GGUF file\nHint: "),
        (
            "model",
            "this is not a LoRA adapter\nHint: adapters are made with llama.cpp's convert_lora_to_gguf.py",
        ),
        (
            "qwen3",
            "it is for qwen3, and the model is llama\nHint: take an adapter that was made for this model",
        ),
        ("wide", "its blk.0.attn_q.weight does not fit the model's\nHint: take an adapter that was made for"),
        ("deep", "the model has no tensor blk.4.attn_q.weight\nHint: take an adapter that was made for"),
    ],
)
def test_an_adapter_that_does_not_go_with_the_model(
    home: Path, tmp_path: Path, made: str, words: str
) -> None:
    model = tiny_gguf.write(tmp_path / "model.gguf", "llama", hidden=64, layers=4)
    adapter = tmp_path / "adapter.gguf"
    match made:
        case "damaged":
            adapter.write_bytes(b"no adapter")
        case "model":
            adapter.write_bytes(model.read_bytes())
        case _:
            kind = "qwen3" if made == "qwen3" else "llama"
            hidden, layers = 128 if made == "wide" else 64, 6 if made == "deep" else 4
            base = tiny_gguf.write(tmp_path / "base.gguf", kind, hidden=hidden, layers=layers)
            tiny_gguf.write_adapter(adapter, base, among=("attn_q.weight",))

    ended = run_node(home, "--model", model, "--lora", adapter)

    assert ended.status == 1
    assert ended.stderr.startswith("Error: ")
    assert f"{adapter}" in ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_context_beyond_memory_waits_and_says_what_would_help(home: Path, tiny_model: Path) -> None:
    options = ("--ctx-size", "134217728", "--parallel", "1")
    with NodeProcess(*options, home=home, model=tiny_model) as node:
        node.until_said("On this machine alone: ")

        assert "Waiting for more peers: need 274.9 GB for the model, have " in node.stdout
        assert "On this machine alone: --ctx-size 8192 would fit, as would a smaller" in node.stdout


@pytest.mark.full
def test_a_model_beyond_the_memory_that_is_lent_waits(home: Path, tiny_model: Path) -> None:
    options = ("--max-memory", "1MB", "--parallel", "1")
    with NodeProcess(*options, home=home, model=tiny_model) as node:
        node.until_said("On this machine alone: ")
        document = node.until_state("waiting")

        assert document["plan"]["mode"] == "waiting"
        assert document["plan"]["need_bytes"] > 10**6
        assert document["plan"]["have_bytes"] == 10**6
        assert "Waiting for more peers: need 4 MB for the model, have 1 MB on 1 node\n" in node.stdout
        assert "On this machine alone: it needs " in node.stdout


def test_an_unknown_device(home: Path, tiny_model: Path) -> None:
    ended = run_node(home, "--model", tiny_model, "--device", "CUDA7")

    assert ended.status == 2
    assert ended.stderr.startswith(
        "Error: --device CUDA7: there is no such device\nHint: this machine has CPU"
    )


# -- others ---------------------------------------------------------------------------------------


def test_a_port_in_use_names_its_owner(home: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = mesh_llm("--home", home, "--model", tiny_model, "--port", str(port))

    assert ended.status == 1
    error, hint, _ = ended.stderr.split("\n")
    assert error.startswith(f"Error: port {port} is in use by ")
    assert error.endswith(f"(pid {os.getpid()})")
    assert hint == "Hint: --port 0 takes any free port"


def test_a_home_in_use_names_its_holder(home: Path, tiny_model: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=tiny_model) as node:
        node.until_ready()

        second = run_node(home, "--model", tiny_model)

        assert second.status == 1
        assert second.stderr == (
            f"Error: {home} is in use by the node with pid {node.pid}\n"
            "Hint: mesh-llm stop ends it; --home DIR starts a second node beside it\n"
        )
        assert node.status()["node"]["state"] == "serving"


def test_a_home_that_cannot_be(home: Path, tiny_model: Path) -> None:
    (home / "file").touch()

    ended = run_node(home / "file", "--model", tiny_model)

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: cannot create {home}/file")


def on_disk(home: Path, disk: str, *arguments: str | Path, verb: tuple[str, ...] = ()) -> Ended:
    """`mesh-llm ARGUMENTS` where a disk of its own lies at `home`, prepared by the commands of `disk`."""
    if (reason := cannot_mount()) is not None:
        pytest.skip(reason)
    script = f'set -e; cd {home}; {disk}; cd /; exec "$@"'
    argv = ["unshare", "-rm", "sh", "-c", script, "sh", *MESH_LLM, *verb, "--home", home, *arguments]
    with Running(argv) as running:
        ended = running.wait()
    assert "Traceback" not in ended.stderr
    return ended


def cannot_mount() -> str | None:
    tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@pytest.mark.parametrize("before", ["", "mkdir -m 700 run logs;"])
def test_a_read_only_home(home: Path, tiny_model: Path, before: str) -> None:
    disk = f"mount -t tmpfs tmpfs {home}; cd {home}; {before} mount -o remount,ro {home}"

    ended = on_disk(home, disk, "--model", tiny_model, "--port", "0")

    assert ended.status == 1
    assert ended.stderr == (
        f"Error: {home} cannot be written to: Read-only file system\n"
        "Hint: choose another folder with --home or MESH_LLM_HOME\n"
    )


def test_a_disk_that_is_full(home: Path, tiny_model: Path) -> None:
    disk = f"mount -t tmpfs -o size=4k tmpfs {home}; cd {home}; echo full > file"

    ended = on_disk(home, disk, "--model", tiny_model, "--port", "0")

    assert ended.status == 1
    assert ended.stderr.endswith(
        "No space left on device\nHint: make room (df -h shows where), then try again\n"
    )
    assert ended.stderr.startswith("Error: ")


def test_a_disk_that_is_full_keeps_what_a_command_would_change(home: Path) -> None:
    earlier = '{"keys": []}'
    keys = f"printf '{earlier}' > {home}/keys.json; touch keys.lock; cat /dev/zero > fill 2>/dev/null || true"
    disk = f"mount -t tmpfs -o size=16k tmpfs {home}; cd {home}; {keys}"
    seen = 'cd "$0"; "$@" || status=$?; cat keys.json; ls -A; exit $status'

    ended = on_disk(home, f"{disk}; set -- sh -c '{seen}' {home} \"$@\"", verb=("keys", "add", "guest"))

    assert ended.status == 1
    assert ended.stdout == f"{earlier}fill\nkeys.json\nkeys.lock\n"
    assert ended.stderr == (
        f"Error: {home}/keys.json: No space left on device\n"
        "Hint: make room (df -h shows where), then try again\n"
    )


@pytest.mark.parametrize("version", ["3.6", "3.10"])
def test_an_old_python(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    env = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    with Running([python, "-m", "mesh_llm", "--version"], env=env) as running:
        ended = running.wait()

    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"Error: Python 3.11 or newer is needed; this is {version}\n"
        "Hint: run it with a newer one, such as python3.12 -m mesh_llm\n"
    )


# -- the engine -----------------------------------------------------------------------------------


HIDE_ENGINE = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.split(".")[0] == "xllamacpp" else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_others
"""


@pytest.mark.parametrize("model", sampled(["tiny", "smollm2"], "tiny"))
def test_an_engine_that_is_not_installed(home: Path, tmp_path: Path, tiny_model: Path, model: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_ENGINE)
    env = {"PYTHONPATH": str(tmp_path), "MESH_LLM_MODELS": str(tmp_path / "models")}

    ended = run_node(home, "--model", tiny_model if model == "tiny" else model, env=env)

    assert ended.status == 1
    assert ended.stderr == (
        f"Error: the engine (xllamacpp {ENGINE_VERSION}) is not installed\n"
        "Hint: make setup from a clone, or pip install 'mesh-llm[engine]'\n"
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "verb", sampled([["--model", "tiny"], ["engine", "info"], ["engine", "build"]], ["--model", "tiny"])
)
def test_an_engine_of_another_version(home: Path, tmp_path: Path, tiny_model: Path, verb: list[str]) -> None:
    installed = tmp_path / "packages" / "xllamacpp-1.2.3.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 1.2.3\n")
    env = {"PYTHONPATH": str(installed.parent), "MESH_LLM_CACHE": str(tmp_path / "cache")}
    arguments = ["--home", str(home), "--model", str(tiny_model)] if verb[0] == "--model" else verb

    ended = mesh_llm(*arguments, env=env)

    assert ended.status == 1
    assert ended.stderr == (
        f"Error: the engine installed is xllamacpp 1.2.3; this mesh-llm needs {ENGINE_VERSION}\n"
        "Hint: make setup from a clone, or pip install 'mesh-llm[engine]'\n"
    )
