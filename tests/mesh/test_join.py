"""Getting into a mesh, staying in it, and getting out: what a person types, and what is said to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh_llm.cli.control import call
from mesh_llm.errors import JoinRefused, MeshError
from mesh_llm.home import Home
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, decode, encode
from mesh_llm.types import Address, MeshId
from tests.support.command import mesh_llm
from tests.support.joining import (
    PLAN,
    TEXT,
    JoiningNode,
    Lab,
    lab,
    names_of,
    refused,
    said,
)
from tests.support.members import Mesh, mesh_of_members
from tests.support.ports import spare_port
from tests.support.waiting import until

DAMAGED = "the token is damaged: a part of it is missing or altered"
NOT_ACCEPTED = "the token was not accepted: it is wrong, or belongs to another mesh"
EXPELLED = "this node was expelled from its mesh: its invite was revoked"


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[tuple[Lab, JoiningNode]]:
    """A mesh of one, for those whom it does not let in."""
    with lab(model) as nodes:
        yield nodes, nodes.create("one")


# -- tokens that are of no use --------------------------------------------------------------------


def attempt(nodes: Lab, token: str, *options: str | Path) -> str:
    """What one who starts a node with `token` is told; nothing may be left that runs on alone."""
    home = nodes.folder / "stranger"
    ended = mesh_llm("--home", home, "--port", "0", "--join", token, *options)
    assert "API ready" not in ended.stdout
    assert not (home / "mesh.json").exists()
    return refused(ended)


def test_altered_and_cut_off_tokens_are_refused_before_a_packet_is_sent(
    shared: tuple[Lab, JoiningNode],
) -> None:
    with inviter_that_listens() as (ear, token):
        for damaged in (token[:-1], _altered(token, len(token) // 3)):
            assert attempt(shared[0], damaged) == DAMAGED
        with pytest.raises(BlockingIOError):
            ear.recv(1)


@contextmanager
def inviter_that_listens() -> Iterator[tuple[socket.socket, str]]:
    """A token whose inviter never answers, and would notice any packet."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.setblocking(False)
        identity = Identity.from_secret(os.urandom(32))
        invite = Invite(
            id="ab" * 8,
            mesh=MeshId(identity.id),
            secret=os.urandom(16),
            inviter=identity.id,
            address=Address(direct=(f"127.0.0.1:{ear.getsockname()[1]}",)),
        )
        yield ear, encode(invite, identity)


def test_no_altered_character_goes_unnoticed(shared: tuple[Lab, JoiningNode]) -> None:
    token = shared[1].token()

    for damaged in (token[: len(token) // 2], token + "A"):
        with pytest.raises(Exception, match="token is damaged"):
            decode(damaged)
    # As the command reads it: sixty thousand processes would take a day.
    for place in range(len(token)):
        with pytest.raises(Exception, match=r"token is damaged|not an invite token|newer mesh-llm"):
            decode(_altered(token, place))


def _altered(token: str, place: int) -> str:
    other = "B" if token[place] != "B" else "C"
    return token[:place] + other + token[place + 1 :]


def test_what_is_no_token_at_all(shared: tuple[Lab, JoiningNode]) -> None:
    assert attempt(shared[0], "hello") == "this is not an invite token"
    assert attempt(shared[0], "mesh2-abcd") == "the token was made by a newer mesh-llm"


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": bytes(16)},
        pytest.param({"mesh": MeshId("ab" * 32)}, marks=pytest.mark.full),
        pytest.param({"id": "00" * 8}, marks=pytest.mark.full),
    ],
)
def test_wrong_and_foreign_tokens(shared: tuple[Lab, JoiningNode], wrong: dict[str, Any]) -> None:
    nodes, one = shared
    identity = Identity.from_secret(bytes.fromhex((one.home / "identity").read_text()))

    forged = encode(replace(decode(one.token()), **wrong), identity)
    assert attempt(nodes, forged) == NOT_ACCEPTED


def test_an_expired_token(shared: tuple[Lab, JoiningNode]) -> None:
    nodes, one = shared
    token = invite_of(one, "--expires", "1s")["token"]
    # By another clock: on a busy machine the second may be over before this line.
    expires = decode(token, now=0.0).expires
    assert expires is not None
    until(lambda: time.time() > expires, within_s=30, what="the token has expired")

    assert attempt(nodes, token).startswith("the token expired on ")


