"""The measurement of this machine's speed: once, one at a time, remembered, and never in a node's way."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from mesh_llm import defaults
from mesh_llm.engine import inspect, machine
from mesh_llm.engine import speed as speeds
from mesh_llm.engine.file_lock import file_lock
from mesh_llm.engine.library import Measurement
from mesh_llm.engine.process import Finished, run
from mesh_llm.engine.speed import known_speed, measured_speed
from mesh_llm.errors import EngineFailed
from mesh_llm.home import cache_folder
from mesh_llm.types import Speed
from tests.support.command import mesh_llm

CPU = "CPU"
# Measures what takes its time and disturbs nobody: after what was disturbed, the next one measures again.
MEASURE = """
import asyncio, json, logging, random, sys
from pathlib import Path
from mesh_llm.engine import inspect
from mesh_llm.engine.library import Measurement
from mesh_llm.engine.speed import measured_speed
from mesh_llm.types import Speed
async def measure(*_, **__):
    await asyncio.sleep(1)
    speed = Speed(read_bytes_per_s=random.uniform(1e9, 9e9), flops_per_s=1e9, attention_per_s=1e9)
    return Measurement(speed=speed, disturbed=False)
inspect.measure = measure
logging.basicConfig(level=logging.INFO)
libraries = {name: Path(path) for name, path in json.loads(sys.argv[1]).items()}
found = asyncio.run(measured_speed(libraries, "CPU", 1, cache=Path(sys.argv[2])))
print(found)
"""


@pytest.fixture
def native(libraries: dict[str, Path]) -> dict[str, Path]:
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh could not be built")
    return libraries


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, Path]:
    """Libraries that nobody loads, where the child is not what is tested."""
    path = tmp_path / "libggml-mesh.so"
    path.write_text("no library")
    return {"mesh": path}


def a_speed(read: float, flops: float) -> Speed:
    return Speed(read_bytes_per_s=read, flops_per_s=flops, attention_per_s=flops / 4)


def found(read: float, flops: float, *, disturbed: bool) -> Measurement:
    return Measurement(speed=a_speed(read, flops), disturbed=disturbed)


class Measurements:
    """In place of the child: one after the other of what it is given, and a count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *results: Measurement | Exception) -> None:
        self.left = list(results)
        self.count = 0
        monkeypatch.setattr(inspect, "measure", self)

    async def __call__(self, *_: object, **__: object) -> Measurement:
        self.count += 1
        result = self.left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


async def test_a_cpu(native: dict[str, Path], tmp_path: Path) -> None:
    speed = await measured_speed(native, CPU, 1, cache=tmp_path / "speed")

    assert speed is not None
    assert 1e7 < speed.read_bytes_per_s < 1e13
    assert 1e8 < speed.flops_per_s < 1e16
    assert 1e7 < speed.attention_per_s < 1e16
    assert known_speed(native, CPU, 1, cache=tmp_path / "speed") == speed
    assert known_speed(native, CPU, 2, cache=tmp_path / "speed") is None
    assert known_speed({**native, "mesh": Path(__file__)}, CPU, 1, cache=tmp_path / "speed") is None


