"""`mesh-llm doctor` finds planted faults, each with its mend; on a machine without any it ends with 0.

The faults are numbered as in docs/operations.md. Where it can be, a fault is a real one: a port that another
process holds, a disk that is full, a firewall's rule in a network of its own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mesh_llm import __version__
from mesh_llm.cli import control
from mesh_llm.cli import doctor as command
from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.doctor.context import CheckContext, RunningNode
from mesh_llm.doctor.examine import CHECKS, NAMES, examine
from mesh_llm.doctor.finding import Finding, Level
from mesh_llm.doctor.redaction import redact
from mesh_llm.download import checksum
from mesh_llm.engine import build, gpus, machine
from mesh_llm.errors import MeshError
from mesh_llm.home import Home
from mesh_llm.transport.endpoint import Reach
from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, Ended, Running, mesh_llm
from tests.support.kernel import Kernel
from tests.support.ports import spare_port

HOLD = """
import socket, sys, time
kind = socket.SOCK_STREAM if sys.argv[1] == "tcp" else socket.SOCK_DGRAM
held = socket.socket(socket.AF_INET, kind)
held.bind(("127.0.0.1", int(sys.argv[2])))
if sys.argv[1] == "tcp":
    held.listen()
print("held", flush=True)
time.sleep(600)
"""


async def bad(home: Path, *checks: str, **context: Any) -> list[Finding]:
    """What is not as it should be, by these checks."""
    found = await examine(CheckContext(home=Home(home), **context), checks)
    assert {each.check for each in found} <= set(checks)
    return [each for each in found if each.level is not Level.OK]


def one(findings: Sequence[Finding]) -> Finding:
    assert len(findings) == 1, findings
    assert findings[0].why
    return findings[0]


def said(ended: Ended) -> list[dict[str, Any]]:
    assert "Traceback" not in ended.stderr, ended.stderr
    document = json.loads(ended.stdout)
    found = [each for each in document["findings"] if each["level"] != "ok"]
    assert (ended.status == 1) == any(each["level"] == "broken" for each in found)
    assert all(each["why"] and each["mend"] for each in found)
    return found


@contextmanager
def holder(kind: str, port: int) -> Iterator[int]:
    with Running([sys.executable, "-c", HOLD, kind, str(port)]) as process:
        process.until_said("held")
        yield process.pid


def within(*setup: str, spaces: str, home: Path, check: str, options: Sequence[str] = ()) -> Ended:
    """`doctor CHECK` after `setup`, which is undone with the namespaces that it runs in."""
    script = f'set -e; {"; ".join(setup)}; exec "$@"'
    argv = ["unshare", spaces, "sh", "-c", script, "sh", *MESH_LLM]
    tried = subprocess.run(["unshare", spaces, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    with Running([*argv, "doctor", check, "--home", str(home), "--json", *options]) as running:
        return running.wait()


def member(**changes: Any) -> dict[str, Any]:
    return {
        **{"id": "ab" * 32, "name": "two", "role": "node", "version": __version__, "engine": ENGINE_VERSION},
        **{"standing": "alive", "started_s": 0.0, "connected": True, "via": [], "kind": "quic"},
        **{"rtt_ms": 1.0, "remote": "10.0.0.2:4000", "addresses": ["10.0.0.2:4000"]},
        **changes,
    }


def running(*members: dict[str, Any], relay: dict[str, Any] | None = None, **node: Any) -> RunningNode:
    return RunningNode(
        status={
            "version": __version__,
            "node": {"state": "serving", "reason": "", **node},
            "engine": {"restarts": 0},
            "api": {"url": "http://127.0.0.1:9337"},
        },
        network={"pid": 1, "ports": [4001, 0], "relay": relay or {"off": True}, "members": list(members)},
    )


# -- no fault -------------------------------------------------------------------------------------


def test_a_healthy_machine_has_nothing_broken(libraries: dict[str, Path], home: Path, tmp_path: Path) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    checksum.record(model, hashlib.sha256(model.read_bytes()).hexdigest())
    port = str(spare_port(socket.SOCK_STREAM))
    report = tmp_path / "report.txt"

    ended = mesh_llm(
        *("doctor", "--json", "--home", home, "--port", port, "--report", report),
        env={"MESH_LLM_MODELS": str(tmp_path), "MESH_LLM_API_KEY": "a-secret-of-mine"},
    )

    document = json.loads(ended.stdout)
    broken = [each for each in document["findings"] if each["level"] == "broken"]
    assert (ended.status, broken) == (0, [])
    assert (document["version"], document["level"] in ("ok", "warning")) == (__version__, True)
    checked = {each["check"] for each in document["findings"]}
    # Clocks are those of other nodes.
    assert checked == set(NAMES) - {"clocks"}
    assert "1 file as its hash says" in ended.stdout
    assert report.stat().st_mode & 0o777 == 0o600
    assert "a-secret-of-mine" not in report.read_text()


def test_text_for_people(home: Path) -> None:
    ended = mesh_llm("doctor", "home", "versions", "--home", home)

    assert (ended.status, ended.stderr) == (0, "")
    first, second, _, summary = ended.stdout.splitlines()
    assert first == f"ok       home      {home} is private and can be written to"
    assert second == f"ok       versions  mesh-llm {__version__}, engine {ENGINE_VERSION}"
    assert summary == "0 broken, 0 warnings, 2 ok"


def test_a_check_that_is_not_there() -> None:
    ended = mesh_llm("doctor", "firewal")

    assert (ended.status, ended.stderr) == (
        2,
        "Error: there is no check firewal\nHint: did you mean firewall?\n",
    )


async def test_a_check_that_fails_or_hangs_does_not_hide_the_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(context: CheckContext) -> list[Finding]:
        raise ZeroDivisionError("planted")

    released = threading.Event()

    def hangs(context: CheckContext) -> list[Finding]:
        released.wait()
        return []

    monkeypatch.setattr("mesh_llm.doctor.examine.CHECKS", (fails, hangs, *CHECKS[:1]))
    monkeypatch.setattr("mesh_llm.doctor.examine.CHECK_S", 0.5)

    found = {each.check: each for each in await examine(CheckContext(home=Home(home)))}
    released.set()

    assert found["hangs"].what == "could not be checked: it did not answer within 0.5 s"
    assert found["fails"].what == "could not be checked: ZeroDivisionError: planted"
    assert found["python"].level is Level.OK


# -- this machine ---------------------------------------------------------------------------------


def test_fault_1_an_old_engine(home: Path, tmp_path: Path) -> None:
    (tmp_path / "xllamacpp").mkdir()
    (tmp_path / "xllamacpp" / "__init__.py").touch()
    info = tmp_path / "xllamacpp-2024.1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xllamacpp\nVersion: 2024.1.1\n")

    ended = mesh_llm("doctor", "engine", "--json", "--home", home, env={"PYTHONPATH": str(tmp_path)})

    (found,) = said(ended)
    assert found["level"] == "broken"
    assert (
        found["what"] == f"the engine installed is xllamacpp 2024.1.1; this mesh-llm needs {ENGINE_VERSION}"
    )
    assert "pip install 'mesh-llm[engine]'" in found["mend"]


def test_fault_2_a_missing_package(home: Path, tmp_path: Path) -> None:
    info = tmp_path / "mesh_llm-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mesh-llm\nVersion: 9\nRequires-Dist: no-such-thing>=1\n"
    )

    ended = mesh_llm("doctor", "packages", "--json", "--home", home, env={"PYTHONPATH": str(tmp_path)})

    (found,) = said(ended)
    assert (found["level"], found["what"]) == ("broken", "the package no-such-thing is missing")
    assert "pip install 'mesh-llm[engine]'" in found["mend"]


async def test_fault_3_a_damaged_native_library(
    libraries: dict[str, Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path))
    library = build.library("cpu")
    library.folder.mkdir(parents=True)
    library.path.write_bytes(libraries["cpu"].read_bytes()[:4096])

    found = await bad(home, "engine")

    damaged = next(each for each in found if each.level is Level.BROKEN)
    assert damaged.what.startswith("the engine does not run on this machine: status ")
    assert "mesh-llm engine build --force" in damaged.mend


async def test_fault_4_no_compiler_and_nothing_built(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    found = await bad(home, "compiler", "engine")

    assert [(each.level, each.what) for each in found] == [
        (Level.WARNING, "there is no C++ compiler"),
        (Level.BROKEN, "libggml-mesh is not built, and there is no compiler"),
        (Level.WARNING, "libggml-cpu is not built, and there is no compiler"),
    ]
    assert all("g++" in each.mend or "xcode" in each.mend for each in found)


async def test_fault_5_a_gpu_that_is_not_used(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(tmp_path / "root")
    kernel.nvidia("NVIDIA H200")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "cache"))

    found = one(await bad(home, "gpus", root=kernel.root))

    assert (found.what, found.mend) == ("NVIDIA H200 is not used", "mesh-llm engine build --cuda")


async def test_a_gpu_without_its_driver(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(tmp_path)
    kernel.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    kernel.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    monkeypatch.setattr(gpus, "ROOT", kernel.root)

    found = one(await bad(home, "gpus", root=kernel.root))

    assert found.what == "1 NVIDIA GPU without a driver that is loaded"


@pytest.mark.parametrize(
    ("script", "level", "what", "mend"),
    [
        (
            "echo '4711, /opt/game, 6000'",
            "warning",
            "/opt/game (pid 4711) holds 6000 MB of GPU memory",
            "kill 4711",
        ),
        ("echo 'Driver/library version mismatch'; exit 18", "broken", "nvidia-smi fails: Driver/", "restart"),
    ],
)
async def test_fault_6_a_gpu_that_another_program_holds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, level: str, what: str, mend: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    found = one(await bad(home, "gpu_users"))

    assert found.level == level
    assert found.what.startswith(what)
    assert mend in found.mend


async def test_fault_7_no_memory_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 0)

    found = one(await bad(home, "memory"))

    assert found.level is Level.BROKEN
    assert found.what.startswith("0.0 of ")
    assert "(pid " in found.mend


def test_fault_8_few_open_files(home: Path) -> None:
    argv = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *MESH_LLM]
    with Running([*argv, "doctor", "limits", "--json", "--home", str(home)]) as running:
        (found,) = said(running.wait())

    assert (found["level"], found["what"]) == ("warning", "this user's programs may open 256 files")
    assert found["mend"].startswith("ulimit -n 4096")


async def test_small_udp_buffers(home: Path, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.file("proc/sys/net/core/rmem_max", "65536\n")

    found = one(await bad(home, "limits", root=kernel.root))

    assert found.mend == "sudo sysctl -w net.core.rmem_max=212992"


async def test_fault_9_a_clock_without_a_battery(home: Path) -> None:
    found = one(await bad(home, "clock", now=lambda: 60.0))

    assert (found.level, found.what) == (Level.BROKEN, "the clock says 1970-01-01 00:01 UTC")
    assert "set-ntp" in found.mend or "sntp" in found.mend


# -- home, disks, models --------------------------------------------------------------------------


async def test_fault_10_an_identity_that_others_can_read(home: Path) -> None:
    Home(home).secret()
    (home / "identity").chmod(0o644)

    found = one(await bad(home, "home"))

    assert found.level is Level.BROKEN
    assert found.what == f"{home / 'identity'} is open to other users of this machine (-rw-r--r--)"
    assert found.mend == f"chmod 600 {home / 'identity'}"


@pytest.mark.parametrize(("name", "text"), [("identity", "abc"), ("mesh.json", "{")])
async def test_fault_11_a_damaged_file_in_the_home(home: Path, name: str, text: str) -> None:
    (home / name).write_text(text)
    (home / name).chmod(0o600)

    found = one(await bad(home, "home"))

    assert found.level is Level.BROKEN
    assert f"{home / name} is damaged" in found.what
    assert "restore it" in found.mend or "join again" in found.mend


def test_fault_12_a_home_that_cannot_be_written_to(home: Path) -> None:
    ended = within(f"mount -t tmpfs -o ro tmpfs {home}", spaces="-rm", home=home, check="home")

    (found,) = said(ended)
    assert (found["level"], found["what"]) == (
        "broken",
        f"{home} cannot be written to: Read-only file system",
    )
    assert "--home DIR" in found["mend"]


def test_fault_13_a_full_disk(home: Path) -> None:
    ended = within(f"mount -t tmpfs -o size=1m tmpfs {home}", spaces="-rm", home=home, check="disk")

    (found,) = said(ended)
    assert (found["level"], found["what"]) == ("broken", f"1 MB free for the home ({home})")
    assert "MESH_LLM_HOME" in found["mend"]


async def test_fault_14_a_model_with_a_damaged_byte(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LLM_MODELS", str(tmp_path))
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    checksum.record(model, hashlib.sha256(model.read_bytes()).hexdigest())
    data = bytearray(model.read_bytes())
    data[-100] ^= 1
    model.write_bytes(data)

    found = one(await bad(home, "models"))

    assert found.level is Level.BROKEN
    assert found.what.startswith(f"{model} is damaged: its sha256 is ")
    assert found.mend == f"rm {model}, then download it again"


async def test_fault_15_a_model_that_lacks_a_file_or_is_none(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_LLM_MODELS", str(tmp_path))
    (tmp_path / "half-00001-of-00002.gguf").write_bytes(tiny_gguf.write(tmp_path / "a", "llama").read_bytes())
    (tmp_path / "a").unlink()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")

    half, cut = await bad(home, "models")

    assert half.what == "half lacks 1 of its files (half-00002-of-00002.gguf)"
    assert half.mend.startswith("mesh-llm download half")
    assert str(tmp_path / "cut.gguf") in cut.what
    assert cut.mend.startswith(f"rm {tmp_path / 'cut.gguf'}")
    assert half.level is cut.level is Level.BROKEN


# -- network --------------------------------------------------------------------------------------


async def test_fault_16_a_port_that_another_program_holds(home: Path) -> None:
    port = spare_port(socket.SOCK_STREAM)
    with holder("tcp", port) as pid:
        found = one(await bad(home, "ports", port=port))

    assert found.level is Level.BROKEN
    assert found.what.startswith(f"port {port} is in use by python")
    assert f"(pid {pid})" in found.what
    assert found.mend == "--port 0 takes any free port"


async def test_fault_17_a_udp_port_that_another_program_holds(home: Path) -> None:
    port = spare_port(socket.SOCK_DGRAM)
    with holder("udp", port) as pid:
        found = one(await bad(home, "ports", port=0, bind_port=port, bind_ip="127.0.0.1"))

    assert found.level is Level.BROKEN
    assert f"(pid {pid})" in found.what
    assert "--bind-port" in found.mend


async def test_fault_18_an_address_of_another_machine(home: Path) -> None:
    found = one(await bad(home, "ports", port=0, bind_ip="203.0.113.77"))

    assert found.level is Level.BROKEN
    assert found.what == "--bind-ip 203.0.113.77 is not an address of this machine"
    assert "ip addr" in found.mend


@pytest.mark.parametrize(("rule", "finds"), [("", True), ("udp dport 9338 accept;", False)])
def test_fault_19_a_firewall_that_drops_packets(home: Path, rule: str, finds: bool) -> None:
    if shutil.which("nft", path="/usr/sbin:/usr/bin:/sbin") is None:
        pytest.skip("nft is missing")
    chain = f"chain input {{ type filter hook input priority 0; policy drop; {rule} }};"
    setup = f"PATH=$PATH:/usr/sbin:/sbin nft 'table inet filter {{ {chain} }};'"

    ended = within(setup, spaces="-rn", home=home, check="firewall", options=("--bind-port", "9338"))

    found = said(ended)
    assert bool(found) is finds, found
    if finds:
        assert (
            found[0]["what"] == "the firewall (nft) drops incoming packets, and no rule names UDP port 9338"
        )
        assert "9338" in found[0]["mend"]


@pytest.mark.parametrize("runs", [False, True])
async def test_fault_20_a_relay_that_is_down(home: Path, runs: bool) -> None:
    url = f"http://127.0.0.1:{spare_port(socket.SOCK_STREAM)}"
    Home(home).write_mesh({"relay": url})

    # The node still believes in it.
    node = running(relay={"url": url, "reached": url, "off": False}) if runs else None
    found = one(await bad(home, "relay", node=node))

    assert found.level is Level.BROKEN
    assert found.what == f"the relay {url} does not answer: Connection refused"
    assert "mesh-llm relay" in found.mend


async def test_no_public_relay_was_reached(home: Path) -> None:
    found = one(await bad(home, "relay", node=running(relay={"url": None, "reached": None, "off": False})))

    assert (found.level, found.what) == (Level.WARNING, "the node has not reached a public relay")


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_fault_26_a_command_that_is_not_on_the_path(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    for folder in (other, own):
        folder.mkdir()
        (folder / "mesh-llm").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(own))
    monkeypatch.setenv("PATH", str(other) if elsewhere else str(tmp_path))

    found = one(await bad(home, "command"))

    wanted = f"{other}/mesh-llm is another installation than this one in {own}"
    assert found.what == (wanted if elsewhere else "mesh-llm is not on the PATH")
    assert f'export PATH="{own}:$PATH"' in found.mend
    (tmp_path / "mesh-llm").symlink_to(own / "mesh-llm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await bad(home, "command") == []


VPN = (
    "ip link add tun0 type veth peer far",
    "ip addr add 10.8.0.2/24 dev tun0",
    "ip link set tun0 up",
    "ip link set far up",
)


@pytest.mark.parametrize(
    ("setup", "what"),
    [
        ((), "this machine has no address but its own loopback and bridges to its containers"),
        (VPN, "a VPN is up: 10.8.0.2 (tun0)"),
    ],
)
def test_fault_27_no_network_or_one_that_is_a_vpn(home: Path, setup: Sequence[str], what: str) -> None:
    ended = within("PATH=$PATH:/usr/sbin:/sbin", *setup, spaces="-rn", home=home, check="addresses")

    (found,) = said(ended)
    assert (found["level"], found["what"]) == ("warning", what)


# -- the mesh -------------------------------------------------------------------------------------


@pytest.mark.full
async def test_fault_21_a_node_that_hangs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONTROL_TIMEOUT_S", 0.3)
    (home / "run").mkdir(mode=0o700)
    with closing(socket.socket(socket.AF_UNIX)) as silent:
        silent.bind(str(home / "run" / "control.sock"))
        silent.listen()
        _, problem = await command._running(Home(home))

    assert isinstance(problem, MeshError)
    found = one(await bad(home, "node", node_problem=problem))
    assert (found.level, found.what) == (Level.BROKEN, f"the node on {home} does not answer")
    assert "mesh-llm stop" in found.mend


@pytest.mark.parametrize(
    ("fault", "level", "what"),
    [
        ({"kind": "relay"}, Level.WARNING, "two is reached through a relay: UDP does not get through"),
        (
            {"standing": "dead", "connected": False},
            Level.WARNING,
            "two does not answer (dead) at 10.0.0.2:4000",
        ),
        (
            {"connected": False, "via": ["one"]},
            Level.BROKEN,
            "no packets get through to two directly; one passes",
        ),
    ],
)
async def test_fault_22_udp_does_not_get_through(
    home: Path, fault: dict[str, Any], level: Level, what: str
) -> None:
    found = one(await bad(home, "peers", node=running(member(**fault))))

    assert found.level is level
    assert found.what.startswith(what)
    assert "allow UDP port 4001" in found.mend


@pytest.mark.parametrize(
    ("fault", "level", "what"),
    [
        ({"engine": "2024.1.1"}, Level.BROKEN, f"two has engine 2024.1.1, this node {ENGINE_VERSION}"),
        ({"version": "0.1.0"}, Level.WARNING, f"two has mesh-llm 0.1.0, this node {__version__}"),
    ],
)
async def test_fault_23_other_versions_in_the_mesh(
    home: Path, fault: dict[str, Any], level: Level, what: str
) -> None:
    found = one(await bad(home, "versions", node=running(member(**fault))))

    assert (found.level, found.what) == (level, what)
    assert found.mend.startswith("update the older one")


@pytest.mark.parametrize(("minutes", "level"), [(5, Level.WARNING), (2000, Level.BROKEN)])
async def test_fault_24_clocks_that_differ(home: Path, minutes: int, level: Level) -> None:
    now = 1.8e9
    node = running(member(started_s=now + 60 * minutes))

    found = one(await bad(home, "clocks", node=node, now=lambda: now))

    assert found.level is level
    assert found.what == f"the clock of two is at least {minutes} minutes ahead of this machine's"
    assert found.mend == "sudo timedatectl set-ntp true, here and on two"


async def test_a_node_that_failed(home: Path) -> None:
    node = running(state="failed", reason="the engine crashed (SIGSEGV)")

    found = one(await bad(home, "node", node=node))

    assert (found.level, found.what) == (Level.BROKEN, "the node has failed: the engine crashed (SIGSEGV)")
    assert found.mend == "mesh-llm logs"


def test_fault_25_a_mistake_in_the_file_of_options(home: Path) -> None:
    (home / "config.toml").write_text("port = 0\nbind-prot = 1\n")

    (found,) = said(mesh_llm("doctor", "config", "--json", "--home", home))

    assert (found["level"], found["check"]) == ("broken", "config")
    assert found["what"] == f"{home}/config.toml line 2: there is no option bind-prot"
    assert found["mend"] == "did you mean bind-port?"


# -- the report -----------------------------------------------------------------------------------


def test_what_is_taken_out_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "marie")
    monkeypatch.setattr(socket, "gethostname", lambda: "maries-laptop")
    text = (
        "token mesh1-AbC_d-9 by marie@maries-laptop key 3f"
        + "ab" * 31
        + " in /home/marie/x and /Users/jo/y\n"
        'api-key = "hunter22" Authorization: Bearer abc.def\nsk-proj-123456789\n'
        "10.0.0.2:4000 192.168.1.4 127.0.0.1 8.8.8.8:53 203.0.113.9 [2a00:1450::1]:443 fe80::1 ::1 1.2.3\n"
        "at 08:09:10 the secret word is xyzzy"
    )

    shown = redact(text, ["xyzzy"])

    assert shown == (
        "token [invite token] by [user]@[this machine] key [64 digits] "
        "in /home/[user]/x and /Users/[user]/y\n"
        'api-key = "[secret]" Authorization: Bearer [secret]\n[key]\n'
        "10.0.0.2:4000 192.168.1.4 127.0.0.1 [public address]:53 [public address] [[public address]]:443 "
        "fe80::1 ::1 1.2.3\n"
        "at 08:09:10 the secret word is [secret]"
    )


def test_a_report_of_a_home_with_secrets(home: Path, tmp_path: Path) -> None:
    secret = Home(home).secret().hex()
    Home(home).write_mesh({"relay": None, "relay_token": "a-token-of-the-relay", "invites": []})
    (home / "logs").mkdir()
    (home / "logs" / "node.log").write_text(
        f"joined with mesh1-secret from 8.8.4.4:1 relay a-token-of-the-relay key {secret}\n"
    )
    config = {
        "api-key": "hunter22",
        "join": "mesh1-of-the-config",
        "relay": "https://marie:pass-of-marie@relay.example/?token=in-the-address",
    }
    (home / "config.toml").write_text("".join(f'{name} = "{value}"\n' for name, value in config.items()))
    (home / "config.toml").chmod(0o600)
    (home / "service.env").write_text("MESH_LLM_API_KEY=in-the-environment\n")
    (home / "service.env").chmod(0o600)
    (home / "logs" / "engine.log").write_text(
        "Authorization: Bearer mk-anna-0123456789\nkey mk-otto-9876543210\n"
    )
    report = tmp_path / "report.txt"

    ended = mesh_llm("doctor", "home", "--home", home, "--report", report)

    assert ended.status == 0, ended.stdout
    assert ended.stderr == f"Report in {report}: read it before you pass it on\n"
    text = report.read_text()
    assert "joined with [invite token] from [public address]:1 relay [secret] key [secret]" in text
    planted = {
        "hunter22",
        "mesh1-of",
        "pass-of-marie",
        "in-the-address",
        "in-the-environment",
        "mk-anna",
        "mk-otto",
    }
    planted |= {secret, "mesh1-secret", "8.8.4.4", "a-token-of-the-relay"}
    assert {each for each in planted if each in text} == set()


async def test_a_node_bound_to_one_address_is_reached_there_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_llm.doctor.network._by_reach", lambda: {Reach.DIRECT: ["192.0.2.9 (lan)"]})
    said = {}
    for ip in (None, "0.0.0.0", "127.0.0.1"):
        (found,) = await examine(CheckContext(home=Home(home), bind_ip=ip), ["addresses"])
        said[ip] = found.what

    everywhere = "reachable at 192.0.2.9 (lan)"
    assert said == {
        None: everywhere,
        "0.0.0.0": everywhere,
        "127.0.0.1": "reachable at 127.0.0.1 alone (--bind-ip)",
    }