def test_a_revoked_token(shared: tuple[Lab, JoiningNode]) -> None:
    nodes, one = shared
    invite = one.invite()
    revoked = mesh_llm("invite", "revoke", invite["id"], "--home", one.home, "--json")

    assert said(revoked) == {"id": invite["id"], "expelled": []}
    assert attempt(nodes, invite["token"]) == "the token was revoked"


def test_ones_own_token(shared: tuple[Lab, JoiningNode]) -> None:
    one = shared[1]
    home = shared[0].folder / "stopped"
    shutil.copytree(one.home, home, ignore=shutil.ignore_patterns("run", ".*"))

    ended = mesh_llm("--home", home, "--port", "0", "--join", one.token())
    assert refused(ended) == "this node made the token itself"


# -- invites --------------------------------------------------------------------------------------


@pytest.mark.full
def test_invites_are_listed_with_what_became_of_them(nodes: Lab) -> None:
    one = nodes.create("one")
    first = invite_of(one, "--expires", "never")
    second = invite_of(one, "--role", "client", "--expires", "2h")
    nodes.start("two", "--join", first["token"]).until_ready()
    mesh_llm("invite", "revoke", second["id"], "--home", one.home)

    listed = said(mesh_llm("invite", "list", "--home", one.home, "--json"))["invites"]
    by_id = {entry["id"]: entry for entry in listed}
    assert (by_id[first["id"]]["role"], by_id[first["id"]]["state"]) == ("node", "open")
    assert (by_id[first["id"]]["uses"], by_id[first["id"]]["expires"]) == (1, None)
    assert (by_id[second["id"]]["role"], by_id[second["id"]]["state"]) == ("client", "revoked")
    # The third is the one that was printed at the start.
    assert len(listed) == 3
    table = mesh_llm("invite", "list", "--home", one.home).stdout
    assert all(entry["id"] in table for entry in listed)


def invite_of(node: JoiningNode, *options: str) -> dict[str, Any]:
    return said(mesh_llm("invite", "--home", node.home, "--json", *options))


def test_revoking_what_does_not_exist(shared: tuple[Lab, JoiningNode]) -> None:
    ended = mesh_llm("invite", "revoke", "00" * 8, "--home", shared[1].home)
    assert (
        refused(ended)
        == "this node may not revoke '0000000000000000': no invite of its own, or of nodes it let in"
    )
    assert refused(mesh_llm("invite", "--expires", "soon", "--home", shared[1].home), status=2)


@pytest.mark.full
def test_an_expelled_node_ends_is_forgotten_and_stays_out(nodes: Lab) -> None:
    one = nodes.create("one")
    invite = one.invite()
    two = nodes.start("two", "--join", invite["token"]).until_ready()
    # Where the expelled one will look for it, after its restart.
    port = ("--bind-port", str(spare_port(socket.SOCK_DGRAM)))
    three = nodes.join("three", one, *port)
    for node in (one, two, three):
        node.until_nodes("one", "three", "two")

    answer = said(mesh_llm("invite", "revoke", invite["id"], "--home", one.home, "--json"))
    assert answer == {"id": invite["id"], "expelled": ["two"]}
    assert refused(two.wait()) == EXPELLED
    one.until_nodes("one", "three")
    three.until_nodes("one", "three")
    until(lambda: not knows(one, two) and not knows(three, two), within_s=30, what="its address is gone")
    # With its home, and also where nobody is there to tell it.
    assert refused(nodes.start("two").wait()) == EXPELLED
    # And a copy of its home from before, which knows nothing of all that.
    forget_the_expulsion(two.home)
    assert refused(nodes.start("two").wait()) == EXPELLED
    # The others have not noticed, restarted ones neither.
    three.stop()
    three = nodes.start("three", *port).until_ready()
    three.until_nodes("one", "three")
    forget_the_expulsion(two.home)
    one.stop()
    assert refused(nodes.start("two").wait()) == EXPELLED
    # A new token is a new beginning.
    two = nodes.start("two", "--join", three.token()).until_ready()
    three.until_nodes("three", "two")


def knows(node: JoiningNode, other: JoiningNode) -> bool:
    """Whether its home remembers where the other one is."""
    members = json.loads((node.home / "mesh.json").read_text())["members"]
    id = Identity.from_secret(bytes.fromhex((other.home / "identity").read_text())).id
    return any(entry["id"] == id for entry in members)


