"""How fast models come from a server, against curl from the same one, and what memory that takes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import servers
from bench.plan import Plan
from bench.report import Row, Side, added_row, ratio_row
from bench.stats import at_least, at_most
from mesh_llm.bench.rounds import turns
from mesh_llm.bench.servers import ENVIRONMENT, READY_S, following
from mesh_llm.engine.process import run, spawn
from mesh_llm.errors import MeshError
from mesh_llm.results.samples import Sample

TITLE = "Downloads"

SMALL_MB, LARGE_MB = 100, 800
LINES = {"1 Gbit/s": 125_000_000, "2.5 Gbit/s": 312_500_000}
"""What homes and offices have, in bytes per second."""

_TURN_S = 120.0
_RANDOM_BYTES = 8 << 20
_PEAK = (
    "import resource, subprocess, sys\n"
    "status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode\n"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    "sys.exit(status)\n"
)
_LIBRARY = (
    "import sys\n"
    "from huggingface_hub import hf_hub_download\n"
    "hf_hub_download(sys.argv[1], sys.argv[2], local_dir=sys.argv[3])\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One process that fetched one file."""

    took_s: float
    peak_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rig:
    url: str
    folder: Path
    """In memory where the system has such a place: this is not about disks."""

    async def ours(self, size: str, pace: int) -> _Turn:
        home, models = self.folder / "home", self.folder / "got"
        env = {"MESH_LLM_HOME": str(home), "MESH_LLM_MODELS": str(models), "HF_HOME": str(self.folder / "hf")}
        return await self._timed(
            [str(servers.command()), "download", f"{size}-{pace}"], {**env, "HF_ENDPOINT": self.url}
        )

    async def curl(self, size: str, pace: int) -> _Turn:
        return await self._timed(self._curl(size, pace), {})

    async def curl_and_hash(self, size: str, pace: int) -> _Turn:
        """The same work as ours, with the same library's hash."""
        script = f'set -e; target=$1; shift; "$@"; {_program("openssl")} dgst -sha256 "$target"'
        target = str(self.folder / "got" / f"{size}.gguf")
        return await self._timed(["/bin/sh", "-c", script, "sh", target, *self._curl(size, pace)], {})

    async def library(self, size: str, pace: int) -> _Turn:
        """What `huggingface_hub` fetches by itself, without hashing; over HTTP, as there is no other here."""
        env = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        argv = [sys.executable, "-c", _LIBRARY, f"{pace}/bench", f"{size}.gguf", str(self.folder / "got")]
        return await self._timed(argv, {**env, "HF_HUB_DISABLE_TELEMETRY": "1"})

    def _curl(self, size: str, pace: int) -> list[str]:
        target = self.folder / "got" / f"{size}.gguf"
        port = self.url.rsplit(":", 1)[-1]
        return [
            _program("curl"),
            "-sSf",
            "-o",
            str(target),
            f"http://localhost:{port}/{size}.gguf?pace={pace}",
        ]

    async def _timed(self, argv: list[str], env: dict[str, str]) -> _Turn:
        got = self.folder / "got"
        shutil.rmtree(got, ignore_errors=True)
        got.mkdir()
        watched = [sys.executable, "-S", "-c", _PEAK, *argv]
        started = time.perf_counter()
        finished = await run(
            watched, timeout_s=_TURN_S, env={**ENVIRONMENT, "NO_PROXY": "127.0.0.1,localhost", **env}
        )
        took_s = time.perf_counter() - started
        if finished.status != 0:
            raise MeshError(
                f"{Path(argv[0]).name} ended with {finished.status}: {' / '.join(finished.errors)}"
            )
        return _Turn(took_s=took_s, peak_mb=int(finished.output[-1]) * _rss_unit() / 1e6)


def _rss_unit() -> int:
    return 1 if sys.platform == "darwin" else 1024


def _program(name: str) -> str:
    if (path := shutil.which(name)) is None:
        raise MeshError(f"{name} is not installed", hint=f"this bench compares with {name}")
    return path


