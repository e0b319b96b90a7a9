"""The lite client: the API and nothing else, and no way to do more."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.errors import PeerLost, UsageError
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import GuestMessage, Update, signed_to_document, to_document
from mesh_llm.membership.record import Record, record_text, told
from mesh_llm.transport.claims import Claim
from mesh_llm.transport.invite import decode
from mesh_llm.transport.revocations import revocation_text
from mesh_llm.types import HeldModel, HostingMode, NodeFacts, Role, State
from tests.support.command import Running, mesh_llm
from tests.support.joining import TEXT, JoiningNode, Lab, lab, left_out, names_of, refused, write_model
from tests.support.members import mesh_of_members
from tests.support.node import NodeProcess

ROOT = Path(__file__).parents[2]
RSS_LIMIT_BYTES = 150 << 20
"""An engine's process starts at twice that."""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one"}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}
BLOCKED = """
import sys

class Absent:
    # What the package's `engine` extra brings.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("xllamacpp", "cmake", "ninja", "numpy", "gguf"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def mesh(
    libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Lab, JoiningNode]]:
    model = write_model(tmp_path_factory.mktemp("models"))
    with lab(model) as nodes:
        yield nodes, nodes.create("one", "--split")


@pytest.fixture
def without_engine(tmp_path: Path) -> dict[str, str]:
    """An environment in which the engine's packages cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    env = {"PYTHONPATH": str(tmp_path)}
    tried = subprocess.run(
        [sys.executable, "-c", "import xllamacpp"], env=env, capture_output=True, timeout=30
    )
    assert b"xllamacpp is not installed" in tried.stderr
    return env


def check_api(client: NodeProcess, one: JoiningNode) -> None:
    answer = client.ask("/v1/completions", TEXT).json()
    assert answer["choices"] == one.ask("/v1/completions", TEXT).json()["choices"]
    chat = client.ask("/v1/chat/completions", CHAT).json()
    assert chat["usage"]["completion_tokens"] == CHAT["max_tokens"]
    with client.stream("/v1/chat/completions", {**CHAT, "stream": True}) as stream:
        *chunks, last = stream.data()
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert (last, "".join(pieces)) == ("[DONE]", chat["choices"][0]["message"]["content"])
    assert [entry["id"] for entry in client.ask("/v1/models").json()["data"]] == ["tiny"]
    health = client.ask("/health")
    assert (health.status, health.json()["state"]) == (200, "serving")


def test_the_api_without_an_engine_or_a_model(
    mesh: tuple[Lab, JoiningNode], without_engine: dict[str, str], tmp_path: Path
) -> None:
    nodes, one = mesh
    token = one.token(role="client")
    client = nodes.start(
        "client", "--client", "--join", token, env=without_engine, models=tmp_path / "models"
    ).until_ready()

    check_api(client, one)
    status = client.status()
    assert (status["node"]["role"], status["node"]["state"]) == ("client", "serving")
    assert client.descendants() == []
    assert psutil.Process(client.pid).memory_info().rss < RSS_LIMIT_BYTES
    assert list((tmp_path / "models").iterdir()) == []
    one.until_status(lambda s: left_out(s).get("client") == "is a client", what="it is left out")
    # It returns without its token, and as nothing else.
    client.stop()
    as_node = mesh_llm("--home", client.home, "--port", "0")
    assert refused(as_node) == "the invite is for a lite client, which lends no device"
    client = nodes.start("client", "--client", env=without_engine).until_ready()
    # It invites nobody.
    ended = mesh_llm("invite", "--home", client.home)
    assert refused(ended) == "a client cannot invite others"
    client.stop()
    one.until(lambda: "left: client left the mesh" in one.logs(), what="its goodbye is understood")


def test_a_client_token_lends_nothing(mesh: tuple[Lab, JoiningNode]) -> None:
    nodes, one = mesh
    # The client of another test may just have left.
    one.until_nodes("one")
    token = one.token(role="client")
    ended = mesh_llm("--home", nodes.folder / "lender", "--port", "0", "--join", token)
    assert refused(ended) == "the invite is for a lite client, which lends no device"
    assert names_of(one.status()) == ["one"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "smollm2"),
        ("alias", "mine"),
        ("split", True),
        ("tensor_split", (1.0, 1.0)),
        ("layers", (("a", 0, 1),)),
        ("hosting", HostingMode.NEVER),
        ("context", 512),
        ("slots", 1),
        ("devices", ("CPU",)),
        ("max_memory_bytes", 1),
        ("gpu_layers", 0),
        ("threads", 1),
        ("no_fetch", True),
        ("plain_lan", True),
        ("embeddings", True),
        ("cache_type_k", "f16"),
        ("settings", {"n_batch": 64}),
    ],
)
def test_options_of_nodes_that_compute_are_refused(home: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError, match=r"^--[a-z-]+ cannot be used with --client, which does not compute$"):
        NodeConfig(home=home, client=True, join="hello", **{option: value})  # type: ignore[arg-type]