def forget_the_expulsion(home: Path) -> None:
    document = json.loads((home / "mesh.json").read_text())
    assert document["membership"]["revocations"]
    document["membership"]["revocations"] = []
    (home / "mesh.json").write_text(json.dumps(document))


# -- coming back ----------------------------------------------------------------------------------


def test_a_node_returns_without_its_token_leave_forgets_and_new_mesh_starts_afresh(nodes: Lab) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    mesh, id = two.status()["mesh"]["id"], two.status()["node"]["id"]
    two.stop()
    one.until_nodes("one")

    two = nodes.start("two").until_ready()
    assert two.until_nodes("one", "two")["mesh"]["id"] == mesh == one.status()["mesh"]["id"]
    assert two.status()["node"]["id"] == id

    assert said(mesh_llm("leave", "--home", two.home, "--json")) == {"left": two.pid}
    assert two.wait().status == 0
    one.until_nodes("one")
    two = nodes.create("two")
    assert two.status()["mesh"]["id"] not in (mesh, id)
    assert names_of(two.status()) == ["two"]


@pytest.mark.full
def test_a_new_mesh_has_none_of_the_old_ones_members(nodes: Lab) -> None:
    port = spare_port(socket.SOCK_DGRAM)
    one = nodes.create("one", "--bind-port", str(port))
    mesh = one.status()["mesh"]["id"]
    two = nodes.join("two", one)
    one.stop()
    two.until_nodes("two")
    # One that is refused leaves the old one as it was.
    refused(mesh_llm("--home", one.home, "--new-mesh", "--model", "/nowhere.gguf"))
    one = nodes.create("one", "--bind-port", str(port))
    assert one.until_nodes("one", "two")["mesh"]["id"] == mesh
    one.stop()
    two.until_nodes("two")

    one = nodes.create("one", "--new-mesh", "--bind-port", str(port))
    assert one.status()["mesh"]["id"] != mesh
    # It tries to come back all the time: where it stays alone after this, it does for good.
    third = nodes.join("three", one)
    third.until_nodes("one", "three")
    assert names_of(two.status()) == ["two"]


@pytest.mark.full
def test_joining_again_keeps_invites_and_mends_a_damaged_record(nodes: Lab) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    invite = two.invite()
    two.stop()
    two = nodes.join("two", one)
    listed = said(mesh_llm("invite", "list", "--home", two.home, "--json"))["invites"]
    assert invite["id"] in [entry["id"] for entry in listed]
    two.stop()
    (two.home / "mesh.json").write_text("{")

    ended = mesh_llm("--home", two.home, "--port", "0")
    assert refused(ended) == f"{two.home / 'mesh.json'} is damaged"
    assert "join again with a new token" in ended.stderr
    nodes.join("two", one).until_nodes("one", "two")


@pytest.mark.full
def test_a_copied_home_ends_one_of_the_two(nodes: Lab) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    one.until_nodes("one", "two")
    shutil.copytree(
        two.home, nodes.folder / "copy", ignore=shutil.ignore_patterns("*.sock", "node.lock", "run", ".*")
    )
    copy = nodes.start("copy")

    until(lambda: not (two.running and copy.running), within_s=40, what="one of the two ends")
    ended = two if not two.running else copy
    assert refused(ended.wait()) == "another node runs with a copy of this node's home"
    other = copy if ended is two else two
    other.until_ready().until_nodes("one", other.name)
    one.until_state("serving")


# -- start-up -------------------------------------------------------------------------------------


def test_what_cannot_work_is_told_before_anything_is_bound_or_fetched(
    shared: tuple[Lab, JoiningNode], model: Path
) -> None:
    nodes, one = shared
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        def sentence(*arguments: str | Path) -> str:
            return refused(mesh_llm("--home", nodes.folder / "order", "--port", port, *arguments))

        # Each is wrong in two ways, and the port is the later one.
        assert sentence("--join", "hello", "--model", "/nowhere.gguf") == "this is not an invite token"
        assert "/nowhere.gguf" in sentence("--join", one.token(), "--model", "/nowhere.gguf")
        assert port in sentence("--join", one.token())
        assert port in sentence("--model", model, *PLAN)
    assert one.status()["mesh"]["nodes"][0]["name"] == "one"
    assert names_of(one.status()) == ["one"]


