"""A bundle, and the wheel in it, on machines without package index and compiler, for a fresh user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mesh_llm.bundle.build import PYTHONS
from mesh_llm.engine.build import compiler
from tests.process.test_install_script import TOOLS
from tests.support import containerfile, namespaces
from tests.support.command import MARKER, mesh_llm
from tests.support.earlier import earlier
from tests.support.namespaces import Host
from tests.support.networks import HostNode, Lab, all_serve, do
from tests.support.node import temporary_home

FRESH_USER = 54321
BUILD_S = 900.0
"""An earlier version has native libraries of its own."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine"),
]


@pytest.fixture(scope="module")
def packed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of this clone, with a model."""
    packed = tmp_path_factory.mktemp("bundle") / "bundle.tar.gz"
    named = os.environ.get("MESH_LLM_TEST_WHEEL")  # one that is there already: making it takes minutes
    own = ["--wheel", named] if named else ["--native"]
    made = mesh_llm("bundle", *own, "-o", packed, "--with-model", smollm2, within_s=1200)
    if "package index cannot be reached" in made.stderr:
        pytest.skip("there is no package index")
    assert made.status == 0, made.stderr
    return packed


@pytest.fixture(scope="module")
def unpacked(packed: Path) -> Iterator[Path]:
    """Where every user can read it."""
    with tempfile.TemporaryDirectory(prefix="bundle-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        yield next(Path(folder).glob("mesh-llm-*"))


class Stranger:
    """A machine on a network of its own, whose user is new and has an empty home and few commands."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.home, self.bin = host, folder / "home", folder / "bin"
        folder.mkdir()
        self.home.mkdir()
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        python = Path("/usr/bin/python3")
        self._user = ["setpriv", f"--reuid={FRESH_USER}", f"--regid={FRESH_USER}", "--clear-groups"]
        if suits([*self._user, python]):
            os.chown(self.home, FRESH_USER, FRESH_USER)
        else:
            # One below root's home, as pyenv's is, can be used by nobody else.
            self._user, python = [], Path(sys.executable).resolve()
        (self.bin / "python3").symlink_to(python)
        self.mesh_llm = self.home / ".local" / "bin" / "mesh-llm"

    def clean(self, *argv: str | Path) -> list[str | Path]:
        known = f'HOME="{self.home}" PATH="{self.bin}" MESH_LLM_NO_RELAY=1 {MARKER}="${MARKER}"'
        return [*self._user, "/bin/sh", "-c", f'exec env -i {known} "$@"', "sh", *argv]

    def run(self, *argv: str | Path, within_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        command = self.host.command(self.clean(*argv))
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=within_s)

    def say(self, *argv: str | Path) -> str:
        done = self.run(*argv)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install_wheel(self, wheels: Path) -> None:
        """As pip does where there is no index: everything comes from a folder."""
        place = self.home / "mesh"
        self.say("python3", "-m", "venv", "--without-pip", place)
        pip, own = (next(wheels.glob(f"{name}-*.whl")) for name in ("pip", "mesh_llm"))
        given = ["--isolated", "install", "--no-index", "--no-cache-dir", f"--find-links={wheels}"]
        self.say(place / "bin" / "python", pip / "pip", *given, f"{own}[engine]")
        self.mesh_llm = place / "bin" / "mesh-llm"

    def joins(self, lab: Lab, name: str, token: str) -> HostNode:
        home, program = self.home / ".mesh-llm", self.clean(self.mesh_llm)
        arguments = ("--name", name, "--join", token)
        return lab.run(HostNode(*arguments, host=self.host, home=home, model=None, program=program))

    def has_compiled(self) -> bool:
        return (self.home / ".cache" / "mesh-llm" / "sources").exists()

    def left(self) -> set[str]:
        return {path.name for path in self.home.iterdir()}


def suits(python: Sequence[str | Path]) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    tried = subprocess.run([*python, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    return tried.stdout.strip() in PYTHONS


@pytest.fixture
def lab(smollm2: Path) -> Iterator[Lab]:
    if (reason := do(namespaces.unavailable())) is not None:
        pytest.skip(reason)
    with Lab(smollm2) as lab:
        yield lab


@pytest.fixture
def folder() -> Iterator[Path]:
    with temporary_home() as folder:
        folder.chmod(0o755)
        yield folder


def test_it_installs_answers_and_goes(lab: Lab, unpacked: Path, folder: Path) -> None:
    (far,) = lab.build(namespaces.switch(1))
    stranger = Stranger(far, folder / "stranger")

    stranger.say("sh", unpacked / "install.sh")
    assert "Answer:" in stranger.say(stranger.mesh_llm, "demo", "--once", "--nodes", "2")
    assert not stranger.has_compiled()

    script = stranger.home / ".local" / "share" / "mesh-llm" / "install.sh"
    stranger.say("sh", script, "--uninstall")
    assert stranger.left() == {".models", ".mesh-llm"}
    stranger.say("sh", unpacked / "install.sh")
    stranger.say("sh", script, "--uninstall", "--purge")
    assert stranger.left() == set()


@pytest.mark.timeout(3600)
def test_bundle_and_wheel_join_a_clone_of_the_version_before(lab: Lab, unpacked: Path, folder: Path) -> None:
    near, far, third = lab.build(namespaces.switch(3))
    before = earlier(folder / "earlier")
    one = lab.found("one", near, "--split", env=before.env).until_ready(within_s=BUILD_S)
    bundle, wheel = Stranger(far, folder / "bundle"), Stranger(third, folder / "wheel")
    bundle.say("sh", unpacked / "install.sh")
    wheel.install_wheel(unpacked / "wheels")

    two = bundle.joins(lab, "two", one.token())
    three = wheel.joins(lab, "three", one.token())
    answer = said_by_all([one, two, three])

    one.signal(signal.SIGTERM)
    assert one.wait().status == 0
    all_serve([two, three], "two", "three")
    assert two.sky() == three.sky()
    updated = lab.run(HostNode("--name", "one", host=near, home=one.home, model=None))
    assert said_by_all([updated, two, three]) == answer
    assert not bundle.has_compiled()
    assert not wheel.has_compiled()


def said_by_all(nodes: list[HostNode]) -> str:
    """The answer of all three, who compute it together."""
    all_serve(nodes, "one", "two", "three", within_s=BUILD_S)
    (answer,) = {node.sky() for node in nodes}
    assert answer.strip()
    return answer


CONTAINERFILE = Path(__file__).parents[2] / "packaging" / "Containerfile"
RELAY = {"MESH_LLM_RELAY_TOKEN": "a-token-for-the-relay"}
NODE = {"MESH_LLM_API_KEY": "a-key-for-the-api", "MESH_LLM_NO_RELAY": "1"}


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the system has no Python of its own")
@pytest.mark.parametrize("target", ["node", "relay"])
def test_the_steps_of_the_container(
    lab: Lab, packed: Path, unpacked: Path, tmp_path: Path, target: str
) -> None:
    """As they stand, then the image itself: not root, nothing to write to but its volumes."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    text = containerfile.script(
        CONTAINERFILE.read_text("utf-8"),
        target,
        bundle=packed,
        models=unpacked / "models",
        arguments=["--model", "smollm2"] if target == "node" else [],
        secrets=NODE if target == "node" else RELAY,
    )
    argv = ["unshare", "-mn", "sh", "-c", text, "sh", str(scratch)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "healthy\n" in done.stdout
    assert "ended with 0\n" in done.stdout