def test_such_an_option_as_it_is_typed(home: Path) -> None:
    ended = mesh_llm("--home", home, "--client", "--join", "hello", "--gpu-layers", "0")
    assert refused(ended, status=2) == "--gpu-layers cannot be used with --client, which does not compute"


def test_a_client_needs_a_mesh(home: Path) -> None:
    ended = mesh_llm("--home", home, "--client")
    assert refused(ended, status=2) == "--client needs --join TOKEN: it has no model of its own"


async def test_no_hand_made_stream_of_a_clients_is_served(mesh: tuple[Lab, JoiningNode]) -> None:
    """Against a real node: everything but what the API needs is refused, and costs nobody anything."""
    _, one = mesh
    async with mesh_of_members() as members:
        client = await members.member()
        peer, _ = await client.network.join(decode(one.token(role="client")))
        lease = {"epoch": 1, "fingerprint": "ab", "first": 0, "last": 1, "need_bytes": 1}
        fingerprint = one.status()["model"]["fingerprint"]
        for kind, header in (
            ("lease", lease),
            ("link", {"way": "quic", "purpose": {"kind": "session", "epoch": 1}}),
            ("introduce", {"epoch": 1, "next": one.status()["node"]["id"], "number": 1}),
            ("file", {"fingerprint": fingerprint}),
            ("forwarded", {"origin": one.status()["node"]["id"], "kind": "lease", "header": lease}),
            ("nonsense", {}),
        ):
            stream = await peer.open(kind, header)
            with pytest.raises(PeerLost):
                await stream.read_document()
        # Nor may it tell who is expelled, or that it is something better.
        membership = client.network.mesh
        revocation = membership.seal(
            client.identity, Claim.REVOCATION, revocation_text(membership.credential[-1].invite)
        )
        peer.send({"kind": "claims", "revocations": [signed_to_document(revocation)]})
        liar = NodeFacts(
            name="liar",
            role=Role.NODE,
            version=__version__,
            engine=ENGINE_VERSION,
            memory_bytes=1 << 40,
            models=(HeldModel(fingerprint=fingerprint, name="tiny", size_bytes=1),),
            state=State.SERVING,
        )
        record = Record(node=client.id, incarnation=1, sequence=1, standing=Standing.ALIVE, facts=liar)
        signed = membership.seal(client.identity, Claim.RECORD, record_text(record))
        peer.send(to_document(Update(records=(told(replace(record, signed=signed)),))))
        peer.send(to_document(GuestMessage(name="liar", version=__version__, state=State.SERVING, reason="")))
        await asyncio.to_thread(
            one.until_status,
            lambda status: left_out(status).get("liar") == "is a client",
            what="it is caught",
        )
        serving = await peer.open("serving", {"epoch": one.status()["plan"]["epoch"]})
        assert (await serving.read_document())["model"]["name"] == "tiny"


@pytest.mark.long
def test_installed_with_the_base_dependencies_alone(mesh: tuple[Lab, JoiningNode], tmp_path: Path) -> None:
    """As `pip install mesh-llm` leaves it: a fresh environment without the `engine` extra."""
    nodes, one = mesh
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=60)
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, "install", "--quiet", ROOT], capture_output=True, text=True, timeout=100, check=False
    )
    if installed.returncode != 0:
        pytest.skip(f"the packages could not be fetched: {installed.stderr[-200:]}")
    listed = subprocess.run([*pip, "list", "--format", "json"], capture_output=True, check=True, timeout=60)
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert names.isdisjoint({"xllamacpp", "cmake", "ninja", "numpy", "gguf"})

    home = nodes.folder / "installed"
    argv: list[str | Path] = [
        venv / "bin" / "mesh-llm",
        "--home",
        home,
        "--name",
        "installed",
        "--port",
        "0",
        "--client",
    ]
    with InstalledNode([*argv, "--join", one.token(role="client")], home=home) as client:
        check_api(client.until_ready(), one)


class InstalledNode(NodeProcess):
    """Of another installation."""

    def __init__(self, argv: list[str | Path], *, home: Path) -> None:
        self.home = home
        Running.__init__(self, argv)

    def __enter__(self) -> InstalledNode:
        return self