@pytest.mark.long
def test_nobody_there_is_told_with_what_was_tried_and_status_answers_meanwhile(nodes: Lab) -> None:
    with inviter_that_listens() as (ear, token):
        two = nodes.start("two", "--join", token)
        status = two.until_status(
            lambda status: status["node"]["reason"] == "joining the mesh", what="it answers"
        )
        assert status["node"]["state"] == "starting"
        assert status["plan"] is None
        assert two.ask("/health").status == 503

        # Twenty seconds by its own clock; a busy machine may add to them.
        address = f"127.0.0.1:{ear.getsockname()[1]}"
        expected = f"no answer from the inviter within 20 s; tried {address}"
        assert refused(two.wait(within_s=50)) == expected
        assert ear.recv(1)
    assert not (two.home / "mesh.json").exists()


# -- traffic and floods ---------------------------------------------------------------------------

IDLE_BYTES_PER_S = 2000.0


@pytest.mark.long
def test_an_idle_mesh_says_little(nodes: Lab) -> None:
    one = nodes.create("one")
    token = one.token()
    others = [nodes.start(name, "--join", token) for name in ("two", "three")]
    mesh = [one, *(node.until_ready() for node in others)]
    for node in mesh:
        node.until_nodes("one", "three", "two")

    def sent() -> dict[tuple[str, str], int]:
        return {
            (node.name, peer["name"]): peer["link"]["sent_bytes"]
            for node in mesh
            for peer in node.status()["mesh"]["nodes"]
            if peer["name"] != node.name
        }

    def rates(span_s: float) -> dict[tuple[str, str], float]:
        before, started = sent(), time.monotonic()
        until(lambda: time.monotonic() - started > span_s, within_s=3 * span_s, what="time passes")
        return {pair: (count - before[pair]) / (time.monotonic() - started) for pair, count in sent().items()}

    # What is told once, after a change, is not idle traffic: the mesh has to come to rest first.
    measured: list[dict[tuple[str, str], float]] = []

    def is_quiet() -> bool:
        measured.append(rates(10))
        return max(measured[-1].values()) < IDLE_BYTES_PER_S

    until(
        is_quiet,
        within_s=31,
        what=f"ten seconds with less than {IDLE_BYTES_PER_S} B/s",
    )
    assert len(measured[-1]) == 6
    assert min(measured[-1].values()) > 0, "nobody pings"


FLOODERS = 8
FLOOD_BYTES = 128 << 20
"""What a node may grow meanwhile: twice what it does on a machine with little else to do."""


@pytest.mark.full
async def test_a_flood_of_wrong_tokens_keeps_nobody_out(nodes: Lab) -> None:
    one = nodes.create("one")
    rss = psutil.Process(one.pid).memory_info().rss
    token = decode(one.token())
    attempts = 0

    async def flood(members: Mesh) -> None:
        nonlocal attempts
        while True:
            member = await members.member()
            with pytest.raises(JoinRefused):
                await member.network.join(replace(token, secret=os.urandom(16)), timeout_s=3)
            attempts += 1
            await member.network.close()

    async with mesh_of_members() as members, asyncio.TaskGroup() as group:
        flooders = [group.create_task(flood(members)) for _ in range(FLOODERS)]
        await until_async(lambda: attempts > 3 * FLOODERS)
        two = await asyncio.to_thread(nodes.join, "two", one)
        for node in (one, two):
            reply = await asyncio.to_thread(node.ask, "/v1/completions", TEXT)
            assert reply.status == 200
        await asyncio.to_thread(one.until_nodes, "one", "two")
        before = attempts
        await until_async(lambda: attempts > before + 3 * FLOODERS)
        for task in flooders:
            task.cancel()
    assert psutil.Process(one.pid).memory_info().rss < rss + FLOOD_BYTES


async def until_async(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, within_s=60, what="the flood goes on")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits can be set on Linux alone")
def test_an_invite_that_cannot_be_written_down_is_refused_in_a_sentence(nodes: Lab) -> None:
    import resource

    one = nodes.create("one")
    pid, files = one.process.pid, resource.RLIMIT_FSIZE
    _, hard = resource.prlimit(pid, files)
    resource.prlimit(pid, files, (0, hard))
    asked = {"role": "node", "lifetime_s": 3600.0, "uses": 1}
    with pytest.raises(MeshError, match=r"mesh\.json cannot be written: File too large"):
        asyncio.run(call(Home(one.home), "POST", "/api/invite", asked))

    resource.prlimit(pid, files, (hard, hard))
    assert asyncio.run(call(Home(one.home), "POST", "/api/invite", asked))["token"]
