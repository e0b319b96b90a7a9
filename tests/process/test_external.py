"""--bin-dir: a llama-server that the user built. Here it is a small program that talks like one."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from mesh_llm.defaults import ENGINE_VERSION
from tests.support.command import mesh_llm
from tests.support.node import SKY, SMALL, NodeProcess

BUILD = ENGINE_VERSION.rsplit(".", 1)[1]
ORPHAN_S = 10.0
"""For one whose owner was killed to be gone, on a busy machine: a tenth of a second otherwise."""

LLAMA_SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    print("version: {build} (abcdef0)\\nbuilt with a pen", file=sys.stderr)
    raise SystemExit

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {{"arguments": sys.argv[1:]}})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer " + os.environ["LLAMA_API_KEY"]:
            return self.answer(401, {{"error": {{"message": "wrong key"}}}})
        self.answer(200, {{"choices": [{{"message": {{"content": "from the user's own build"}}}}]}})

    def log_message(self, *words):
        pass

assert sys.argv[sys.argv.index("--host") + 1] == "127.0.0.1"
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
port = server.server_address[1]
print(f"main: server is listening on http://127.0.0.1:{{port}}", file=sys.stderr, flush=True)
server.serve_forever()
"""


def write_server(folder: Path, *, build: str = BUILD) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable, build=build))
    program.chmod(0o755)
    return folder


def server_of(node: NodeProcess) -> psutil.Process:
    return next(process for process, words in node.command_lines().items() if "--alias" in words)


def test_it_answers_through_the_node(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    with NodeProcess(*SMALL, "--bin-dir", folder, home=home, model=tiny_model) as node:
        node.until_ready()
        reply = node.ask("/v1/chat/completions", SKY)
        arguments = node.ask("/props").json()["arguments"]

        assert reply.json()["choices"][0]["message"]["content"] == "from the user's own build"
        assert f"Engine: llama-server in {folder}\n" in node.stdout
        assert arguments[arguments.index("--model") + 1] == str(tiny_model)
        assert arguments[arguments.index("--ctx-size") + 1] == "2048"
        assert arguments[arguments.index("--parallel") + 1] == "1"
        node.stop()
        assert node.wait().status == 0


def test_it_ends_with_a_killed_node(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    with NodeProcess(*SMALL, "--bin-dir", folder, home=home, model=tiny_model) as node:
        node.until_ready()
        assert server_of(node).is_running()

        node.signal(signal.SIGKILL)

        node.until_no_descendants(within_s=ORPHAN_S)


@pytest.mark.full
def test_it_comes_back_when_it_is_killed(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    with NodeProcess(*SMALL, "--bin-dir", folder, home=home, model=tiny_model) as node:
        node.until_ready()

        server_of(node).kill()

        node.until_said("Engine lost: the engine was killed (SIGKILL). Restarting it")
        node.until(lambda: node.status()["engine"]["restarts"] == 1, what="it is started again")
        node.until_state("serving")
        assert node.ask("/v1/chat/completions", SKY).status == 200


@pytest.mark.full
def test_it_comes_back_when_it_hangs(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    with NodeProcess(*SMALL, "--bin-dir", folder, home=home, model=tiny_model) as node:
        node.until_ready()
        first = server_of(node)

        first.suspend()

        node.until_said("Engine lost: the engine did not answer for 6 s, and was ended.")
        node.until(lambda: node.status()["engine"]["restarts"] == 1, what="it is started again")
        node.until_state("serving")
        assert first.pid not in [process.pid for process in node.descendants()]
        assert node.ask("/v1/chat/completions", SKY).status == 200


@pytest.mark.full
def test_it_goes_with_the_process_that_watches_it(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    with NodeProcess(*SMALL, "--bin-dir", folder, home=home, model=tiny_model) as node:
        node.until_ready()
        first = server_of(node)

        node.engine().kill()

        node.until(
            lambda: not first.is_running(),
            what="the llama-server without a watcher is gone",
            within_s=ORPHAN_S,
        )
        node.until_state("serving")


def test_another_build_is_refused(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin", build="4242")

    ended = mesh_llm("--home", home, "--model", tiny_model, "--port", "0", "--bin-dir", folder)

    assert ended.status == 1
    assert ended.stdout == ""
    assert ended.stderr == (
        f"Error: llama-server in {folder} is build 4242; this mesh-llm needs build {BUILD}\n"
        f"Hint: check out llama.cpp's tag b{BUILD} and build it again\n"
    )


def test_a_folder_without_one_is_refused(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    ended = mesh_llm("--home", home, "--model", tiny_model, "--port", "0", "--bin-dir", tmp_path)

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: there is no llama-server in {tmp_path}\nHint: ")


@pytest.mark.full
def test_a_server_that_ends_at_once_is_explained(home: Path, tmp_path: Path, tiny_model: Path) -> None:
    folder = write_server(tmp_path / "bin")
    program = folder / "llama-server"
    words = f"echo 'version: {BUILD} (x)'"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {words}\necho "no such cake" >&2\nexit 3\n')

    ended = mesh_llm("--home", home, "--model", tiny_model, "--port", "0", "--bin-dir", folder)

    assert ended.status == 1
    assert ended.stderr == (f"Error: the engine ended: no such cake\nHint: its log: {home}/logs/engine.log\n")


@pytest.mark.parametrize("option", [["--engine-set", "warmup=false"]])
def test_settings_of_the_bundled_engine_are_refused(
    home: Path, tmp_path: Path, tiny_model: Path, option: list[str]
) -> None:
    folder = write_server(tmp_path / "bin")

    ended = mesh_llm("--home", home, "--model", tiny_model, "--port", "0", "--bin-dir", folder, *option)

    assert ended.status == 2
    assert ended.stderr.startswith("Error: --engine-set is for the bundled engine")
    assert json.dumps(ended.stdout) == '""'
