"""Building native libraries: once, whole or not at all, and never in the way of a node that could run."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh_llm.engine import build
from mesh_llm.engine.build import Built, compiler
from mesh_llm.engine.sources import native_folder
from mesh_llm.errors import BuildFailed, MeshError
from mesh_llm.types import Progress
from tests.support.building import ignore, leftovers
from tests.support.command import Running, mesh_llm, start
from tests.support.downloads import FILE, NAME, REPO, Person
from tests.support.node import SMALL, NodeProcess
from tests.support.sampling import first

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine"),
    # Some build twice, which takes minutes where others want the processor, too.
    pytest.mark.timeout(900),
]

ENSURE = """
import asyncio, sys
from mesh_llm.engine import build
built = asyncio.run(build.ensure(("mesh",), lambda step: None))
assert not built.missing, built.missing
print(built.libraries["mesh"])
"""
COMPILED = "guard.cpp"
"""One of our three files: named in the compiler's log once per build."""
BUILD_S = 300.0
"""For a build of our own library, on a machine that is busy with something else; ten seconds otherwise."""
ORPHAN_S = 10.0
"""For whatever a killed node has started to be gone, by the same measure: a tenth of a second otherwise."""


class Compiler:
    """The real compiler behind a script that notes each call, and does first what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "compiler"
        self.log = folder / "compiler.log"
        self.real = compiler()
        self.before("")

    def before(self, script: str) -> None:
        self.path.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{script}\nexec {self.real} "$@"\n')
        self.path.chmod(0o755)

    def calls(self, file: str = COMPILED) -> int:
        if not self.log.exists():
            return 0
        return sum(f"{file}.o -c" in line for line in self.log.read_text().splitlines())

    @property
    def env(self) -> dict[str, str]:
        return {"CXX": str(self.path)}


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    wrapped = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(wrapped.path))
    return wrapped


def ensure(*, retry: bool = False) -> Built:
    return asyncio.run(build.ensure(("mesh",), ignore, retry=retry))


def start_ensure(cache: Path, wrapped: Compiler) -> Running:
    return Running([sys.executable, "-c", ENSURE], env={"MESH_LLM_CACHE": str(cache), **wrapped.env})


def looks_finished(cache: Path) -> list[Path]:
    return list(cache.glob("native/*/mesh-*/"))


# -- once -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_build_is_used_again_until_forced(cache: Path, wrapped: Compiler) -> None:
    steps: list[Progress] = []

    first = asyncio.run(build.ensure(("mesh",), steps.append))
    second = ensure()

    assert first == second
    assert first.missing == {}
    assert first.libraries["mesh"].is_file()
    assert wrapped.calls() == 1
    assert steps[0] == Progress(what="Building ggml-mesh", done=0, total=0)
    assert steps[-1].done == steps[-1].total > 0
    assert leftovers(cache) == []
    facts = json.loads(first.libraries["mesh"].with_name("build.json").read_text())
    assert facts["backend"] == "mesh"

    forced = asyncio.run(build.ensure(("mesh",), ignore, force=True))

    assert forced == first
    assert wrapped.calls() == 2
    assert len(looks_finished(cache)) == 1


@pytest.mark.long
def test_two_at_once_build_once(cache: Path, wrapped: Compiler) -> None:
    with start_ensure(cache, wrapped) as first, start_ensure(cache, wrapped) as second:
        ends = [first.wait(within_s=BUILD_S), second.wait(within_s=BUILD_S)]

    assert [end.status for end in ends] == [0, 0], ends
    assert ends[0].stdout == ends[1].stdout
    assert wrapped.calls() == 1


@pytest.mark.full
def test_a_node_builds_while_its_model_is_downloaded(
    libraries: dict[str, Path], cache: Path, home: Path, tiny_model: Path, person: Person
) -> None:
    for name in build.STANDARD:
        # So that there is little to compile.
        folder = build.library(name).folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(libraries[name].parent)
    person.hub.put(REPO, FILE, tiny_model.read_bytes())
    person.hub.faults.holds = [1000]
    env = {**person.env, "MESH_LLM_CACHE": str(cache), "HF_HUB_DOWNLOAD_TIMEOUT": "300"}
    with NodeProcess(*SMALL, home=home, model=NAME, env=env) as node:
        node.until(lambda: build.library(build.SPLICE).built, what="it is built", within_s=BUILD_S)
        assert node.status()["node"]["reason"] == f"{Path(FILE).stem} is being downloaded"
        person.hub.release()
        node.until_ready()


# -- interrupted ----------------------------------------------------------------------------------


def gate(wrapped: Compiler, folder: Path) -> Path:
    """The compiler waits before our own code until the file exists; it gives up after half a minute."""
    opened = folder / "open"
    wrapped.before(
        f'case "$*" in *{COMPILED}*) n=0; while [ ! -e {opened} ] && [ $n -lt 300 ]; '
        "do sleep 0.1; n=$((n+1)); done;; esac"
    )
    return opened


@pytest.mark.long
def test_a_killed_build_leaves_nothing_that_counts(cache: Path, wrapped: Compiler, tmp_path: Path) -> None:
    opened = gate(wrapped, tmp_path)
    with start_ensure(cache, wrapped) as running:
        running.until(lambda: wrapped.calls() == 1, what="the compiler runs")
        running.signal(signal.SIGKILL)
        running.process.wait(30)
        assert looks_finished(cache) == []
        assert leftovers(cache) != []
        opened.touch()
        # Nobody is left to end the compiler; it ends by itself, and so does who started it.
        running.until_no_descendants(within_s=BUILD_S)
    assert looks_finished(cache) == []

    built = ensure()

    assert built.missing == {}
    assert wrapped.calls() == 2
    assert leftovers(cache) == []


@pytest.mark.parametrize(("number", "status"), first(1, [(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_an_interrupted_build_ends_everything(
    cache: Path, wrapped: Compiler, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    gate(wrapped, tmp_path)
    env = {"MESH_LLM_CACHE": str(cache), **wrapped.env}
    with start("engine", "build", env=env) as running:
        running.until(lambda: wrapped.calls() == 1, what="the compiler runs")
        running.signal(number)
        ended = running.wait()

    assert ended.status == status
    assert "Traceback" not in ended.stderr
    assert looks_finished(cache) == leftovers(cache) == []


@pytest.mark.full
def test_ctrl_c_during_the_first_build_of_a_node(
    cache: Path, wrapped: Compiler, tmp_path: Path, home: Path, tiny_model: Path
) -> None:
    gate(wrapped, tmp_path)
    env = {"MESH_LLM_CACHE": str(cache), **wrapped.env}
    with NodeProcess(*SMALL, home=home, model=tiny_model, env=env) as node:
        node.until(lambda: wrapped.calls() == 1, what="the compiler runs")
        document = node.status()
        health = node.ask("/health")
        node.signal(signal.SIGINT)
        ended = node.wait()

    assert document["node"]["state"] == "starting"
    assert document["node"]["reason"] == "native libraries are being built"
    assert (health.status, health.json()["reason"]) == (503, "native libraries are being built")
    said = f"{ended.stderr}\n{(home / 'logs' / 'node.log').read_text()}"
    assert ended.status == 130, said
    assert looks_finished(cache) == leftovers(cache) == [], said


async def test_what_cannot_be_removed_does_not_hide_the_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, *, ignore_errors: bool) -> None:
        if not ignore_errors:
            raise OSError("a file has just appeared in it")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(asyncio.CancelledError):
        async with build._scratch(tmp_path, "building-"):
            raise asyncio.CancelledError
    assert len(list(tmp_path.iterdir())) == 1


def test_half_a_library_is_built_anew(cache: Path, wrapped: Compiler) -> None:
    """A node loads this one itself, and would die of it without a word."""
    path = asyncio.run(build.ensure((build.SPLICE,), ignore)).libraries[build.SPLICE]
    whole = path.read_bytes()
    for half in (whole[: len(whole) // 2], b""):
        path.write_bytes(half)
        assert not build.library(build.SPLICE).built
    assert asyncio.run(build.ensure((build.SPLICE,), ignore)).libraries == {build.SPLICE: path}
    assert len(path.read_bytes()) == len(whole)
    assert wrapped.calls("splice.cpp") == 2
    path.with_name("build.json").write_text("{")
    assert not build.library(build.SPLICE).built


# -- failing --------------------------------------------------------------------------------------


def fail_on_our_code(wrapped: Compiler) -> None:
    """And on the engine's: `engine build` makes both, and should not take a minute here."""
    wrapped.before(
        f'case "$*" in *{COMPILED}*|*ggml-cpu*) '
        f'echo "{COMPILED}:7:1: error: this compiler is tired" >&2; exit 1;; esac'
    )


