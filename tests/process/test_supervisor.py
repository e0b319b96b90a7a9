"""The life of an engine child: its key stays secret, its deaths are explained, its restarts paced."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mesh_llm.engine.spec import EngineSpec, LinkSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.telemetry import engine_figures
from mesh_llm.errors import EngineFailed

WAIT_S = 60.0
HANGS_S = 2.0
"""A third of what an engine is given: the rest is for a busy machine."""


@pytest.fixture
def spec(tiny_model: Path, libraries: dict[str, Path]) -> EngineSpec:
    return EngineSpec(
        model=str(tiny_model),
        alias="tiny",
        context=512,
        slots=1,
        threads=1,
        key=secrets.token_urlsafe(32),
        libraries={name: str(path) for name, path in libraries.items()},
    )


class Watched:
    """A supervisor, and every report that it gave."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.reports: list[EngineReport] = []
        self.supervisor = EngineSupervisor(spec, folder / "engine.log", self._note)
        self._changed = asyncio.Event()

    def _note(self, report: EngineReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, condition: Callable[[EngineReport], bool]) -> EngineReport:
        async with asyncio.timeout(WAIT_S):
            while not condition(self.supervisor.report):
                self._changed.clear()
                await self._changed.wait()
        return self.supervisor.report

    def until_ready(self) -> Awaitable[EngineReport]:
        return self.until(lambda report: report.state is EngineState.READY)

    async def sizes(self) -> dict[str, int]:
        """Of its buffers: read from its log, which may come after the word that it is ready."""
        async with asyncio.timeout(WAIT_S):
            while len(self.supervisor.report.buffers) < 4:
                await asyncio.sleep(0.02)
        return self.supervisor.report.buffers

    async def figures(self, key: str) -> dict[str, float]:
        """What the engine tells of itself; asked again while it is too busy to do so."""
        async with asyncio.timeout(WAIT_S):
            while not (found := await engine_figures(f"http://127.0.0.1:{self.supervisor.report.port}", key)):
                await asyncio.sleep(0.02)
        return found

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def test_ready_means_that_it_answers_who_has_the_key(spec: EngineSpec, tmp_path: Path) -> None:
    watched = Watched(spec, tmp_path)
    async with watched.running():
        report = await watched.until_ready()
        url = f"http://127.0.0.1:{report.port}"

        assert report.ready_s > 0
        assert "prompt_tokens_total" in await watched.figures(spec.key)
        assert await engine_figures(url, "another key") == {}
        assert set(await watched.sizes()) == {"model", "KV", "compute", "output"}
        pid = report.pid
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert watched.supervisor.report.state is EngineState.NONE


async def test_the_key_is_in_no_log_and_on_no_command_line(spec: EngineSpec, tmp_path: Path) -> None:
    watched = Watched(spec, tmp_path)
    async with watched.running():
        report = await watched.until_ready()
        child = psutil.Process(report.pid)
        await watched.sizes()
        seen = [*child.cmdline(), *child.environ().values()]

    log = (tmp_path / "engine.log").read_text()
    # Not even its end, which llama-server prints to tell keys apart.
    assert spec.key[-4:] not in log
    assert "api_keys: …" in log
    assert not any(spec.key in part for part in seen)


async def test_a_death_is_explained_to_who_asks_and_mended(spec: EngineSpec, tmp_path: Path) -> None:
    watched = Watched(spec, tmp_path)
    async with watched.running():
        first = await watched.until_ready()
        assert first.pid is not None
        assert first.port is not None
        sizes = await watched.sizes()
        why = asyncio.create_task(watched.supervisor.why(first.port))
        psutil.Process(first.pid).kill()

        assert await why == "the engine was killed (SIGKILL)"
        await watched.until(lambda report: report.restarts == 1)
        second = await watched.until_ready()
        assert await watched.sizes() == sizes

    assert second.pid != first.pid
    states = [report.state for report in watched.reports]
    assert EngineState.FAILED in states


