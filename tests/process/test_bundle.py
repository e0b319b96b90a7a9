"""A whole bundle, on a machine without package index, compiler and home: it installs, answers and joins."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mesh_llm.engine.build import compiler
from tests.process.test_install_script import TOOLS
from tests.support import containerfile, namespaces
from tests.support.command import Running, mesh_llm
from tests.support.namespaces import Host
from tests.support.networks import Lab, do, names

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine"),
]


@pytest.fixture(scope="module")
def packed(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of this clone, with a model."""
    packed = tmp_path_factory.mktemp("bundle") / "bundle.tar.gz"
    made = mesh_llm("bundle", "--native", "-o", packed, "--with-model", smollm2, within_s=1200)
    if "package index cannot be reached" in made.stderr:
        pytest.skip("there is no package index")
    assert made.status == 0, made.stderr
    return packed


@pytest.fixture(scope="module")
def unpacked(packed: Path) -> Path:
    with tarfile.open(packed) as tar:
        tar.extractall(packed.parent, filter="data")
    return next(packed.parent.glob("mesh-llm-*"))


class Stranger:
    """A machine on a network of its own, with an empty home and few commands."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.home, self.bin = host, folder / "home", folder / "bin"
        self.home.mkdir()
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        (self.bin / "python3").symlink_to(Path(sys.executable).resolve())
        self.mesh_llm = self.home / ".local" / "bin" / "mesh-llm"

    def command(self, *argv: str | Path) -> Sequence[str | Path]:
        clean = ["env", "-i", f"HOME={self.home}", f"PATH={self.bin}", "MESH_LLM_NO_RELAY=1"]
        return self.host.command([*clean, *argv])

    def run(self, *argv: str | Path, within_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv), capture_output=True, text=True, check=False, timeout=within_s
        )

    def left(self) -> set[str]:
        return {path.name for path in self.home.iterdir()}


@pytest.fixture
def lab(smollm2: Path) -> Iterator[Lab]:
    if (reason := do(namespaces.unavailable())) is not None:
        pytest.skip(reason)
    with Lab(smollm2) as lab:
        yield lab


def test_it_installs_answers_joins_and_goes(lab: Lab, unpacked: Path, smollm2: Path, tmp_path: Path) -> None:
    near, far = lab.build(namespaces.switch(2))
    stranger = Stranger(far, tmp_path)

    installed = stranger.run("sh", unpacked / "install.sh")
    assert installed.returncode == 0, installed.stderr

    demo = stranger.run(stranger.mesh_llm, "demo", "--once", "--nodes", "2")
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Answer:" in demo.stdout
    assert not (stranger.home / ".cache" / "mesh-llm" / "sources").exists(), "nothing is compiled"

    one = lab.found("one", near).until_ready(within_s=120)
    argv = [
        str(stranger.mesh_llm),
        "--model",
        smollm2.name,
        "--join",
        one.token(),
        "--name",
        "two",
        "--port",
        "0",
    ]
    with Running(stranger.command(*argv)) as two:
        two.until_said("API ready at ", within_s=120)
        one.until_status(lambda status: names(status) == ["one", "two"], what="both are members")
        stopped = stranger.run(stranger.mesh_llm, "stop")
        assert stopped.returncode == 0, stopped.stderr
        assert two.wait().status == 0

    script = stranger.home / ".local" / "share" / "mesh-llm" / "install.sh"
    removed = stranger.run("sh", script, "--uninstall")
    assert removed.returncode == 0, removed.stderr
    assert stranger.left() == {".models", ".mesh-llm"}
    assert stranger.run("sh", unpacked / "install.sh").returncode == 0
    assert stranger.run("sh", script, "--uninstall", "--purge").returncode == 0
    assert stranger.left() == set()


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