@pytest.mark.long
def test_the_compilers_words_are_shown(cache: Path, wrapped: Compiler) -> None:
    fail_on_our_code(wrapped)

    ended = mesh_llm("engine", "build", env={"MESH_LLM_CACHE": str(cache), **wrapped.env}, within_s=BUILD_S)

    assert ended.status == 1
    assert ended.stderr.count("Error: building ggml-mesh failed:\n") == 1
    assert f"{COMPILED}:7:1: error: this compiler is tired\n" in ended.stderr
    assert len(ended.stderr.split("Error: ")[1].splitlines()) <= 16
    assert looks_finished(cache) == leftovers(cache) == []


@pytest.mark.full
def test_a_failure_is_remembered_until_somebody_insists(cache: Path, wrapped: Compiler) -> None:
    fail_on_our_code(wrapped)
    first = ensure()
    calls = wrapped.calls()

    second = ensure()

    assert calls == wrapped.calls() == 1
    assert isinstance(first.missing["mesh"], BuildFailed)
    assert second.missing["mesh"].message == first.missing["mesh"].message
    assert second.missing["mesh"].hint == "mesh-llm engine build tries again"
    third = ensure(retry=True)
    assert third.missing["mesh"].message == first.missing["mesh"].message
    assert third.missing["mesh"].hint == first.missing["mesh"].hint
    assert wrapped.calls() == 2


