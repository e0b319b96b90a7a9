"""Another commit beside this one: its tree in a temporary folder, and the programs that run in it.

    async with revision.pair("HEAD~20") as trees:
        async with servers.node(home, tree=trees.then) as server:
            ...

Both sides run with the same Python and the same installed packages. What differs is the tree that
`mesh_llm` is imported from, and that is checked before anything is measured.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import Side
from mesh_llm.engine.process import Finished, run
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

ROOT = Path(__file__).resolve().parents[1]
NOW, THEN = "now", "then"

_TOOL_S = 60.0
"""For git, and for a Python that imports one package, on a machine that others use as well."""
_BUILD_S = 900.0
"""For the native libraries of a commit whose C++ is another one: minutes on two cores."""
# Prints where the package comes from, and has a child of its own print the same: the engine and all
# other children of a node find it by the environment that they inherit.
_PROBE = (
    "import mesh_llm, subprocess, sys; print(mesh_llm.__file__, flush=True); "
    "sys.argv[1:] and subprocess.run([sys.executable, '-P', '-c', sys.argv[1]], check=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A checkout whose programs are measured."""

    name: str
    root: Path
    commit: str

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join((str(self.root / "src"), str(self.root)))}

    def command(self, *arguments: str) -> list[str]:
        """Its `mesh-llm`: the installed command belongs to one tree only."""
        return [sys.executable, "-P", "-m", "mesh_llm", *arguments]

    def script(self, name: str) -> Path:
        """One of its own programs, for what depends on the inside of its package."""
        return self.root / "bench" / name

    def holds(self, path: str) -> bool:
        return Path(path).resolve().is_relative_to(self.root.resolve())

    async def run(self, *arguments: str, timeout_s: float = _TOOL_S) -> Finished:
        """Its `mesh-llm`, to the end."""
        done = await run(self.command(*arguments), timeout_s=timeout_s, env=self.environment)
        if done.status != 0:
            raise MeshError(
                f"mesh-llm {arguments[0]} of {self.name} ({self.commit}) ended with {done.status}: "
                + " / ".join(done.errors[-3:])
            )
        return done

    async def check(self) -> None:
        """Refuse a tree whose programs, or their children, would import another one's package."""
        argv = [sys.executable, "-P", "-c", _PROBE, _PROBE]
        done = await run(argv, timeout_s=_TOOL_S, env=self.environment, cwd=self.root)
        strays = [path for path in done.output if not self.holds(path)]
        if done.status != 0 or len(done.output) != 2 or strays:
            found = strays[0] if strays else " / ".join(done.errors[-1:]) or "nothing"
            raise MeshError(
                f"{self.name} ({self.commit}) would not run its own code: mesh_llm is imported from {found}",
                hint="an installed mesh_llm goes before PYTHONPATH, or that commit has no src/mesh_llm",
            )

    async def build(self) -> None:
        """Its native libraries, where its C++ is not this commit's; at once where they are there."""
        await self.run("engine", "build", timeout_s=_BUILD_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The two sides: the working tree as it is, and another commit."""

    now: Tree
    then: Tree

    @property
    def both(self) -> tuple[Tree, Tree]:
        return self.now, self.then


@asynccontextmanager
async def pair(revision: str, *, now: str, root: Path = ROOT) -> AsyncIterator[Trees]:
    """This tree, whose commit is told as `now`, and that of `revision`, removed when the block ends."""
    async with checkout(revision, root=root) as then:
        trees = Trees(now=Tree(name=NOW, root=root, commit=now), then=then)
        for tree in trees.both:
            await tree.check()
        yield trees


@asynccontextmanager
async def checkout(revision: str, *, root: Path = ROOT) -> AsyncIterator[Tree]:
    """The files of a commit, outside the repository. Nothing is left in it, not even by kill -9."""
    commit = await _git(
        root, "rev-parse", "--verify", "--short", f"{revision}^{{commit}}", refused=f"{revision!r}: no commit"
    )
    with tempfile.TemporaryDirectory(prefix="mesh-bench-tree-") as folder:
        packed, files = Path(folder) / "tree.tar", Path(folder) / "tree"
        await _git(
            root, "archive", f"--output={packed}", commit, refused=f"the files of {commit} cannot be had"
        )
        with tarfile.open(packed) as archive:
            archive.extractall(files, filter="data")
        packed.unlink()
        yield Tree(name=THEN, root=files, commit=commit)


async def _git(root: Path, *arguments: str, refused: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise MeshError("--against needs git, which is not installed")
    done = await run([git, *arguments], timeout_s=_TOOL_S, cwd=root)
    if done.status != 0:
        raise MeshError(
            f"{refused} ({' '.join(done.errors[-1:])})", hint="git log --oneline lists what there is"
        )
    return done.output[0] if done.output else ""


def sides(seen: Mapping[str, Sequence[float]], unit: str, *, digits: int = 2) -> tuple[Side, Side]:
    """What each tree showed, by its name."""
    now, then = (
        Side(name=name, sample=Sample.of(seen[name]), unit=unit, digits=digits) for name in (NOW, THEN)
    )
    return now, then
