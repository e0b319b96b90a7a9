"""`mesh-llm lab delay` as a person or a script uses it: it says where it listens, obeys, and reports."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mesh_llm.lab.rpc_proxy import COMMANDS

WAIT_S = 30.0
COMMAND = [sys.executable, "-m", "mesh_llm", "lab", "delay"]


def echo(end: socket.socket) -> None:
    """Every five bytes."""
    while data := end.recv(5, socket.MSG_WAITALL):
        end.sendall(data)


@contextmanager
def target(answer: Callable[[socket.socket], None] = echo) -> Iterator[str]:
    """For one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                answer(end)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        serving.join(WAIT_S)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    document: dict[str, Any] = json.loads(process.stdout.readline())
    return document


def test_a_line_is_changed_by_its_input_and_tells_what_passed() -> None:
    with (
        target() as where,
        subprocess.Popen(
            [*COMMAND, "127.0.0.1:0", where, "--delay", "100,0", "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            told = said(process)
            assert told["target"] == f"tcp:{where}"
            assert (told["there"]["delay_s"], told["back"]["delay_s"]) == (0.1, 0.0)
            host, port = told["listening"].removeprefix("tcp:").split(":")
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as end:
                began = time.monotonic()
                end.sendall(b"token")
                assert end.recv(5, socket.MSG_WAITALL) == b"token"
                assert time.monotonic() - began >= 0.1
                process.stdin.write("delay 0,300 loss 0\nloss much\n")
                assert said(process)["back"]["delay_s"] == 0.3
                assert "loss much: give one number" in process.stderr.readline()
                began = time.monotonic()
                end.sendall(b"again")
                assert end.recv(5, socket.MSG_WAITALL) == b"again"
                assert time.monotonic() - began >= 0.3
                process.stdin.write("show\n")
                assert said(process)["passed"]["there"]["size_bytes"] == 10
            process.stdin.close()  # the line stays
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGINT)
        assert said(process)["passed"]["back"]["size_bytes"] == 10
        assert process.wait(WAIT_S) == 0


def rpc_command(name: str, size: int = 0) -> bytes:
    return struct.pack("<BQ", COMMANDS.index(name), size) + bytes(size)


def rpc_answer(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


def rpc_server(end: socket.socket) -> None:
    """As stock ggml-rpc answers: its version, nothing to a graph, and a tensor."""
    hello, graph, get = (
        rpc_command("HELLO", 24),
        rpc_command("GRAPH_COMPUTE", 2000),
        rpc_command("GET_TENSOR"),
    )
    if end.recv(len(hello), socket.MSG_WAITALL) == hello:
        end.sendall(rpc_answer(bytes((8, 0, 3, 0)) + bytes(24)))
    if end.recv(len(graph + get), socket.MSG_WAITALL) == graph + get:
        end.sendall(rpc_answer(bytes(3000)))
    end.recv(1)


def test_a_line_before_stock_rpc_delays_what_computes_and_tells_each_command() -> None:
    with (
        target(rpc_server) as where,
        subprocess.Popen(
            [*COMMAND, "127.0.0.1:0", where, "--rpc", "--delay", "300,0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            here, port = process.stdout.readline().split()[0].removeprefix("tcp:").split(":")
            with socket.create_connection((here, int(port)), timeout=WAIT_S) as end:
                end.sendall(rpc_command("HELLO", 24))
                assert len(end.recv(36, socket.MSG_WAITALL)) == 36
                began = time.monotonic()
                end.sendall(rpc_command("GRAPH_COMPUTE", 2000) + rpc_command("GET_TENSOR"))
                assert len(end.recv(3008, socket.MSG_WAITALL)) == 3008
                assert time.monotonic() - began >= 0.3
        finally:
            process.send_signal(signal.SIGINT)
        told = process.stdout.read()
        # It has a standard input that says nothing.
        assert process.stderr.read() == ""
        assert process.wait(WAIT_S) == 0

    assert "3 commands, 1 of them computed" in told
    counted = {words[0]: words[1:] for line in told.splitlines() if (words := line.split())}
    assert counted["GRAPH_COMPUTE"] == ["1", "2.0", "kB", "0.0", "kB"]
    assert counted["GET_TENSOR"] == ["1", "0.0", "kB", "3.0", "kB"]
    assert counted["HELLO"][0] == "1"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("127.0.0.1:0", "udp:127.0.0.1:9"), "datagrams and streams cannot be joined"),
        (("udp:127.0.0.1:0", "udp:127.0.0.1:9", "--rpc"), "--rpc needs a stream"),
        (("0.0.0.0:0", "127.0.0.1:9"), "on this machine alone"),
        (("127.0.0.1:0", "127.0.0.1:9", "--loss", "100"), "a loss of 100%"),
        (("127.0.0.1:0", "127.0.0.1:9", "--jitter", "5"), "a jitter of 5 ms"),
    ],
)
def test_what_cannot_be_is_told(arguments: tuple[str, ...], sentence: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
