"""Every command that the README and the pages in docs/ show is run here, as it stands there.

Blocks that begin with a comment such as `# on the laptop` belong to a walk through the README and the pages
on operations, a tour and networks, in that order. Each machine has a home folder and a port of its own; what
runs until it is stopped holds a terminal there. Only addresses are changed, and what would leave this machine
goes to loopback.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh_llm.home import cache_folder, models_folder
from tests.support.command import ALONE, Running
from tests.support.node import temporary_home
from tests.support.sampling import sampled
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WALKED = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("operations", "tour", "networks"))]
WAIT_S = 600.0
"""For anything here, on a busy machine that has compiled nothing yet."""

pytestmark = [
    pytest.mark.skipif(
        not (ROOT / ".venv/bin/mesh-llm").exists(), reason="this is not a clone with its .venv"
    ),
    pytest.mark.timeout(900),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A block of the walk."""

    machine: str
    text: str

    def __str__(self) -> str:
        return f"{self.machine}: {self.text.splitlines()[0][:30].rstrip()}"


ON = re.compile(r"# on the (\w+)\n")
WALK = [
    Step(machine=on[1], text=block[on.end() :])
    for page in WALKED
    for block in blocks(page)
    if (on := ON.match(block))
]
INSTALLING = {
    page: [block for block in blocks(page) if ".whl" in block or ".tar.gz" in block]
    for page in (ROOT / "README.md", ROOT / "docs" / "install.md")
}
"""Run by test_documented_install.py."""
ELSEWHERE = ["make demo\n", *(block for blocks in INSTALLING.values() for block in blocks)]
BY_ITSELF = [
    block for page in PAGES for block in blocks(page) if not ON.match(block) and block not in ELSEWHERE
]


