"""The console of real nodes: what those see who watch a mesh form, answer and break."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import mesh_llm
from tests.support.mesh import HEAL_S, MeshProcesses
from tests.support.node import ENDLESS, SMALL, WAIT_S, NodeProcess, Reply, ask, send, temporary_home
from tests.support.waiting import until

KEY = "sk-mesh-console"


def port_of(node: NodeProcess) -> int:
    node.until_said("Console at http://localhost:")
    found = re.search(r"Console at http://localhost:(\d+)$", node.stdout, re.MULTILINE)
    assert found is not None
    return int(found[1])


class Page:
    """As the page: it knows its token."""

    def __init__(self, node: NodeProcess, *, key: str | None = None) -> None:
        self.port = port_of(node)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session = self.ask("/api/session", headers=headers).json()
        self.headers = {"X-Mesh-LLM-Page": str(self.session["token"])}

    def ask(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Reply:
        with closing(HTTPConnection("localhost", self.port, timeout=WAIT_S)) as connection:
            return ask(connection, path, body, headers=headers)

    def call(self, path: str, body: Any = None) -> Any:
        reply = self.ask(path, body, headers=self.headers)
        assert reply.status == 200, reply.body
        return reply.json()

    @contextmanager
    def watch(self, *, within_s: float = HEAL_S) -> Iterator[Watch]:
        with closing(HTTPConnection("localhost", self.port, timeout=within_s)) as connection:
            send(connection, "/api/events")
            response = connection.getresponse()
            assert response.status == 200, response.read()
            with response:
                yield Watch(response.readline)


class Watch:
    """An event stream; its first frame is the snapshot."""

    def __init__(self, readline: Callable[[], bytes]) -> None:
        self._readline = readline
        kind, self.snapshot = self.next()
        assert kind == "snapshot"
        self._status = self.snapshot["status"]

    def next(self) -> tuple[str, Any]:
        """The socket's own limit ends a wait in vain."""
        kind = ""
        while line := self._readline().decode():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ").strip()
            elif line.startswith("data: "):
                return kind, json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended")

    def until(self, kind: str, holds: Callable[[Any], bool]) -> Any:
        # A status is told when it changes: the last one may be all that there is to come.
        if kind == "status" and holds(self._status):
            return self._status
        (document,) = self._until(kind, [holds])
        return document

    def until_events(self, *wanted: Callable[[Any], bool]) -> list[Any]:
        """The first event for each of them, in whichever order they come."""
        return self._until("event", wanted)

    def _until(self, kind: str, wanted: Sequence[Callable[[Any], bool]]) -> list[Any]:
        seen = []
        came: dict[int, Any] = {}
        deadline = time.monotonic() + 2 * HEAL_S
        while time.monotonic() < deadline:
            found, document = self.next()
            if found == "status":
                self._status = document
            if found == kind:
                for index, holds in enumerate(wanted):
                    if index not in came and holds(document):
                        came[index] = document
            if len(came) == len(wanted):
                return [came[index] for index in range(len(wanted))]
            if found == "event":
                seen.append(document["text"])
        raise AssertionError(f"no such {kind}; events meanwhile: {seen}")


def says(*texts: str) -> Callable[[Any], bool]:
    return lambda event: all(text in event["text"] for text in texts)


def has_rate(sample: Any) -> bool:
    """Whether it tells of tokens: an engine that is too busy to be asked leaves it open."""
    return sample["tok_s"] is not None and sample["tok_s"] > 0


def names(status: Any) -> list[str]:
    return sorted(node["name"] for node in status["mesh"]["nodes"])


