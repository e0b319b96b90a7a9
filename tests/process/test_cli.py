"""The command line as programs and impatient people use it."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mesh_llm import __version__
from mesh_llm.cli import entry, main
from mesh_llm.defaults import ENGINE_VERSION, PROTOCOL_VERSION
from tests.support.command import MESH_LLM, mesh_llm

QUICK = 25
"""Times what an interpreter takes that does nothing: half a second where that one takes 20 ms."""

# Refuses to import the engine and everything that takes long to load.
WITHOUT_ENGINE = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("xllamacpp", "aiohttp", "numpy", "prometheus_client"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
sys.argv = ["mesh-llm", *sys.argv[1:]]
runpy.run_module("mesh_llm", run_name="__main__")
"""


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_and_version_load_no_engine(option: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_ENGINE, option],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_quick(option: str) -> None:
    def processor_s(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    nothing, taken = [], []
    for _ in range(3):
        nothing.append(processor_s("-c", "pass"))
        taken.append(processor_s("-m", "mesh_llm", option))

    # The best of them, and against the same machine in the same moment: a busy one makes all of them longer.
    assert min(taken) < QUICK * min(nothing)


def test_ctrl_c_before_anything_is_imported_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    ended = subprocess.run(
        [sys.executable, "-c", "from mesh_llm.cli.entry import main; main()", "status"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (130, "")


def test_version() -> None:
    assert mesh_llm("--version").stdout == (
        f"mesh-llm, version {__version__} (engine xllamacpp {ENGINE_VERSION}, protocol {PROTOCOL_VERSION})\n"
    )


def test_the_help_that_lies_ready_is_that_of_the_options() -> None:
    assert entry.HELP.read_text() == main.help_text(entry.HELP_COLUMNS), "make fmt writes it anew"


def test_help_lists_the_verbs_and_the_defaults() -> None:
    text = mesh_llm("--help").stdout
    words = " ".join(text.split())

    assert words.startswith("Usage: mesh-llm [OPTIONS]")
    for verb in (
        "serve",
        "status",
        "plan",
        "invite",
        "promote",
        "leave",
        "stop",
        "download",
        "models",
        "service",
        "logs",
        "doctor",
        "engine",
        "relay",
        "completion",
        "man",
        "demo",
    ):
        assert f"\n  {verb} " in text
    assert "[default: 9337]" in words
    assert "(default: the mesh's model when joining one, smollm2 otherwise)" in words


LISTED = "mesh-llm --help lists commands and options"


@pytest.mark.parametrize(
    ("arguments", "message", "verb"),
    [
        (["--no-such-option"], "No such option '--no-such-option'.", ""),
        (["no-such-verb"], "No such command 'no-such-verb'.", ""),
        (["--port", "many"], "Invalid value for '--port': 'many' is not a valid integer.", ""),
        (["--cache-type-k", "q9"], "Invalid value for '--cache-type-k': 'q9' is not one of ", ""),
        (["engine"], None, ""),
        (["engine", "destroy"], "No such command 'destroy'.", "engine"),
        (["invite", "--role", "king"], "Invalid value for '--role': 'king' is not one of ", "invite"),
        (["invite", "--uses", "0"], "Invalid value for '--uses': 0 is not in the range x>=1.", "invite"),
        (["promote"], "Missing argument 'NAME'.", "promote"),
        (["download", "a", "b"], "Got unexpected extra argument (b)", "download"),
        (["bench", "transport", "--quick"], "No such option '--quick'.", "bench transport"),
        (["--port", "0", "status"], "--port comes before status; options go after the command", ""),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], message: str | None, verb: str) -> None:
    ended = mesh_llm(*arguments)

    assert ended.status == 2
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    if message is not None:
        assert ended.stderr.startswith(f"Error: {message}")
        usual = f"mesh-llm {verb} --help lists what it takes" if verb else LISTED
        assert ended.stderr.endswith(f"Hint: {usual}\n")


def test_download_lists_what_there_is(smollm2: Path, tmp_path: Path) -> None:
    here = mesh_llm("download", "--json")
    elsewhere = mesh_llm("download", "--json", env={"MESH_LLM_MODELS": str(tmp_path)})
    table = mesh_llm("download")

    entry = json.loads(here.stdout)[0]
    assert (entry["name"], entry["size_bytes"], entry["here"]) == ("smollm2", 98362432, True)
    assert json.loads(elsewhere.stdout)[0]["here"] is False
    headers, first, *_ = table.stdout.splitlines()
    assert headers.split() == ["name", "size", "quant", "machine", "mesh", "here", "draft"]
    assert first.split() == ["smollm2", "98", "MB", "Q4_1", "fits", "-", "yes", "-"]


def test_download_of_what_is_here(smollm2: Path) -> None:
    ended = mesh_llm("download", "smollm2")
    as_json = mesh_llm("download", "smollm2", "--json")

    assert (ended.status, ended.stdout, ended.stderr) == (0, f"{smollm2}\n", "")
    assert json.loads(as_json.stdout) == {
        "name": "smollm2",
        "path": str(smollm2),
        "files": [str(smollm2)],
        "size_bytes": 98362432,
    }


def test_download_checks_every_byte_on_demand(smollm2: Path, tmp_path: Path) -> None:
    good = mesh_llm("download", "smollm2", "--check", "--json")
    copy = tmp_path / smollm2.name
    (tmp_path / f"{smollm2.name}.sha256").write_text(f"{'0' * 64}  {smollm2.name}\n")
    copy.symlink_to(smollm2)
    bad = mesh_llm("download", "smollm2", "--check", env={"MESH_LLM_MODELS": str(tmp_path)})

    assert json.loads(good.stdout)["sha256"].startswith("b179c9523d0e")
    assert bad.status == 1
    assert bad.stderr.startswith(f"Error: {copy} is damaged: its sha256 is b179c9523d0e…, ")
    assert " 000000000000…" in bad.stderr


def test_engine_info(libraries: dict[str, Path]) -> None:
    ended = mesh_llm("engine", "info", "--json")
    table = mesh_llm("engine", "info")

    document = json.loads(ended.stdout)
    assert ended.status == table.status == 0
    assert document["version"] == ENGINE_VERSION
    assert document["build"] == int(ENGINE_VERSION.rsplit(".", 1)[1])
    assert Path(document["wheel"]).is_file()
    cpu = next(device for device in document["devices"] if device["kind"] == "cpu")
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    assert f", {cpu['total_bytes'] / 1e9:.1f} GB\n" in table.stdout.replace(" \n", "\n")
    assert document["cpu_features"]
    for name, path in libraries.items():
        assert document["libraries"][name] == {"native": True, "path": str(path), "prebuilt": False}
        assert str(path) in table.stdout


def test_engine_info_where_nothing_is_built(tmp_path: Path) -> None:
    ended = mesh_llm("engine", "info", "--json", env={"MESH_LLM_CACHE": str(tmp_path)})

    libraries = json.loads(ended.stdout)["libraries"]
    assert libraries["cpu"] == {
        "native": False,
        "path": None,
        "instead": "not built yet; the wheel's own code is used",
    }


def test_engine_build_of_what_is_built(libraries: dict[str, Path]) -> None:
    if not {"mesh", "cpu"} <= set(libraries):
        pytest.skip("the native libraries cannot be built on this machine")
    ended = mesh_llm("engine", "build", "--json")

    assert json.loads(ended.stdout) == {name: str(path) for name, path in libraries.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--json"],
        ["status", "--watch"],
        ["stop", "--json"],
        ["leave"],
        ["invite"],
        ["invite", "--role", "owner", "--uses", "1"],
        ["promote", "two"],
        ["demo", "stop"],
    ],
)
def test_verbs_that_need_a_node_say_so(home: Path, arguments: list[str]) -> None:
    ended = mesh_llm(*arguments, env={"MESH_LLM_HOME": str(home)})

    where = home / "demo" if arguments[0] == "demo" else home
    assert ended.status == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        f"Error: no node is running on {where}\nHint: start one with mesh-llm, or give its --home\n"
    )


@pytest.mark.parametrize(
    ("kind", "body"),
    [("text/plain", "hello"), ("application/json", "{"), ("application/json", "[1]")],
)
def test_a_node_whose_answer_makes_no_sense(home: Path, kind: str, body: str) -> None:
    """As one of another version may give, or another program on its socket."""
    (home / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(home / "run" / "control.sock"))
        door.listen()

        def answer() -> None:
            link, _ = door.accept()
            with link:
                link.recv(1 << 16)
                head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
                link.sendall(f"{head}{body}".encode())

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        ended = mesh_llm("status", "--home", home)
        answering.join(30)

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: what the node on {home} answers cannot be read\nHint: ")
    assert "Traceback" not in ended.stderr


def test_a_reader_that_leaves_is_no_mistake(smollm2: Path) -> None:
    writer = subprocess.Popen([*MESH_LLM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.stderr is not None
    with writer.stderr:
        words = writer.stderr.read()
    writer.wait(60)

    assert b"Traceback" not in words


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("verb", ["--help", "--version", "keys list --json", "engine info", "models --json"])
def test_output_that_cannot_be_written(home: Path, verb: str) -> None:
    """Also what only the end of Python would write, and where a reader has left before it."""
    argv = [*MESH_LLM, *verb.split()]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    variables |= {"MESH_LLM_HOME": str(home), "MESH_LLM_MODELS": str(home)}

    with Path("/dev/full").open("w") as full:
        lost = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=variables
        )
    ours, theirs = os.pipe()
    os.close(ours)
    left = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, env=variables)
    os.close(theirs)

    assert lost.stderr == (
        "Error: standard output: No space left on device\n"
        "Hint: make room (df -h shows where), then try again\n"
    )
    assert lost.returncode == 1
    assert (left.returncode, left.stderr) == (1, "")


def test_a_verb_of_verbs_alone_lists_them() -> None:
    ended = mesh_llm("keys")

    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Usage: mesh-llm keys [OPTIONS] COMMAND")
    assert "revoke" in ended.stderr
    assert "Error" not in ended.stderr
