"""Nodes answer at once, with the engine's own CPU code, and change to a library that is built meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from mesh_llm.engine import build
from mesh_llm.engine.build import Library, compiler
from tests.support.building import leftovers
from tests.support.joining import TEXT, JoiningNode, Lab
from tests.support.node import ENDLESS

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler on this machine")

BUILDING = "using the wheel's own CPU code while a library for this processor is being built"
READY = "the library for this processor is ready"
SOON = "while a library for its processor is being built; it will be quicker afterwards"
COMPILER = """#!/bin/sh
# ggml's own files give nothing, and the library is one that was built before: once the gate is open.
output='' depends=''
for word in "$@"; do
    case $last in -o) output=$word;; -MF) depends=$word;; esac
    last=$word
done
case $output in
    */libggml-cpu.*)
        echo linked >>{log}
        while [ ! -e {gate} ] && [ -e {folder} ]; do sleep 0.1; done
        {then};;
    *ggml-cpu.dir*) : >"$output"; [ -z "$depends" ] || : >"$depends"; exit 0;;
esac
exec {real} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A cache without the CPU library, and a compiler that makes it when it is told to."""

    cache: Path
    library: Library
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        tools = {name: str(self.folder / name) for name in ("CC", "CXX")}
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return {"MESH_LLM_CACHE": str(self.cache), "PATH": path, **tools}

    def finish(self) -> None:
        (self.folder / "gate").touch()

    def links(self) -> int:
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def fails(self) -> None:
        self._write("echo 'error: this linker is tired' >&2; exit 1")

    def makes(self, made: Path) -> None:
        self._write(f'cp {made} "$output"; exit 0')

    def _write(self, then: str) -> None:
        names = {name: self.folder / name for name in ("log", "gate")}
        for name, real in (("CC", shutil.which("cc")), ("CXX", compiler())):
            self._tool(name, COMPILER.format(real=real, folder=self.folder, then=then, **names))
        # Without its effect, and that of the shell behind it: a busy machine would need minutes.
        self._tool("nice", f'#!/bin/sh\necho "$1 $2" >>{self.folder}/nice.log\nshift 6\nexec "$@"\n')

    def _tool(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(script)
        path.chmod(0o755)


@pytest.fixture
def workshop(
    libraries: dict[str, Path], engine_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Workshop:
    if set(libraries) < {"mesh", "cpu"}:
        pytest.skip("the native libraries could not be built")
    kept, cache = build.library("mesh").folder, tmp_path / "cache"
    monkeypatch.setenv("MESH_LLM_CACHE", str(cache))
    mesh = build.library("mesh").folder
    mesh.parent.mkdir(parents=True)
    mesh.symlink_to(kept)
    (cache / "sources").mkdir()
    (cache / "sources" / engine_sources.name).symlink_to(engine_sources)
    workshop = Workshop(cache=cache, library=build.library("cpu"), folder=tmp_path / "tools")
    workshop.folder.mkdir()
    workshop.makes(libraries["cpu"])
    return workshop


def loaded(node: JoiningNode, program: str, library: Path) -> list[bool]:
    """For each of a node's children of a kind, whether it has loaded a library."""
    found = []
    for process, argv in node.command_lines().items():
        if program in argv:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found.append(str(library) in maps)
    return found


@pytest.mark.full
def test_nodes_change_over_and_cut_no_answer(nodes: Lab, workshop: Workshop) -> None:
    plan = ("--model", nodes.model, "--ctx-size", "8192", "--parallel", "2", "--split", "--hosting", "prefer")
    one = nodes.start("one", *plan, env=workshop.env).until_ready()
    two = nodes.join("two", one, env=workshop.env)
    before = one.until_status(lambda status: len(status["plan"]["stages"]) == 2, what="both take part")
    one.until(lambda: workshop.links() == 1, what="the library is being built")

    assert BUILDING in one.stdout
    assert BUILDING in (one.home / "logs" / "node.log").read_text()
    assert before["engine"]["warnings"] == [
        f"{name} computes with the engine's own CPU code {SOON}" for name in ("one", "two")
    ]
    assert set((workshop.folder / "nice.log").read_text().splitlines()) == {"-n 10"}
    assert one.ask("/v1/completions", TEXT).status == 200
    with one.stream("/v1/completions", ENDLESS) as answer:
        chunks = answer.data()
        next(chunks)
        workshop.finish()
        two.until_said(READY)
        after = one.until_status(
            lambda status: (
                status["plan"]["epoch"] > before["plan"]["epoch"]
                and not status["engine"]["warnings"]
                and all(loaded(one, "mesh_llm.engine.children.serve", workshop.library.path)[-1:])
                and any(loaded(two, "mesh_llm.engine.children.worker", workshop.library.path))
            ),
            what="a plan serves with it",
        )
        # What was begun before goes on, where it began.
        for _ in range(20):
            assert "error" not in json.loads(next(chunks))
    assert [stage["node"] for stage in after["plan"]["stages"]] == [
        stage["node"] for stage in before["plan"]["stages"]
    ]
    assert one.ask("/v1/completions", TEXT).status == 200
    one.until(
        lambda: (
            loaded(one, "mesh_llm.engine.children.serve", workshop.library.path) == [True]
            and loaded(two, "mesh_llm.engine.children.worker", workshop.library.path) == [True]
        ),
        what="the old engine and the old worker end",
    )
    assert workshop.links() == 1, "nodes of one machine build once"
    assert leftovers(workshop.cache) == []


@pytest.mark.full
def test_a_node_that_stops_ends_its_build(nodes: Lab, workshop: Workshop) -> None:
    node = nodes.create("one", env=workshop.env)
    node.until(lambda: workshop.links() == 1, what="the library is being built")

    node.stop()

    assert node.descendants() == []
    assert leftovers(workshop.cache) == []
    assert not workshop.library.built
    assert not workshop.library.failure.exists()


@pytest.mark.full
def test_a_build_that_fails_is_told_and_remembered(nodes: Lab, workshop: Workshop) -> None:
    workshop.fails()
    workshop.finish()
    node = nodes.create("one", env=workshop.env)
    node.until_said("Engine: using the wheel's own, slower CPU code: building ggml-cpu failed:")

    status = node.until_status(lambda status: not status["engine"]["warnings"], what="nothing is built")
    assert status["plan"]["epoch"] == 1
    assert node.ask("/v1/completions", TEXT).status == 200
    assert "this linker is tired" in workshop.library.failure.read_text()
    node.stop()
    again = nodes.create("again", env=workshop.env)
    assert BUILDING not in again.stdout
    assert workshop.links() == 1