@pytest.mark.full
def test_who_insists_gets_the_library(cache: Path, wrapped: Compiler) -> None:
    fail_on_our_code(wrapped)
    ensure()

    wrapped.before("")
    built = ensure(retry=True)

    assert built.missing == {}
    assert wrapped.calls() == 2
    assert ensure() == built


def test_a_node_runs_without_native_libraries(
    cache: Path, wrapped: Compiler, home: Path, tiny_model: Path
) -> None:
    wrapped.path.write_text("#!/bin/sh\necho 'error: no compiler today' >&2\nexit 1\n")
    env = {"MESH_LLM_CACHE": str(cache), **wrapped.env}
    with NodeProcess(*SMALL, home=home, model=tiny_model, env=env) as node:
        node.until_ready()

        node.until_said("Engine: using the wheel's own, slower CPU code: building ggml-cpu failed:")
        assert "    error: no compiler today\n" in node.stdout
        assert node.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
        node.signal(signal.SIGKILL)
        # Without our library the kernel tells the engine.
        node.until_no_descendants(within_s=ORPHAN_S)


def test_no_compiler_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    missing = ensure().missing["mesh"]

    assert missing.message == "there is no C++ compiler on this machine"
    assert missing.hint is not None


@pytest.mark.full
def test_a_library_that_computes_wrong_is_not_installed(
    cache: Path, wrapped: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = copy_of_native(tmp_path, monkeypatch)
    source = native / "worker" / "selftest.cpp"
    source.write_text(
        source.read_text().replace("    test_cpu();", '    throw std::runtime_error("1 + 1 = 3");')
    )

    built = ensure()

    assert built.libraries == {}
    assert built.missing["mesh"].message == ("ggml-mesh was built, but computes wrong results: 1 + 1 = 3")
    assert looks_finished(cache) == leftovers(cache) == []


@pytest.mark.long
def test_a_library_that_crashes_is_not_installed(
    cache: Path, wrapped: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = copy_of_native(tmp_path, monkeypatch)
    source = native / "worker" / "selftest.cpp"
    source.write_text(source.read_text().replace("    test_cpu();", "    __builtin_trap();"))

    message = ensure().missing["mesh"].message

    assert message.startswith("ggml-mesh was built, but computes wrong results: it ended with status -")
    assert looks_finished(cache) == []


# -- names of builds ------------------------------------------------------------------------------


def copy_of_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "native"
    shutil.copytree(native_folder(), copy)
    monkeypatch.setattr(build, "native_folder", lambda: copy)
    return copy


def folders() -> tuple[Path, Path]:
    return build.library("mesh").folder, build.library("cpu").folder


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n// changed\n")


@pytest.mark.parametrize(
    ("change", "mesh_changes", "cpu_changes"),
    [
        (lambda native, patch: append(native / "guard.cpp"), True, False),
        (lambda native, patch: append(native / "wire" / "protocol.h"), True, False),
        (lambda native, patch: append(native / "CMakeLists.txt"), True, True),
        (lambda native, patch: patch.setattr(build, "ENGINE_VERSION", "2027.1.12345"), True, True),
        (lambda native, patch: patch.setattr(build, "platform_name", lambda: "plan9-vax"), True, True),
        (lambda native, patch: patch.setattr(build, "cpu_identity", lambda: "another"), False, True),
        (lambda native, patch: None, False, False),
    ],
    ids=["source", "header", "flags", "engine", "platform", "processor", "nothing"],
)
def test_a_build_is_named_after_what_it_depends_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    mesh_changes: bool,
    cpu_changes: bool,
) -> None:
    native = copy_of_native(tmp_path, monkeypatch)
    before = folders()

    change(native, monkeypatch)

    after = folders()
    assert (before[0] != after[0], before[1] != after[1]) == (mesh_changes, cpu_changes)


# -- disks ----------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESH_LLM_CACHE", str(tmp_path / "file"))

    missing = ensure().missing["mesh"]

    assert missing.message == f"cannot build in {tmp_path}/file: Not a directory"


def test_too_little_room_is_said_before_anything_is_compiled(
    cache: Path, wrapped: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BUILD_DISK_BYTES", 10**18)

    missing = ensure().missing["mesh"]

    assert isinstance(missing, MeshError)
    assert not isinstance(missing, BuildFailed)
    assert missing.message.startswith("building needs 1000000000.0 GB in ")
    assert wrapped.calls() == 0
    assert list(cache.glob("**/*.failed")) == []


# -- the library that has nothing to do with the engine -----------------------------------------------


def test_splices_are_built_without_the_engine(
    tmp_path: Path, wrapped: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "without sources"
    monkeypatch.setenv("MESH_LLM_CACHE", str(cache))

    def no_wheel() -> Path:
        raise AssertionError("the engine's wheel was asked for")

    monkeypatch.setattr(build, "find_wheel", no_wheel)

    built = asyncio.run(build.ensure((build.SPLICE,), ignore))

    assert built.missing == {}
    assert built.libraries["splice"].stem == "libmesh-splice"
    assert wrapped.calls("splice.cpp") == 1
    assert not (cache / "sources").exists()
    assert build.SPLICE not in build.at_hand().libraries, "what is at hand is for engines to load"