@pytest.mark.timeout(300)
def test_a_mesh_that_forms_answers_and_breaks(smollm2: Path) -> None:
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        one = mesh.create("one", "--split", "--hosting", "prefer", "--console", "0")
        page = Page(one)
        with page.watch() as watch:
            mesh.join("two")
            mesh.join("three", "--console", "0")
            watch.until_events(says("two is in the mesh"), says("three is in the mesh"))
            watch.until("event", says("one hosts, ", " compute with it"))
            status = watch.until("status", lambda status: len(status["plan"]["stages"]) == 3)
            assert names(status) == ["one", "three", "two"]
            assert status["console"]["url"] == f"http://localhost:{page.port}"

            # An answer, from the node's own clients: it shows in the curves, and in where its time goes.
            with one.stream("/v1/completions", ENDLESS) as stream:
                stream.next()
                sample = watch.until("sample", has_rate)
                assert sample["active"] == 1
                token = watch.until("status", lambda status: status["engine"]["token"]["parts"])
                check_token(token)

                # A worker loses its power in the middle of it.
                mesh.kill("two")
                lost, _ = watch.until_events(
                    says("two was lost"), says("An answer continues with the engine of one")
                )
                assert lost["kind"] in ("lost", "failed")
                watch.until("status", lambda status: names(status) == ["one", "three"])
                stream.next()

        # What another node's page shows: the host's figures.
        other = Page(mesh.nodes["three"])
        until(lambda: shows_rates(other), within_s=HEAL_S, what="the host's figures on another node's page")
        with other.watch() as watch:
            watch.until("status", lambda status: names(status) == ["one", "three"])
            watch.until("sample", lambda sample: sample["t"] > 0)
        assert no_secret_in(one, mesh, page)


def shows_rates(page: Page) -> bool:
    """Among what came before: it asks the host for that when somebody begins to watch."""
    with page.watch() as watch:
        return any(has_rate(sample) for sample in watch.snapshot["history"]["samples"])


def check_token(status: Any) -> None:
    token, stages = status["engine"]["token"], status["plan"]["stages"]
    assert sum(part["ms"] for part in token["parts"]) == pytest.approx(token["total_ms"], abs=1e-6)
    computing = [part["node"] for part in token["parts"] if part["kind"] == "compute"]
    assert computing == [stage["node"] for stage in stages]
    assert re.match(r"\d+ % of [\d.]+ ms is ", token["sentence"])


def no_secret_in(node: NodeProcess, mesh: MeshProcesses, page: Page) -> bool:
    """Neither invites nor the page's token are in what is shown, or in a log."""
    with page.watch() as watch:
        shown = json.dumps(watch.snapshot)
    html = page.ask("/").body.decode()
    found = re.search(r"Invite token: (\S+)", node.stdout)
    assert found is not None
    secrets = [found[1], page.session["token"]]
    return not any(secret in text for secret in secrets for text in (shown, html, node.logs()))


def test_the_page_invites_and_stops(smollm2: Path) -> None:
    with (
        temporary_home() as home,
        NodeProcess(*SMALL, "--console", "0", "--api-key", KEY, home=home, model=smollm2) as node,
    ):
        # It answers long before there is an engine.
        locked = Page(node)
        assert locked.session == {"token": None, "api_key_needed": True}
        assert locked.ask("/api/stop", {}, headers=locked.headers).status == 403
        page = Page(node, key=KEY)
        node.until_ready()
        invite = page.call("/api/invite", {"role": "client", "lifetime_s": 600})
        assert invite["token"].startswith("mesh1-")
        listed = page.call("/api/invites")["invites"]
        assert [entry["id"] for entry in listed if entry["role"] == "client"] == [invite["id"]]
        page.call("/api/revoke", {"id": invite["id"]})
        states = {entry["id"]: entry["state"] for entry in page.call("/api/invites")["invites"]}
        assert states[invite["id"]] == "revoked"

        assert page.call("/api/stop", {})["stopping"] is True
        assert node.wait().status == 0


@pytest.mark.full
def test_a_client_has_a_console_too(smollm2: Path) -> None:
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        one = mesh.create("one").until_ready()
        invited = mesh_llm("invite", "--role", "client", "--json", "--home", one.home)
        token = json.loads(invited.stdout)["token"]
        arguments = ("--client", "--name", "tablet", "--console", "0", "--join", token)
        with client_process(folder / "tablet", *arguments) as client:
            page = Page(client)
            with page.watch() as watch:
                status = watch.until("status", lambda status: status["node"]["state"] == "serving")
            assert status["node"]["role"] == "client"