_MAKES_OWN = {"ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the machines of a walk have their home folders."""
    with temporary_home() as path:
        yield path


def environment(home: Path) -> dict[str, str]:
    return {
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "MESH_LLM_MODELS": str(models_folder()),
        "MESH_LLM_CACHE": str(cache_folder()),
        # Two threads that spin for each other crawl where others want the cores, too.
        "OMP_WAIT_POLICY": "passive",
        **ALONE,
    }


def run(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=ROOT,
        # Not what a `make test` around this was told.
        env={name: value for name, value in os.environ.items() if name not in _MAKES_OWN} | environment(home),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def checked(script: str, home: Path) -> str:
    done = run(script, home)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    assert done.stdout.strip(), script
    return done.stdout


def test_every_block_is_run() -> None:
    unwalked = [page.name for page in PAGES if page not in WALKED and any(map(ON.match, blocks(page)))]
    assert unwalked == []
    assert [str(step) for step in WALK] == [
        "desktop: mesh-llm --name desktop --mode",
        "laptop: mesh-llm --name laptop --join",
        "laptop: mesh-llm status",
        "laptop: curl -N http://localhost:9337/",
        "desktop: kill -9 $(grep -o '[0-9]*' ~/.",
        "desktop: mesh-llm --name desktop --mode",
        "laptop: mesh-llm logs",
        "laptop: mesh-llm doctor",
        "laptop: mesh-llm status",
        "laptop: mesh-llm invite --role client",
        "tablet: mesh-llm --client --join CLIEN",
        "tablet: curl http://localhost:9337/v1/",
        "phone: mesh-llm --client --join CLIEN",
        "desktop: mesh-llm invite --expires 12h",
        "laptop: mesh-llm leave",
        "desktop: mesh-llm stop",
        "relay: MESH_LLM_RELAY_TOKEN=SECRET me",
        "office: MESH_LLM_RELAY_TOKEN=SECRET me",
    ]


def test_make_demo_answers(folder: Path, smollm2: Path) -> None:
    text = checked("make demo", folder)

    assert "Why is the sky blue?" in text
    assert re.search(r"^weights +0 bytes sent, ", text, re.MULTILINE)
    assert re.search(r"^decode +[\d.]+ tok/s$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "block", sampled(BY_ITSELF, *(block for block in BY_ITSELF if "mesh-llm demo" not in block))
)
def test_commands_that_need_no_node(block: str, folder: Path, smollm2: Path) -> None:
    for command in block.splitlines():
        checked(command, folder)


class Walk:
    """Machines side by side, and somebody who carries tokens between them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._ports: dict[str, str] = {}
        self._known = {"0.0.0.0": "127.0.0.1", "relay.example": "127.0.0.1", "3340": str(free_port())}

    def carry(self, placeholder: str, text: str) -> None:
        self._known[placeholder] = text

    def home(self, machine: str) -> Path:
        return self.folder / machine

    def port(self, machine: str) -> str:
        return self._ports.setdefault(machine, str(free_port()))

    def written(self, step: Step) -> list[str]:
        """The step's commands, with what is known in place of its placeholders."""
        text = step.text.replace("\\\n", "")
        for placeholder, value in {**self._known, "9337": self.port(step.machine)}.items():
            text = re.sub(rf"(?<![\w.]){re.escape(placeholder)}(?![\w.])", value, text)
        return text.splitlines()

    def open(self, step: Step) -> Running:
        """What runs in a terminal until somebody ends it."""
        (command,) = self.written(step)
        if "mesh-llm" in command and " relay " not in command:
            command += f" --port {self.port(step.machine)}"
            command += "" if "--client" in command else " --threads 1"
            # A page that somebody has open on this machine keeps its port.
            command = command.replace("--console", "--console 0")
        self.home(step.machine).mkdir(exist_ok=True)
        variables = environment(self.home(step.machine))
        if "--relay" in command:
            del variables["MESH_LLM_NO_RELAY"]
        terminal = Running(
            ["sh", "-c", re.sub(r"\bmesh-llm ", "exec mesh-llm ", command, count=1)],
            env={"MESH_LLM_NO_RELAY": "", **variables},
            cwd=ROOT,
        )
        return self._stack.enter_context(terminal)

    def say(self, step: Step) -> list[str]:
        """What each command of it prints."""
        return [checked(command, self.home(step.machine)) for command in self.written(step)]

    def is_split(self) -> bool:
        status = run("mesh-llm status --json", self.home("laptop"))
        plan = json.loads(status.stdout)["plan"] if status.returncode == 0 else None
        return plan is not None and len(plan["stages"]) == 2


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: it stays free until it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def after(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(words)).removeprefix(words)


@pytest.mark.full
def test_the_walk_through(folder: Path, smollm2: Path) -> None:
    start, join, ask, stream, plug, again, logs, doctor, look, *tour = WALK
    ask_client, tablet, use_client, phone, invites, leave, stop, relay, relayed = tour
    with ExitStack() as stack:
        walk = Walk(folder, stack)
        desktop = walk.open(start)
        desktop.until_said("Invite token: ", within_s=WAIT_S)
        walk.carry("TOKEN", after(desktop.stdout, "Invite token: "))
        laptop = walk.open(join)
        laptop.until_said("API ready at ", within_s=WAIT_S)
        desktop.until(walk.is_split, what="both serve together", within_s=WAIT_S)

        status, answer = walk.say(ask)
        assert "split over 2 nodes, hosted by " in status
        assert re.search(r"^laptop +(worker|host) +serving ", status, re.MULTILINE)
        assert json.loads(answer)["choices"][0]["message"]["content"]

        desktop = pull_the_plug(walk, stream, plug, again, desktop)
        assert "POST /v1/completions" in walk.say(logs)[1]
        assert "\n0 broken, " in walk.say(doctor)[0]
        _, layers, plan = walk.say(look)
        assert re.search(r"^29 +(desktop|laptop)$", layers, re.MULTILINE)
        assert re.search(r"^instead +solo on ", plan, re.MULTILINE)

        walk.carry("CLIENT_TOKEN", walk.say(ask_client)[0].strip())
        walk.open(tablet).until_said("API ready at ", within_s=WAIT_S)
        assert json.loads(walk.say(use_client)[0])["data"][0]["id"] == "SmolLM2-135M-Instruct.Q4_1"
        page = walk.open(phone)
        page.until_said("Console at http://localhost:", within_s=WAIT_S)
        page.until_said("API ready at ", within_s=WAIT_S)

        let_in_and_out(walk, invites)
        assert walk.say(leave) == [f"Left the mesh; the node with pid {laptop.pid} has ended\n"]
        assert laptop.wait(within_s=WAIT_S).status == 0
        assert walk.say(stop) == [f"Stopped the node with pid {desktop.pid}\n"]
        assert desktop.wait(within_s=WAIT_S).status == 0
        walk.open(relay).until_said("http://", within_s=WAIT_S)
        walk.open(relayed).until_said("API ready at ", within_s=WAIT_S)


def pull_the_plug(walk: Walk, stream: Step, plug: Step, again: Step, desktop: Running) -> Running:
    """In the middle of an answer: it goes on, to its end."""
    reader = walk.open(stream)
    reader.until(lambda: reader.stdout.count("data: {") > 20, what="words arrive", within_s=WAIT_S)
    (command,) = walk.written(plug)
    assert run(command, walk.home("desktop")).returncode == 0
    desktop.process.wait(WAIT_S)
    # Its children end by themselves, when they notice.
    until(lambda: not desktop.descendants(), within_s=WAIT_S, what="nothing of it is left")
    ended = reader.wait(within_s=2 * WAIT_S)
    assert ended.status == 0
    assert ": mesh-llm resumed 1, served by laptop: " in ended.stdout
    assert ended.stdout.endswith("data: [DONE]\n\n")
    desktop = walk.open(again)
    desktop.until_said("API ready at ", within_s=WAIT_S)
    desktop.until(walk.is_split, what="both serve together again", within_s=WAIT_S)
    return desktop


def let_in_and_out(walk: Walk, step: Step) -> None:
    """One by one: the id of an invite is read from the list of them."""
    home = walk.home(step.machine)
    invite, listing, *_ = walk.written(step)
    assert checked(invite, home).startswith("mesh1-")
    limited = next(line.split() for line in checked(listing, home).splitlines() if line.endswith("0 of 1"))
    walk.carry("ID", limited[0])
    _, _, revoke, promote = walk.written(step)
    assert checked(revoke, home).startswith(f"Revoked {limited[0]}")
    assert checked(promote, home) == "laptop is an owner of the mesh now\n"
