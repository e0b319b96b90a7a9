"""The measurement of what one model is made of: in bounded time, once, and with what there is."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.engine import inspect
from mesh_llm.engine.children.measure import KERNELS_S
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.engine.kernel_speed import known_kernels, measured_kernels
from mesh_llm.engine.library import KernelMeasurement
from mesh_llm.errors import EngineFailed
from mesh_llm.models.facts import model_facts
from mesh_llm.planning.model_speed import OPERATION, kernels_of
from mesh_llm.types import Kernel, KernelSpeed
from tests.support import tiny_gguf

CPU = "CPU"
START_S = 30.0
"""For a child to load the engine, on a machine that is busy with other tests."""
Q4, Q8 = (Kernel(kind=kind, width=576, rows=576) for kind in ("q4_1", "q8_0"))


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "libggml-mesh.so"
    path.write_text("no library")
    return {"mesh": path}


class Measurements:
    """In place of the child: what it is asked for, at so many bytes a second, disturbed or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, disturbed: bool = False) -> None:
        self.asked: list[list[Kernel]] = []
        self.disturbed = disturbed
        self.rate = 1e9
        self.lacks: set[Kernel] = set()
        monkeypatch.setattr(inspect, "measure_kernels", self)

    async def __call__(
        self, libraries: object, device: str, kernels: list[Kernel], **_: object
    ) -> list[KernelMeasurement]:
        self.asked.append(kernels)
        return [
            KernelMeasurement(
                speed=KernelSpeed(kernel=kernel, read_bytes_per_s=self.rate, flops_per_s=self.rate),
                disturbed=self.disturbed,
            )
            for kernel in kernels
            if kernel not in self.lacks
        ]


def age(folder: Path) -> None:
    """As if it had been measured some time ago."""
    for record in folder.glob("*.kernels.json"):
        os.utime(record, (0, 0))


async def test_a_generated_model(libraries: dict[str, Path], tmp_path: Path) -> None:
    if "mesh" not in libraries:
        pytest.skip("libggml-mesh could not be built")
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "qwen3moe", hidden=128, quantisation="Q4_0")
    kernels = kernels_of(model_facts(await read_gguf(path)))
    assert {"q4_0", "attention", OPERATION} <= {kernel.kind for kernel in kernels}
    assert any(kernel.experts > 1 for kernel in kernels)
    cache, started = tmp_path / "speed", time.monotonic()

    found = await measured_kernels(libraries, CPU, 1, kernels, cache=cache)

    assert time.monotonic() - started < KERNELS_S + START_S
    assert found
    assert {speed.kernel for speed in found} <= set(kernels)
    for speed in found:
        assert 1e5 < speed.read_bytes_per_s < 1e14
        assert 1e5 < speed.flops_per_s < 1e17
    assert known_kernels(libraries, CPU, 1, kernels, cache=cache) == found
    assert known_kernels(libraries, CPU, 2, kernels, cache=cache) == ()


async def test_each_is_measured_once(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(monkeypatch)

    first = await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path)
    both = await measured_kernels(fake, CPU, 1, [Q4, Q8], cache=tmp_path)

    assert measurements.asked == [[Q4], [Q8]]
    assert [speed.kernel for speed in both] == [Q4, Q8]
    assert both[0] == first[0]


async def test_what_was_disturbed_is_measured_again_and_the_best_counts(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(monkeypatch, disturbed=True)
    seen = []
    for rate in (3e9, 1e9, 2e9, 9e9):
        measurements.rate = rate
        (speed,) = await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path)
        seen.append(speed.read_bytes_per_s)
        # Another node that starts now takes what is there.
        assert await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path) == (speed,)
        age(tmp_path)

    assert seen == [3e9] * 4
    assert len(measurements.asked) == 3


async def test_one_that_a_device_lacks_is_left_out(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurements = Measurements(monkeypatch)
    measurements.lacks = {Q8}

    for _ in range(5):
        found = await measured_kernels(fake, CPU, 1, [Q4, Q8], cache=tmp_path)
        assert [speed.kernel for speed in found] == [Q4]
        age(tmp_path)

    assert measurements.asked == [[Q4, Q8], [Q8], [Q8]]


async def test_where_it_fails_a_plan_does_without(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> list[KernelMeasurement]:
        raise EngineFailed("it died")

    monkeypatch.setattr(inspect, "measure_kernels", fail)

    assert await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path) == ()
    assert await measured_kernels({}, CPU, 1, [Q4], cache=tmp_path) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"kernels": [3, ["q4_1"]]}', '{"kernels": {"a": 1}}'])
async def test_a_damaged_file_is_written_anew(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    Measurements(monkeypatch)
    await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path)
    (record,) = tmp_path.glob("*.kernels.json")
    record.write_text(text)

    assert known_kernels(fake, CPU, 1, [Q4], cache=tmp_path) == ()
    assert len(await measured_kernels(fake, CPU, 1, [Q4], cache=tmp_path)) == 1
    assert len(known_kernels(fake, CPU, 1, [Q4], cache=tmp_path)) == 1


async def test_the_file_is_bounded(
    fake: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measurements(monkeypatch)
    many = [replace(Q4, rows=rows) for rows in range(1, 600)]

    await measured_kernels(fake, CPU, 1, many, cache=tmp_path)

    (record,) = tmp_path.glob("*.kernels.json")
    assert record.stat().st_size < 64 << 10
    assert len(known_kernels(fake, CPU, 1, many, cache=tmp_path)) == 256
