"""`mesh-llm chat` with a real node, from a pipe and in a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import MESH_LLM, mesh_llm
from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.screen import Screen, in_terminal

KEY = "a-key-of-the-node"


@pytest.fixture(scope="module")
def node(tiny_model: Path) -> Iterator[NodeProcess]:
    options = (*SMALL, "--predict", "12", "--name", "desk")
    with temporary_home() as home, keyed(home / "one", tiny_model, *options) as node:
        yield node.until_ready()


def keyed(home: Path, model: Path, *options: str) -> NodeProcess:
    return NodeProcess(*options, home=home, model=model, env={"MESH_LLM_API_KEY": KEY})


def chat(node: NodeProcess, *arguments: str, typed: str = "", key: str = KEY) -> tuple[int, str, str]:
    command = [*MESH_LLM, "chat", "--home", str(node.home), *arguments]
    ended = subprocess.run(
        ["env", f"MESH_LLM_API_KEY={key}", *command],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_what_is_piped_in_is_answered(node: NodeProcess) -> None:
    status, answer, errors = chat(node, typed="What is this?\n")
    assert (status, errors) == (0, "")
    assert answer.strip()
    assert answer.endswith("\n")
    assert chat(node, "What", "is this?", typed="And this?\n")[::2] == (0, "")


def test_nothing_is_not_answered(node: NodeProcess) -> None:
    assert chat(node)[0] == 2


def test_a_key_is_asked_for(node: NodeProcess) -> None:
    assert chat(node, "Hi", key="")[::2] == (
        1,
        "Error: this node needs its API key\nHint: set MESH_LLM_API_KEY, or give --api-key @FILE\n",
    )
    assert chat(node, "Hi", key="wrong")[0] == 1


def test_the_owners_own_key_is_found_in_the_config(node: NodeProcess) -> None:
    file = node.home / "config.toml"
    file.write_text(f'api-key = "{KEY}"\n')
    file.chmod(0o600)
    try:
        assert chat(node, "Hi", key="")[::2] == (0, "")
    finally:
        file.unlink()


def test_another_model_is_refused(node: NodeProcess) -> None:
    status, answer, errors = chat(node, "--model", "nonsense", "Hi")
    assert (status, answer) == (1, "")
    assert errors.startswith("Error: nonsense is not served here\nHint: served here: tiny; ")


def test_run_beside_a_node_is_a_chat(node: NodeProcess) -> None:
    ended = mesh_llm("run", "tiny", "--home", node.home, env={"MESH_LLM_API_KEY": KEY})
    # Standard input is empty there, and a chat says so.
    assert (ended.status, ended.stderr.splitlines()[0]) == (2, "Error: there is nothing to answer")


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    ended = mesh_llm("chat", "Hi", "--home", tmp_path)
    assert (ended.status, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"Error: no node is running on {tmp_path}\nHint: ")


def test_a_conversation_in_a_terminal(node: NodeProcess) -> None:
    with in_terminal("chat", "--home", node.home, env={"MESH_LLM_API_KEY": KEY}) as screen:
        screen.until_seen("/help lists commands")
        screen.press(b"Hello\r")
        screen.until_seen(" tok/s")
        screen.press(b"/clear\r")
        screen.until_seen("The conversation begins anew")
        screen.press(b"/model nonsense\r")
        screen.until_seen("nonsense is not served here")
        screen.press(b"\x04")
        assert screen.wait() == 0


SLOW = """
import time
from mesh_llm.cli import chat

class Slow(chat.ChatApi):
    def __init__(self):
        pass
    def events(self, body):
        yield {"choices": [{"delta": {"content": f"{len(body['messages'])} messages: "}}]}
        while True:
            yield {"choices": [{"delta": {"content": "word "}}]}
            time.sleep(0.05)

chat._talk(chat.Conversation(Slow()), ["slow"])
"""


def test_ctrl_c_ends_the_answer_and_then_the_chat() -> None:
    with Screen([sys.executable, "-c", SLOW]) as screen:
        for number in (1, 3):
            screen.until(lambda: screen.lines[-1:] == [">"], what="it asks for a line")
            screen.press(b"Count\r")
            screen.until_seen(f"{number} messages: word word")
            screen.press(b"\x03")
            screen.until_seen("(stopped)")
        screen.until(lambda: screen.lines[-1:] == [">"], what="it asks for a line")
        screen.press(b"\x03")
        assert screen.wait() == 0
        assert "Traceback" not in screen.everything
