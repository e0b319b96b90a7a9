"""`mesh-llm lab delay` as a person or a script uses it: it says where it listens, obeys, and reports."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

WAIT_S = 30.0
COMMAND = [sys.executable, "-m", "mesh_llm", "lab", "delay"]


@contextmanager
def target() -> Iterator[str]:
    """Answers every five bytes of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def serve() -> None:
            end, _ = listener.accept()
            with end:
                while data := end.recv(5, socket.MSG_WAITALL):
                    end.sendall(data)

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