async def measure(plan: Plan) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rounds = plan.rounds(full=7, quick=3, full_s=420.0, quick_s=90.0)
    async with _rig() as rig:
        sides = {
            "curl": (rig.curl, 0),
            "ours": (rig.ours, 0),
            "curl, then openssl": (rig.curl_and_hash, 0),
            "huggingface_hub": (rig.library, 0),
            **{f"ours at {line}": (rig.ours, pace) for line, pace in LINES.items()},
            **{f"curl at {line}": (rig.curl, pace) for line, pace in LINES.items()},
        }
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        peaks: dict[str, list[float]] = {"small": [], "large": []}
        await rig.ours("small", 0)  # compiles modules
        for number in rounds:
            for name, (fetch, pace) in turns(list(sides.items()), number):
                small, large = await fetch("small", pace), await fetch("large", pace)
                # The difference: starting Python is not what a download of gigabytes waits for.
                speeds[name].append((LARGE_MB - SMALL_MB) / max(large.took_s - small.took_s, 1e-3))
                if name == "ours":
                    peaks["small"].append(small.peak_mb)
                    peaks["large"].append(large.peak_mb)
    ours = _side("ours", speeds["ours"])
    rows = (
        *(
            ratio_row(
                f"on a line of {line}",
                (_side("ours", speeds[f"ours at {line}"]), _side("curl", speeds[f"curl at {line}"])),
                at_least(0.9),
            )
            for line in LINES
        ),
        *(
            ratio_row(measure, (ours, _side(name, speeds[name])), target)
            for measure, name, target in (
                ("as fast as loopback goes, with a hash on both sides", "curl, then openssl", at_least(0.9)),
                ("as fast as loopback goes, hash against none", "curl", at_least(0.9)),
                ("as fast as loopback goes, beside the library", "huggingface_hub", None),
            )
        ),
        added_row(
            "peak memory: 800 MB over 100 MB",
            (_memory(f"{LARGE_MB} MB", peaks["large"]), _memory(f"{SMALL_MB} MB", peaks["small"])),
            at_most(10.0),
        ),
    )
    return rows, (
        rounds.note(),
        f"MB/s of the {LARGE_MB - SMALL_MB} MB by which two files differ, each fetched by a process of "
        "its own: what a program takes to start drops out, hashing, writing and fsync do not",
        "the server is one process (`download_server.py`, sendfile); files are written to memory where "
        "there is a file system in it",
        "mesh-llm hashes every byte as it comes; curl and huggingface_hub check nothing but the length",
        *([f"all sides ran at niceness {os.nice(0)}, beside others' work"] if os.nice(0) else []),
        "with two cores, which server, client and hash share, loopback is bounded by their CPU time together",
    )


def _side(name: str, values: list[float]) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="MB/s", digits=0)


def _memory(name: str, values: list[float]) -> Side:
    return Side(name=name, sample=Sample.of(values), unit="MB")


@asynccontextmanager
async def _rig() -> AsyncIterator[_Rig]:
    with _folder() as folder:
        files = folder / "files"
        files.mkdir()
        await asyncio.to_thread(_make, files)
        (folder / "home").mkdir()
        (folder / "home" / "catalog.toml").write_text(
            "".join(
                f'["{size}-{pace}"]\nrepo = "{pace}/bench"\nfiles = ["{size}.gguf"]\n\n'
                for size in ("small", "large")
                for pace in (0, *LINES.values())
            )
        )
        argv = following([sys.executable, "-P", str(Path(__file__).with_name("download_server.py"))])
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            if not port.done():
                port.set_result(json.loads(line))

        async with spawn([*argv, str(files)], on_stdout=on_line, on_stderr=lambda _: None):
            async with asyncio.timeout(READY_S):
                url = f"http://127.0.0.1:{await port}"
            yield _Rig(url=url, folder=folder)


@contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    need = 3 * LARGE_MB * 1_000_000
    where = memory if memory.is_dir() and shutil.disk_usage(memory).free > need else None
    with tempfile.TemporaryDirectory(prefix="mesh-bench-", dir=where) as folder:
        yield Path(folder)


def _make(folder: Path) -> None:
    block = os.urandom(_RANDOM_BYTES)
    for name, size_mb in (("small", SMALL_MB), ("large", LARGE_MB)):
        left = size_mb * 1_000_000
        with (folder / f"{name}.gguf").open("wb") as file:
            while left:
                left -= file.write(block[:left])