async def test_it_is_measured_once(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(monkeypatch, found(1e9, 2e9, disturbed=False))

    first = await measured_speed(fake, CPU, 1, cache=tmp_path)
    second = await measured_speed(fake, CPU, 1, cache=tmp_path)

    assert first == second == a_speed(1e9, 2e9)
    assert measurements.count == 1
    assert not list(tmp_path.glob(".*"))


async def test_a_library_that_is_built_again_is_measured_again(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measurements(monkeypatch, found(1e9, 2e9, disturbed=False), found(3e9, 4e9, disturbed=False))

    await measured_speed(fake, CPU, 1, cache=tmp_path)
    fake["mesh"].write_text("another library")

    assert await measured_speed(fake, CPU, 1, cache=tmp_path) == a_speed(3e9, 4e9)


async def test_disturbed_it_is_measured_again_and_the_best_is_kept(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(
        monkeypatch,
        found(1e9, 9e9, disturbed=True),
        found(3e9, 2e9, disturbed=True),
        found(2e9, 4e9, disturbed=True),
    )

    seen = [await measured_speed(fake, CPU, 1, cache=tmp_path) for _ in range(5)]

    best = a_speed(3e9, 9e9)
    assert seen == [a_speed(1e9, 9e9), best, best, best, best]
    assert measurements.count == defaults.MEASURE_ATTEMPTS == 3


async def test_two_nodes_at_once_measure_once(fake: dict[str, Path], tmp_path: Path) -> None:
    named = json.dumps({name: str(path) for name, path in fake.items()})
    argv = [sys.executable, "-P", "-c", MEASURE, named, str(tmp_path)]

    async def node() -> Finished:
        return await run(argv, timeout_s=60)

    ended = await asyncio.gather(node(), node())

    said = [line for each in ended for line in each.errors if "speed measured" in line]
    assert [each.status for each in ended] == [0, 0]
    assert ended[0].output == ended[1].output
    assert ended[0].output[-1].startswith("Speed(")
    assert len(said) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"speed": {"read_bytes_per_s": -1.0}, "is_sure": true}'])
async def test_a_damaged_record_is_replaced(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    Measurements(monkeypatch, found(1e9, 2e9, disturbed=False), found(3e9, 4e9, disturbed=False))
    await measured_speed(fake, CPU, 1, cache=tmp_path)
    (record,) = tmp_path.glob("*.json")
    record.write_text(content)

    assert known_speed(fake, CPU, 1, cache=tmp_path) is None
    again = await measured_speed(fake, CPU, 1, cache=tmp_path)
    assert again == known_speed(fake, CPU, 1, cache=tmp_path) == a_speed(3e9, 4e9)


async def test_a_library_that_fails_is_tried_three_times(
    native: dict[str, Path], fake: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        assert await measured_speed(fake, CPU, 1, cache=tmp_path) is None

    reason = f"the engine refused to load {fake['mesh']}: file too short"
    assert caplog.messages == [
        f"speed not measured device=CPU threads=1 attempt={attempt} cause={reason}" for attempt in (1, 2, 3)
    ]


async def test_a_device_that_is_not_there(
    native: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await measured_speed(native, "GPU7", 1, cache=tmp_path) is None
    assert caplog.messages == [
        "speed not measured device=GPU7 threads=1 attempt=1 cause=there is no device GPU7"
    ]


async def test_without_our_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await measured_speed({}, CPU, 1, cache=tmp_path) is None
    assert caplog.messages == ["speed not measured device=CPU threads=1 cause=no libggml-mesh"]
    assert not list(tmp_path.iterdir())


async def test_a_measurement_that_hangs(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import signal; signal.pause()")
    monkeypatch.setattr(inspect, "MEASURE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(inspect, "module", lambda name: [sys.executable, str(script)])

    assert await measured_speed(fake, CPU, 1, cache=tmp_path / "speed") is None
    (message,) = caplog.messages
    assert message.startswith("speed not measured device=CPU threads=1 attempt=1 cause=")
    assert message.endswith("did not finish within 0 s")


async def test_a_child_that_crashes(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "crashes.py"
    script.write_text("import os, sys; print('illegal', file=sys.stderr, flush=True); os.abort()")
    monkeypatch.setattr(inspect, "module", lambda name: [sys.executable, str(script)])

    with pytest.raises(EngineFailed, match=r"it ended with status -6 \(illegal\)"):
        await inspect.measure(fake, CPU, threads=1, memory_bytes=1 << 30)
    assert await measured_speed(fake, CPU, 1, cache=tmp_path / "speed") is None


async def test_who_holds_the_lock_is_not_waited_for_without_end(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(monkeypatch, found(1e9, 2e9, disturbed=False))
    monkeypatch.setattr(speeds, "MEASURE_WAIT_S", 0.1)

    async with file_lock(tmp_path / "measuring.lock", waiting_for="a test"):
        assert await measured_speed(fake, CPU, 1, cache=tmp_path) is None
    assert measurements.count == 0
    monkeypatch.setattr(speeds, "MEASURE_WAIT_S", 60.0)
    assert await measured_speed(fake, CPU, 1, cache=tmp_path) is not None


async def test_a_folder_that_cannot_be_written(
    fake: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    assert await measured_speed(fake, CPU, 1, cache=tmp_path / "file" / "speed") is None
    assert "speed not measured device=CPU threads=1 cause=" in caplog.text


async def test_the_child_refuses_without_memory(native: dict[str, Path]) -> None:
    with pytest.raises(EngineFailed, match="there is no memory to measure its speed with"):
        await inspect.measure(native, CPU, threads=1, memory_bytes=1000)


async def test_engine_info_shows_it(
    native: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "native").symlink_to(cache_folder() / "native")
    environment = {"MESH_LLM_CACHE": str(cache)}
    libraries = {name: cache / path.relative_to(cache_folder()) for name, path in native.items()}
    before = json.loads(mesh_llm("engine", "info", "--json", env=environment).stdout)
    Measurements(monkeypatch, found(12.34e9, 1234.5e9, disturbed=False))
    await measured_speed(libraries, CPU, machine.threads(), cache=cache / "speed")

    document = json.loads(mesh_llm("engine", "info", "--json", env=environment).stdout)
    table = mesh_llm("engine", "info", env=environment)

    assert [device["speed"] for device in before["devices"] if device["name"] == CPU] == [None]
    (cpu,) = (device for device in document["devices"] if device["name"] == CPU)
    figures = asdict(a_speed(12.34e9, 1234.5e9))
    assert cpu["speed"] == {name: figures[name] for name in figures if name != "kernels"}
    assert "CPU: reads 12.3 GB/s, multiplies 1,234 GFLOP/s, attends 309 GFLOP/s" in table.stdout
