"""A wheel with native libraries in it: what they need of a machine, and that it runs without a compiler."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mesh_llm.bundle.build import PYTHONS
from mesh_llm.bundle.own_wheel import best_variant
from mesh_llm.engine.build import compiler
from tests.support.packaged import ROOT, Installed, interpreter, make_wheel
from tools import glibc_floor

CXX = compiler()
LINUX = sys.platform == "linux"

pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler on this machine")


# -- the oldest glibc -------------------------------------------------------------------------------

NEW_IN_GLIBC = """
#include <condition_variable>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <sys/stat.h>

struct Ends { int * count; ~Ends() { ++*count; } };

extern "C" int uses(double x) {
    int ended = 0;
    std::thread([&] { thread_local Ends ends{&ended}; (void) ends; }).join();
    struct stat found;
    std::mutex mutex;
    std::condition_variable condition;
    std::unique_lock<std::mutex> held(mutex);
    bool waited = condition.wait_for(held, std::chrono::milliseconds(20)) == std::cv_status::timeout;
    try {
        if (std::pow(x, 2.0) > 1) throw std::runtime_error(std::to_string(std::random_device()()));
    } catch (const std::exception & error) {
        return ended == 1 && waited && stat("/", &found) == 0 && S_ISDIR(found.st_mode);
    }
    return 0;
}
"""
CALL = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).uses; f.argtypes = [ctypes.c_double]; print(f(3))"


@pytest.mark.skipif(not LINUX, reason="glibc is Linux's")
def test_a_library_is_linked_against_an_older_glibc(tmp_path: Path) -> None:
    assert CXX is not None
    source, library = tmp_path / "new.cpp", tmp_path / "libnew.so"
    source.write_text(NEW_IN_GLIBC)
    glibc_floor.write_stubs(CXX, tmp_path / "stubs", ROOT / "native" / "floor")
    options = glibc_floor.link_options(tmp_path / "stubs")
    subprocess.run([CXX, "-O1", "-fPIC", "-shared", source, "-o", library, *options], check=True)

    assert glibc_floor.flaws(library, frozenset()) == []
    called = subprocess.run(
        [sys.executable, "-c", CALL, library], capture_output=True, text=True, check=False
    )
    assert (called.stdout, called.stderr) == ("1\n", "")


@pytest.mark.skipif(not LINUX, reason="glibc is Linux's")
def test_what_is_too_new_is_found(tmp_path: Path) -> None:
    assert CXX is not None
    source, library = tmp_path / "new.cpp", tmp_path / "libnew.so"
    source.write_text(
        NEW_IN_GLIBC + 'extern "C" int of_the_engine(); int calls() { return of_the_engine(); }'
    )
    subprocess.run([CXX, "-O1", "-fPIC", "-shared", source, "-o", library], check=True)

    found = glibc_floor.flaws(library, frozenset())

    assert "libnew.so needs of_the_engine, which nothing provides" in found
    assert any("GLIBCXX_" in flaw for flaw in found)
    assert not any(
        "of_the_engine" in flaw for flaw in glibc_floor.flaws(library, frozenset({"of_the_engine"}))
    )


# -- the wheel --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("MESH_LLM_TEST_WHEEL")  # one that is there already: making it takes minutes
    return Path(named) if named else make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
def test_it_answers_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install(f"{wheel}[engine]")

    demo = installed.run("demo", "--once")
    info = json.loads(installed.run("engine", "info", "--json").stdout)
    building = installed.run("engine", "build")

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert not list(tmp_path.glob(".cache/mesh-llm/sources")), "nothing was compiled"
    assert {name: library["prebuilt"] for name, library in info["libraries"].items()} == {
        "mesh": True,
        "cpu": True,
    }
    assert best_variant() in info["libraries"]["cpu"]["path"]
    assert building.returncode == 1
    assert building.stderr.startswith("Error: there is no C++ compiler on this machine\n")


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_it_answers_with_every_python(wheel: Path, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    installed = Installed(tmp_path, python=python)
    installed.install(f"{wheel}[engine]")

    demo = installed.run("demo", "--once")

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "Answer:" in demo.stdout


@pytest.mark.full
def test_without_the_engine_it_is_a_client_and_says_how_to_get_more(wheel: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install(str(wheel))

    node = installed.run()

    assert node.returncode == 1
    assert "is not installed" in node.stderr
    assert "pip install 'mesh-llm[engine]'" in node.stderr
    assert installed.run("--version").returncode == 0
    code = (
        "import asyncio, mesh_llm.engine.page as page; assert 'index.html' in asyncio.run(page.page_files())"
    )
    subprocess.run([installed.bin / "python", "-c", code], check=True, env=installed.env)


@pytest.mark.full
@pytest.mark.skipif(not LINUX, reason="auditwheel is for Linux")
def test_auditwheel_agrees(wheel: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install("auditwheel==6.8.2")

    shown = subprocess.run(
        [installed.bin / "auditwheel", "show", wheel], capture_output=True, text=True, check=False
    )

    major, minor = glibc_floor.FLOOR
    # Not "same as": a wheel that needs even less is as good.
    assert shown.returncode == 0, shown.stderr
    assert f'"manylinux_{major}_{minor}_{platform.machine()}"' in shown.stdout.replace("\n", " "), (
        shown.stdout
    )


@pytest.mark.long
def test_equal_sources_give_equal_bytes(wheel: Path, tmp_path: Path) -> None:
    again = make_wheel(tmp_path)

    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()


@pytest.mark.full
def test_a_wheel_is_made_of_the_sdist(tmp_path: Path) -> None:
    hatchling = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path / "dist")]
    subprocess.run([*hatchling, "--target", "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(tmp_path.glob("mesh_llm-*"))

    subprocess.run([*hatchling, "--target", "wheel"], cwd=unpacked, check=True, capture_output=True)

    made = next((tmp_path / "dist").glob("*-py3-none-any.whl"))
    with zipfile.ZipFile(made) as contents:
        names = contents.namelist()
    assert "mesh_llm/native/CMakeLists.txt" in names, "to be compiled on first use"
    assert not any(name.startswith(("mesh_llm/prebuilt", "mesh_llm/native/floor")) for name in names)
    shutil.rmtree(unpacked)
