"""Every command that the README shows is run here, as it stands there.

Blocks that begin with a comment, `# terminal 1` or `# any terminal`, belong to a
walk from top to bottom: a numbered terminal holds what runs in it until the end.
Only addresses are changed: ports to free ones, ~ to a folder of the test's own,
and what would leave this machine to loopback.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mesh_llm.home import cache_folder, models_folder
from tests.support.command import ALONE, Running
from tests.support.node import temporary_home
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS: list[str] = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
WALK = [block for block in BLOCKS if block.startswith("# ")]
BY_ITSELF = [block for block in BLOCKS if not block.startswith("# ") and block != "make demo\n"]
WAIT_S = 600.0
"""For anything here, on a busy machine that has compiled nothing yet."""

pytestmark = [
    pytest.mark.skipif(
        not (ROOT / ".venv/bin/mesh-llm").exists(), reason="the README speaks of a clone's .venv"
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Somebody's home folder."""
    with temporary_home() as path:
        yield path


def environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "MESH_LLM_MODELS": str(models_folder()),
        "MESH_LLM_CACHE": str(cache_folder()),
        # Two threads that spin for each other crawl where others want the cores, too.
        "OMP_WAIT_POLICY": "passive",
        **ALONE,
    }


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=ROOT,
        env={**os.environ, **environment(folder)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def checked(script: str, folder: Path) -> str:
    done = run(script, folder)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip(), script
    return done.stdout


def test_every_block_is_run() -> None:
    assert sorted(["make demo\n", *WALK, *BY_ITSELF]) == sorted(BLOCKS)
    assert [block.splitlines()[0] for block in WALK] == [
        "# terminal 1",
        "# terminal 2",
        "# any terminal",
        "# terminal 7",
        "# terminal 3",
        "# any terminal",
        "# terminal 1",
        "# any terminal",
        "# terminal 4",
        "# any terminal",
        "# any terminal",
        "# terminal 5",
        "# terminal 6",
    ]
    assert len(BY_ITSELF) == 5


def test_make_demo_answers(folder: Path, smollm2: Path) -> None:
    text = checked("make demo", folder)

    assert "Why is the sky blue?" in text
    assert re.search(r"^weights +0 bytes sent, ", text, re.MULTILINE)
    assert re.search(r"^decode +[\d.]+ tok/s$", text, re.MULTILINE)


@pytest.mark.parametrize("block", BY_ITSELF)
def test_commands_that_need_no_node(block: str, folder: Path, smollm2: Path) -> None:
    for command in block.splitlines():
        checked(command, folder)


class Walk:
    """Terminals side by side, and somebody who carries tokens between them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.terminals: dict[str, Running] = {}
        self._stack = stack
        self._known: dict[str, str] = {
            "0.0.0.0": "127.0.0.1",
            "relay.example": "127.0.0.1",
            **{port: str(free_port()) for port in ("9337", "9338", "9339", "9340", "3340")},
        }

    def carry(self, placeholder: str, text: str) -> None:
        self._known[placeholder] = text

    def written(self, block: str) -> list[str]:
        """The block's commands, with what is known in place of its placeholders."""
        text = block.split("\n", 1)[1].replace("\\\n", "")
        for placeholder, value in self._known.items():
            text = re.sub(rf"(?<![\w.]){re.escape(placeholder)}(?![\w.])", value, text)
        return text.splitlines()

    def open(self, block: str) -> Running:
        """What runs in a terminal until somebody ends it."""
        (command,) = self.written(block)
        if "mesh-llm" in command and " relay " not in command:
            command += "" if "--port" in command else f" --port {self._known['9337']}"
            command += "" if "--client" in command else " --threads 1"
            # A page that somebody has open on this machine keeps its port.
            command = command.replace("--console", "--console 0")
        variables = environment(self.folder)
        if "--relay" in command:
            del variables["MESH_LLM_NO_RELAY"]
            # The walk's first node has left its mesh in that home.
            variables["MESH_LLM_HOME"] = str(self.folder / "relayed")
        terminal = Running(
            ["sh", "-c", re.sub(r"(\.venv/bin/mesh-llm)", r"exec \1", command)],
            env={"MESH_LLM_NO_RELAY": "", **variables},
            cwd=ROOT,
        )
        self.terminals[block.splitlines()[0]] = self._stack.enter_context(terminal)
        return terminal

    def say(self, block: str) -> list[str]:
        """What each command of it prints."""
        return [checked(command, self.folder) for command in self.written(block)]


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: it stays free until it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def after(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(words)).removeprefix(words)


def test_the_walk_through(folder: Path, smollm2: Path) -> None:
    first, second, look, console, stream, plug, again, ask_client, third, use_client, end, relay, relayed = (
        WALK
    )
    with ExitStack() as stack:
        walk = Walk(folder, stack)
        one = walk.open(first)
        one.until_said("Invite token: ", within_s=WAIT_S)
        walk.carry("TOKEN", after(one.stdout, "Invite token: "))
        two = walk.open(second)
        two.until_said("API ready at ", within_s=WAIT_S)
        one.until(lambda: is_split(folder), what="both serve together", within_s=WAIT_S)

        status, layers, plan, answer = walk.say(look)
        assert "split over 2 nodes, hosted by " in status
        assert re.search(r"^two +(worker|host) +serving ", status, re.MULTILINE)
        assert re.search(r"^29 +(one|two)$", layers, re.MULTILINE)
        assert re.search(r"^instead +solo on ", plan, re.MULTILINE)
        assert json.loads(answer)["choices"][0]["message"]["content"]

        one = pull_the_plug(walk, stream, plug, again, one)

        walk.carry("CLIENT_TOKEN", walk.say(ask_client)[0].strip())
        walk.open(third).until_said("API ready at ", within_s=WAIT_S)
        page = walk.open(console)
        page.until_said("Console at http://localhost:", within_s=WAIT_S)
        page.until_said("API ready at ", within_s=WAIT_S)
        assert json.loads(walk.say(use_client)[0])["data"][0]["id"] == "SmolLM2-135M-Instruct.Q4_1"

        leave_and_stop(walk, end, two, one)
        walk.open(relay).until_said("http://", within_s=WAIT_S)
        walk.open(relayed).until_said("API ready at ", within_s=WAIT_S)


def pull_the_plug(walk: Walk, stream: str, plug: str, again: str, one: Running) -> Running:
    """In the middle of an answer: it goes on, to its end."""
    reader = walk.open(stream)
    reader.until(lambda: reader.stdout.count("data: {") > 20, what="words arrive", within_s=WAIT_S)
    (command,) = walk.written(plug)
    assert run(command, walk.folder).returncode == 0
    one.process.wait(WAIT_S)
    # Its children end by themselves, when they notice.
    until(lambda: not one.descendants(), within_s=WAIT_S, what="nothing of it is left")
    ended = reader.wait(within_s=2 * WAIT_S)
    assert ended.status == 0
    assert ": mesh-llm resumed 1, served by two: " in ended.stdout
    assert ended.stdout.endswith("data: [DONE]\n\n")
    one = walk.open(again)
    one.until_said("API ready at ", within_s=WAIT_S)
    one.until(lambda: is_split(walk.folder), what="both serve together again", within_s=WAIT_S)
    return one


def is_split(folder: Path) -> bool:
    status = run(".venv/bin/mesh-llm status --json", folder)
    plan = json.loads(status.stdout)["plan"] if status.returncode == 0 else None
    return plan is not None and len(plan["stages"]) == 2


def leave_and_stop(walk: Walk, block: str, two: Running, one: Running) -> None:
    """The last commands, one by one: the id of an invite is read from the list of them."""
    invite, listing, *rest = walk.written(block)
    token = checked(invite, walk.folder)
    assert token.startswith("mesh1-")
    listed = checked(listing, walk.folder)
    client = next(line.split() for line in listed.splitlines() if " client " in line)
    assert client[-1] == "2"
    walk.carry("ID", client[0])
    revoke, promote, leave, stop = walk.written(block)[2:]
    assert len(rest) == 4
    assert checked(revoke, walk.folder).startswith(f"Revoked {client[0]}; expelled ")
    assert checked(promote, walk.folder) == "two is an owner of the mesh now\n"
    assert checked(leave, walk.folder) == f"Left the mesh; the node with pid {two.pid} has ended\n"
    assert two.wait(within_s=WAIT_S).status == 0
    assert checked(stop, walk.folder) == f"Stopped the node with pid {one.pid}\n"
    assert one.wait(within_s=WAIT_S).status == 0
