"""Several nodes on one machine, in one mesh, and what they have to agree on."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.node import SKY, SMALL, NodeProcess
from tests.support.waiting import until

HEAL_S = 40.0
"""For a mesh to serve again on a machine that others use, too; it takes three seconds on a quiet one."""
SPARE_EPOCHS = 3
"""New plans that a machine which stands still for seconds may cost besides: one without a node that is
taken for dead, and one or two with it again. A mesh that cannot settle makes more."""
CHAT: dict[str, Any] = {**SKY, "cache_prompt": False}
"""Without the prompt cache: a prompt that is computed in other batches may end in another text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all nodes say of the plan that serves."""

    epoch: int
    host: str
    """By name, as all of these."""
    stages: tuple[tuple[str, int, int], ...]
    engine: int
    """The pid of the host's engine."""

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.stages if name != self.host)


class MeshProcesses:
    """Nodes by name, each on a home below `folder`. Leaving the block ends them all."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._stack = ExitStack()
        self._token = ""
        self._options: dict[str, tuple[str, ...]] = {}
        self._environments: dict[str, Mapping[str, str]] = {}
        self.nodes: dict[str, NodeProcess] = {}
        """Those that run."""
        self.ids: dict[str, str] = {}

    def __enter__(self) -> MeshProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All at once: one after the other, each would hand over to the next.
        for node in self.nodes.values():
            if node.running:
                node.signal(signal.SIGTERM)
        self._stack.__exit__(kind, error, trace)

    # -- who runs ------------------------------------------------------------------------------

    def create(self, name: str, *options: str) -> NodeProcess:
        """The first node, whose options are the mesh's."""
        node = self._start(name, *SMALL, *options)
        node.until_said("Invite token: ")
        found = re.search(r"Invite token: (\S+)", node.stdout + node.stderr)
        assert found is not None
        self._token = found[1]
        return node

    def join(self, name: str, *options: str, env: Mapping[str, str] | None = None) -> NodeProcess:
        self._environments[name] = env or {}
        return self._start(name, "--threads", "1", *options, once=("--join", self._token))

    def restart(self, name: str) -> NodeProcess:
        """On the home that it had, without a token."""
        assert name not in self.nodes
        return self._start(name, *self._options[name])

    def _start(self, name: str, *options: str, once: tuple[str, ...] = ()) -> NodeProcess:
        self._options[name] = options
        home = self._folder / name
        env = self._environments.get(name)
        node = NodeProcess("--name", name, *options, *once, home=home, model=self._model, env=env)
        self.nodes[name] = self._stack.enter_context(node)
        return node

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that loses its power; its children have to go by themselves."""
        node = self.nodes.pop(name)
        node.signal(signal.SIGKILL)
        node.process.wait(30)
        node.until_no_descendants(within_s=30)

    def stop(self, name: str) -> None:
        """As its owner would."""
        node = self.nodes.pop(name)
        node.stop()
        ended = node.wait()
        assert ended.status == 0, ended.stderr

    def freeze(self, names: Iterable[str]) -> None:
        """As a lid that is closed: the nodes and all their children."""
        for process in self._families(names):
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self, names: Iterable[str]) -> None:
        for process in self._families(names):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _families(self, names: Iterable[str]) -> list[psutil.Process]:
        return [process for name in names for process in self.nodes[name].family()]

    def worker_child(self, name: str) -> psutil.Process:
        """The process that lends the device of a node."""
        (found,) = self._children(name, "mesh_llm.engine.children.worker")
        return found

    def engines(self, *names: str) -> list[int]:
        """The pids of all engines that run on these nodes, or on all of them."""
        children = (self._children(name, "mesh_llm.engine.children.serve") for name in names or self.nodes)
        return [child.pid for found in children for child in found]

    def computing(self, name: str) -> list[int]:
        """The pids of all of a node's children that compute."""
        lending = self._children(name, "mesh_llm.engine.children.worker")
        return [*self.engines(name), *(child.pid for child in lending)]

    def _children(self, name: str, module: str) -> list[psutil.Process]:
        found = []
        for process in self.nodes[name].descendants():
            # Some end while they are looked at.
            with suppress(psutil.Error):
                if module in process.cmdline():
                    found.append(process)
        return found

    # -- what they say -------------------------------------------------------------------------

    def statuses(self, names: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        return {name: self.nodes[name].status() for name in names or self.nodes}

    def nobody_lists(self, name: str) -> bool:
        members = (document["mesh"]["nodes"] for document in self.statuses().values())
        return all(member["name"] != name for nodes in members for member in nodes)

    def agreed(self, among: Collection[str] | None = None) -> Agreed | None:
        """The serving plan, where all (or those `among` them) tell of the same, and of exactly each other."""
        members = self.nodes if among is None else among
        documents = {name: self.nodes[name].status_or_none() for name in members}
        found: set[Agreed] = set()
        for document in documents.values():
            if document is None or document["node"]["state"] != "serving" or not document["plan"]:
                return None
            names = {member["id"]: member["name"] for member in document["mesh"]["nodes"]}
            self.ids |= {name: id for id, name in names.items()}
            plan, layers = document["plan"], document["model"]["layers"]
            if sorted(names.values()) != sorted(members) or plan["mode"] == "waiting":
                return None
            stages = tuple((names.get(s["node"], "?"), s["first"], s["last"]) for s in plan["stages"])
            edges = [0, *(last for _, _, last in stages)]
            assert edges[-1] == layers, f"{stages} do not cover {layers} layers"
            assert [first for _, first, _ in stages] == edges[:-1], stages
            if plan["host"] not in names or "?" in {name for name, _, _ in stages}:
                return None
            if document["engine"]["state"] != "ready":
                return None
            found.add(
                Agreed(
                    epoch=plan["epoch"],
                    host=names[plan["host"]],
                    stages=stages,
                    engine=document["engine"]["pid"],
                )
            )
        return found.pop() if len(found) == 1 else None

    def serving(
        self,
        *,
        on: Collection[str] | None = None,
        among: Collection[str] | None = None,
        above: int = 0,
        host: str | None = None,
        within_s: float = HEAL_S,
    ) -> Agreed:
        """Wait until all (or those `among` them that are awake) agree on a plan that serves.

        It has stages on exactly `on`, or on all of them, an epoch above the given one, and the
        given host, if any.
        """
        members = self.nodes if among is None else among
        wanted = sorted(on if on is not None else members)

        def whole() -> Agreed | None:
            agreed = self.agreed(members)
            if agreed is None or agreed.epoch <= above or host not in (None, agreed.host):
                return None
            return agreed if sorted({name for name, _, _ in agreed.stages}) == wanted else None

        try:
            return until(whole, within_s=within_s, what=f"a plan over {wanted} serves")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told(members)}") from None

    def waiting(self, *, within_s: float = HEAL_S) -> dict[str, Any]:
        """Wait until all say that they wait for more memory; the plan of any."""

        def all_wait() -> dict[str, Any] | None:
            documents = [node.status_or_none() for node in self.nodes.values()]
            states = {document["node"]["state"] if document else "" for document in documents}
            plan = documents[0]["plan"] if documents and documents[0] else None
            return plan if states == {"waiting"} and plan and plan["mode"] == "waiting" else None

        try:
            return until(all_wait, within_s=within_s, what="all wait")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None

    def chat(self, names: Collection[str] | None = None) -> str:
        """The same text through each node."""
        texts = set()
        for name in names or self.nodes:
            reply = self.nodes[name].ask("/v1/chat/completions", CHAT)
            assert reply.status == 200, f"{name}: {reply.body!r}\n{self.told()}"
            texts.add(reply.json()["choices"][0]["message"]["content"])
        assert len(texts) == 1, texts
        return str(texts.pop())

    def told(self, names: Collection[str] | None = None) -> str:
        """The ends of all logs, for a test that failed."""
        parts = []
        for name in names or self.nodes:
            node = self.nodes[name]
            log = (self._folder / name / "logs" / "node.log").read_text().splitlines()[-60:]
            document = node.status_or_none()
            brief = document and {key: document[key] for key in ("node", "plan", "engine")}
            members = document and [m["name"] + " " + m["standing"] for m in document["mesh"]["nodes"]]
            parts.append("\n".join([f"--- {name}", *log, str(brief), str(members)]))
        return "\n".join(parts)
