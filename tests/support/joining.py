"""Nodes that join each other, as a person would start them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Ended, Running
from tests.support.node import WAIT_S, NodeProcess, temporary_home

PLAN = ("--ctx-size", "512", "--parallel", "1")
"""For whoever creates a mesh."""
LAYERS = 30
TEXT: dict[str, Any] = {"prompt": "one two three", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def write_model(
    folder: Path, *, name: str = "tiny.gguf", seed: int = 0, layers: int = LAYERS, hidden: int = 64
) -> Path:
    """Loads in no time, answers nonsense, and has as many layers as a small model."""
    folder.mkdir(exist_ok=True)
    return tiny_gguf.write(folder / name, "llama", seed=seed, layers=layers, hidden=hidden)


class JoiningNode(NodeProcess):
    """A node on a home of its own; one that joins needs no model, and looks for files in `models` alone."""

    def __init__(
        self,
        *arguments: str | Path,
        home: Path,
        name: str,
        models: Path,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = MESH_LLM,
    ) -> None:
        self.home = home
        self.name = name
        self.id = ""
        models.mkdir(exist_ok=True)
        threads = () if "--client" in arguments else ("--threads", "1")
        # Not from NodeProcess: whether there is a --model is up to the test.
        Running.__init__(
            self,
            [*program, "--home", home, "--name", name, "--port", "0", *threads, *arguments],
            env={"MESH_LLM_MODELS": str(models), **(env or {})},
        )

    def __enter__(self) -> JoiningNode:
        return self

    def until_ready(self, *, within_s: float = WAIT_S) -> JoiningNode:
        super().until_ready(within_s=within_s)
        return self

    def until_status(self, condition: Any, *, what: str, within_s: float = WAIT_S) -> dict[str, Any]:
        """The first status for which `condition` holds."""
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            status = self.status_or_none()
            if status is None or not condition(status):
                return False
            found.append(status)
            return True

        try:
            self.until(lambda: found or holds(), what=what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- status\n{json.dumps(self.status_or_none())}") from None
        return found[0]

    def until_nodes(self, *names: str) -> dict[str, Any]:
        """Sees exactly these, itself included."""
        return self.until_status(
            lambda status: names_of(status) == sorted(names), what=f"it sees {', '.join(names)}"
        )

    def until_plan(self, *stages: tuple[str, int, int], host: str | None = None) -> dict[str, Any]:
        """Serves by exactly these stages, given by node name."""
        return self.until_status(
            lambda status: (
                status["node"]["state"] == "serving"
                and stages_of(status) == list(stages)
                and host in (None, host_of(status))
            ),
            what=f"it serves {stages}",
        )

    def control(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As the verbs ask, without a process for each."""
        connection = HTTPConnection("node", timeout=WAIT_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing(connection):
            connection.sock.settimeout(WAIT_S)
            connection.sock.connect(str(self.home / "run" / "control.sock"))
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            document = json.loads(connection.getresponse().read())
        assert isinstance(document, dict)
        assert "error" not in document, document
        return document

    def invite(self, *, role: str = "node", lifetime_s: float | None = 3600.0) -> dict[str, Any]:
        return self.control("/api/invite", {"role": role, "lifetime_s": lifetime_s})

    def token(self, **options: Any) -> str:
        return str(self.invite(**options)["token"])

    def stop(self) -> None:
        """As Ctrl-C does, and wait for its end."""
        self.process.terminate()
        assert self.wait().status == 0, self.stderr


def said(ended: Ended) -> dict[str, Any]:
    assert ended.status == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert isinstance(document, dict)
    return document


def refused(ended: Ended, *, status: int = 1) -> str:
    """The one sentence with which a command gave up."""
    assert ended.status == status, f"{ended.status}: {ended.stdout}{ended.stderr}"
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert len(sentences) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return sentences[0].removeprefix("Error: ")


def names_of(status: dict[str, Any]) -> list[str]:
    return sorted(node["name"] for node in status["mesh"]["nodes"])


def _name(status: dict[str, Any], id: str | None) -> str:
    return next((str(node["name"]) for node in status["mesh"]["nodes"] if node["id"] == id), "nobody")


def stages_of(status: dict[str, Any]) -> list[tuple[str, int, int]]:
    plan = status["plan"] or {"stages": []}
    return [(_name(status, stage["node"]), stage["first"], stage["last"]) for stage in plan["stages"]]


def host_of(status: dict[str, Any]) -> str:
    return _name(status, status["plan"] and status["plan"]["host"])


def left_out(status: dict[str, Any]) -> dict[str, str]:
    """The reason for each node without a part, by name."""
    plan = status["plan"] or {"excluded": []}
    return {_name(status, entry["node"]): entry["reason"] for entry in plan["excluded"]}


class Lab:
    """Starts nodes, each on a home of its own under one folder, and ends them all."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self._nodes: list[JoiningNode] = []

    def start(
        self,
        name: str,
        *arguments: str | Path,
        models: Path | None = None,
        env: Mapping[str, str] | None = None,
        home: Path | None = None,
        program: Sequence[str] = MESH_LLM,
    ) -> JoiningNode:
        """Its models are those beside the lab's own, unless the test has others for it."""
        node = JoiningNode(
            *arguments,
            home=home or self.folder / name,
            name=name,
            models=models if models is not None else self.model.parent,
            env=env,
            program=program,
        )
        self._nodes.append(node)
        return node

    def create(self, name: str, *arguments: str | Path, **options: Any) -> JoiningNode:
        return self.start(name, "--model", self.model, *PLAN, *arguments, **options).until_ready()

    def join(self, name: str, inviter: JoiningNode, *arguments: str | Path, **options: Any) -> JoiningNode:
        return self.start(name, "--join", inviter.token(), *arguments, **options).until_ready()

    def end(self) -> None:
        # Together: each takes its second.
        for node in self._nodes:
            if node.running:
                node.process.terminate()
        for node in self._nodes:
            node.__exit__(None, None, None)


@contextmanager
def lab(model: Path) -> Iterator[Lab]:
    with temporary_home() as folder:
        nodes = Lab(folder, model)
        try:
            yield nodes
        finally:
            nodes.end()