async def test_a_hanging_engine_is_ended_explained_and_mended(spec: EngineSpec, tmp_path: Path) -> None:
    watched = Watched(spec, tmp_path)
    async with watched.running():
        first = await watched.until_ready()
        assert first.pid is not None
        assert first.port is not None
        hanging = psutil.Process(first.pid)

        hanging.suspend()
        failed = await watched.until(lambda report: report.state is EngineState.FAILED)
        assert failed.reason == "the engine did not answer for 6 s, and was ended"
        assert not hanging.is_running()
        assert await watched.supervisor.why(first.port) == failed.reason
        second = await watched.until_ready()

    assert second.pid != first.pid
    assert second.restarts == 1


async def test_an_engine_that_hangs_for_less_is_left_alone(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_llm.engine.health_check.BEAT_S", 0.2)
    watched = Watched(spec, tmp_path)
    async with watched.running():
        report = await watched.until_ready()
        process = psutil.Process(report.pid)
        for _ in range(3):
            process.suspend()
            await asyncio.sleep(HANGS_S)  # the condition is the time itself
            process.resume()
            assert await watched.figures(spec.key)
        assert process.is_running()
        assert watched.supervisor.report.pid == report.pid
    assert watched.supervisor.report.restarts == 0


async def test_a_split_engine_that_hangs_is_left_to_who_made_its_links(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(spec, tmp_path)
    async with watched.running() as task:
        report = await watched.until_ready()
        watched.supervisor.spec = replace(spec, links=(LinkSpec(name="MESH0", fd=0, layers=1),))
        # Not before: an engine that is slow to answer would be restarted.
        monkeypatch.setattr("mesh_llm.engine.health_check.SILENCE_S", 2.0)
        psutil.Process(report.pid).suspend()
        with pytest.raises(EngineFailed, match="the engine did not answer for 6 s, and was ended"):
            async with asyncio.timeout(WAIT_S):
                await task
    assert watched.supervisor.report.restarts == 0


async def test_a_model_that_cannot_be_loaded_is_not_tried_again(spec: EngineSpec, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(Path(spec.model).read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight"))
    watched = Watched(replace(spec, model=str(damaged)), tmp_path)

    with pytest.raises(EngineFailed) as caught:
        await watched.supervisor.run()

    assert caught.value.message == (
        "the engine cannot load this model (check_tensor_dims: tensor 'blk.1.attn_q.weight' not found)"
    )
    assert caught.value.hint == f"its log: {tmp_path}/engine.log"
    assert watched.supervisor.report.restarts == 0


async def test_an_engine_that_was_never_ready_is_not_tried_again(spec: EngineSpec, tmp_path: Path) -> None:
    watched = Watched(replace(spec, libraries={"cpu": "/no/such/library.so"}), tmp_path)

    with pytest.raises(
        EngineFailed,
        match=r"^the engine ended: the engine refused to load /no/such/library.so: cannot open shared ",
    ):
        await watched.supervisor.run()


def short_lived(spec: EngineSpec, folder: Path, *, port: int = 9) -> EngineSpec:
    """An engine that says that it listens, and ends."""
    program = folder / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f"echo 'main: server is listening on http://127.0.0.1:{port}'\n"
        "echo 'the disk is on fire' >&2\n"
        "exit 3\n"
    )
    program.chmod(0o755)
    return replace(spec, bin_dir=str(program.parent))


async def test_an_engine_that_ends_as_soon_as_it_is_ready_did_not_start(
    spec: EngineSpec, tmp_path: Path
) -> None:
    watched = Watched(short_lived(spec, tmp_path), tmp_path)

    with pytest.raises(EngineFailed, match=r"^the engine ended: the disk is on fire$"):
        async with asyncio.timeout(WAIT_S):
            await watched.supervisor.run()

    assert EngineState.READY not in {report.state for report in watched.reports}


async def test_the_log_is_bounded(spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_llm.engine.log_file.ENGINE_LOG_BYTES", 2000)
    monkeypatch.setattr("mesh_llm.engine.log_file.ENGINE_LOG_HELD_BYTES", 500)
    watched = Watched(spec, tmp_path)
    async with watched.running():
        await watched.until_ready()
        await watched.sizes()

    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"engine.log", "engine.log.1", "engine.log.2"}
    assert all(size <= 2000 for size in sizes.values())