@contextmanager
def client_process(home: Path, *arguments: str) -> Iterator[NodeProcess]:
    """A client is given no model."""

    def without_model(argv: Any) -> Any:
        place = list(argv).index("--model")
        return [*argv[:place], *argv[place + 2 :]]

    with NodeProcess(*arguments, home=home, model="none", around=without_model) as node:
        yield node


def test_a_port_that_is_taken_is_said(smollm2: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, temporary_home() as home:
        port = taken.getsockname()[1]
        ended = mesh_llm(
            "--home", home, "--model", smollm2, "--port", "0", "--console", str(port), within_s=WAIT_S
        )
    assert ended.status == 1
    assert re.fullmatch(
        rf"Error: port {port} is in use( by [^\n]+)?\nHint: --console 0 takes any free port\n", ended.stderr
    )


def test_ports_that_are_none(tmp_path: Path) -> None:
    for port, status in (("70000", 2), ("-1", 2), ("here", 2)):
        ended = mesh_llm("--home", tmp_path, "--console", port)
        assert (ended.status, ended.stderr.startswith("Error: ")) == (status, True), ended.stderr


@pytest.mark.full
def test_the_model_is_unloaded_and_loaded_again(smollm2: Path) -> None:
    with (
        temporary_home() as home,
        NodeProcess(*SMALL, "--console", "0", home=home, model=smollm2) as node,
    ):
        node.until_ready()
        page = Page(node)
        with page.watch() as watch:
            assert page.call("/api/unload", {}) == {"unloading": True}
            watch.until("event", says("The model is being unloaded here"))
            status = watch.until("status", lambda status: status["node"]["state"] == "waiting")
            assert status["node"]["reason"] == "the model was unloaded here"
            assert status["node"]["resting"] is True
            # Nothing holds it any more, and who asks is told why.
            node.until_no_descendants(within_s=WAIT_S)
            refused = node.ask("/v1/completions", {"prompt": "1"})
            assert refused.status == 503
            assert "the model was unloaded here" in refused.json()["error"]["message"]

            assert page.call("/api/load", {}) == {"loading": True}
            watch.until("status", lambda status: status["node"]["state"] == "serving")
        assert node.ask("/v1/completions", {"prompt": "1 2 3", "max_tokens": 4}).json()["choices"][0]["text"]


def reasons(status: Any) -> list[str]:
    """Why nodes have no part in the plan."""
    return [entry["reason"] for entry in status["plan"]["excluded"]]


@pytest.mark.full
def test_others_take_over_before_a_host_unloads(smollm2: Path) -> None:
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        one = mesh.create("one", "--console", "0").until_ready()
        mesh.join("two").until_ready()
        page = Page(one)
        with page.watch() as watch:
            page.call("/api/unload", {})
            watch.until("event", says("two serves alone"))
            watch.until("status", lambda status: reasons(status) == ["its user unloaded the model there"])
        one.until_no_descendants(within_s=HEAL_S)
        # Its API goes on, with the other one's engine, as soon as it has heard of it.
        one.until(lambda: one.ask("/health").status == 200, what="the other one serves", within_s=HEAL_S)
        assert one.ask("/v1/completions", {"prompt": "1 2 3", "max_tokens": 4}).json()["choices"][0]["text"]


@pytest.mark.full
def test_one_who_is_refused_is_news(smollm2: Path) -> None:
    with temporary_home() as folder, MeshProcesses(folder, smollm2) as mesh:
        one = mesh.create("one", "--console", "0")
        page = Page(one)
        made = json.loads(mesh_llm("invite", "--json", "--home", one.home).stdout)
        assert mesh_llm("invite", "revoke", made["id"], "--home", one.home).status == 0
        with page.watch() as watch:
            ended = mesh_llm("--client", "--join", made["token"], "--home", folder / "two", "--port", "0")
            assert (ended.status, "the token was revoked" in ended.stderr) == (1, True)
            watch.until("event", says("was refused: its invite was revoked"))
