"""What a split engine does when a worker lies: a real one computes, and its answers are changed on the way.

The engine refuses to start, or fails its requests, with a sentence that says what the worker sent. It
never dies of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh_llm.engine.supervisor import EngineState
from mesh_llm.engine.worker_process import WorkerProcess
from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import SplitPlan, worker_spec
from tests.support import tiny_gguf
from tests.support.relayed_worker import Liar, Lie, at
from tests.support.sampling import sampled
from tests.support.split import client, lenders, over, plan_for, token_ids, until

LAYERS = 4
FAST_S = 20.0
"""Within which a failure has to show, on a machine that is busy with something else."""
QUESTION: dict[str, Any] = {"prompt": token_ids(40), "n_predict": 4, "ignore_eos": True}

DATA, DONE, SUPPORTS, SIZE, ERROR = 0x86, 0x89, 0x8E, 0x8F, 0xFF
KIND, MODEL, GRANT, TOTAL, ALIGNMENT, DESCRIPTION = 136, 140, 144, 152, 160, 232
"""Where these lie in the answer to HELLO."""
GPU = struct.pack("<I", 1)


def says(kind: int, payload: bytes) -> Lie:
    """Answers of one kind are all the same."""
    return lambda found, true: (found, payload if found == kind else true)


@pytest.fixture
async def plan(libraries: dict[str, Path], tmp_path: Path) -> SplitPlan:
    model = tiny_gguf.write(tmp_path / "model.gguf", "llama", layers=LAYERS)
    return over(await plan_for(model, libraries, settings={"n_ctx_checkpoints": 0}), LAYERS)


@pytest.fixture
async def worker(plan: SplitPlan) -> AsyncIterator[WorkerProcess]:
    async with lenders(worker_spec(plan, plan.facts.files[0].parent / "worker.sock")) as (worker_process,):
        yield worker_process


async def refusal(plan: SplitPlan, worker: WorkerProcess, lie: Lie) -> str:
    """Why an engine did not start over a worker that lies. It ended by itself: no signal is named."""
    with pytest.raises(EngineFailed) as caught:
        async with client(plan, [Liar(worker, lie, at_once=True)]):
            pass
    return caught.value.message


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (at(ALIGNMENT, struct.pack("<Q", 0)), "it sent an alignment of 0"),
        (at(ALIGNMENT, struct.pack("<Q", 1 << 63)), f"it sent an alignment of {1 << 63}"),
        (at(TOTAL, b"\xff" * 8), f"it sent a memory of {(1 << 64) - 1} bytes"),
        (at(KIND, b"\xff" * 4), f"it sent a device of kind {(1 << 32) - 1}"),
        (at(MODEL, b"\xff" * 4), f"it sent {(1 << 32) - 1} for whether it has the model"),
        (lambda kind, payload: (kind, payload[:-1]), "it does not speak ggml-mesh"),
        (lambda _, __: (ERROR, b"go\n\x1b[2Jaway\x00\xff" + b"!" * 1000), "go??[2Jaway??" + "!" * 387),
    ],
    ids=["no alignment", "large alignment", "memory", "kind", "flag", "length", "error"],
)
async def test_refused_for_its_greeting(
    lie: Lie, sentence: str, plan: SplitPlan, worker: WorkerProcess
) -> None:
    assert await refusal(plan, worker, lie) == f"the engine ended: MESH0: {sentence}"


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (says(SUPPORTS, bytes(4)), r"it does not compute SET_ROWS \(.+\), whose result has to lie in .+"),
        (says(SUPPORTS, b"\xff" * 4), r"it sent \d+ for whether it computes an op"),
        (says(SIZE, bytes(8)), r"it sent a size of 0 bytes for a tensor of \d+"),
        (says(SIZE, b"\xff" * 8), rf"it sent a size of {(1 << 64) - 1} bytes for a tensor of \d+"),
    ],
    ids=["computes nothing", "neither yes nor no", "small", "large"],
)
async def test_refused_for_what_it_says_of_ops(
    lie: Lie, sentence: str, plan: SplitPlan, worker: WorkerProcess
) -> None:
    """Asked of devices that are no CPU."""
    message = await refusal(plan, worker, at(KIND, GPU, lie))
    assert re.fullmatch(rf"the engine cannot use its workers \(MESH0: {sentence}\)", message), message


async def test_its_description_cannot_move_a_cursor(plan: SplitPlan, worker: WorkerProcess) -> None:
    liar = Liar(worker, at(DESCRIPTION, b"GPU\n\x1b[2J\x9b"), at_once=True)
    async with client(plan, [liar]) as asking:
        text = asking.engine.supervisor.log_text()
    assert "GPU??[2J?" in text
    assert text.replace("\n", "").isprintable()


def _cut(kind: int, payload: bytes) -> tuple[int, bytes]:
    return kind, payload[:-1]


def _shout(kind: int, payload: bytes) -> tuple[int, bytes]:
    return ERROR, b"no\nmore\x1b[2J"


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (_cut, "its answer has the wrong size"),
        (_shout, "no?more?[2J"),
        (says(DONE, b"\xff" * 40), "it sent a time of more than a year for one run"),
        (lambda kind, payload: (SIZE, payload), "it answered what was not asked"),
    ],
    ids=["cut", "error", "cost", "kind"],
)
async def test_requests_fail_and_the_engine_lives(
    lie: Lie, sentence: str, plan: SplitPlan, worker: WorkerProcess
) -> None:
    liar = Liar(worker, lie, at_once=False)
    async with client(plan, [liar]) as asking:
        supervisor = asking.engine.supervisor
        assert (await asking.post("/completion", QUESTION))[0] == 200
        liar.lies = True
        for _ in range(2):
            status, document = await asking.post("/completion", QUESTION | {"cache_prompt": False})
            assert status == 500, document
        await until(lambda: supervisor.report.failed_links, within_s=FAST_S, what="the worker is reported")
        assert supervisor.report.failed_links == {"MESH0": f"MESH0: {sentence}"}
        assert supervisor.report.state is EngineState.READY
        assert supervisor.report.pid is not None
        assert psutil.pid_exists(supervisor.report.pid)


@pytest.mark.parametrize(
    "value",
    [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f", b"\xff\xff\xff\xff"],
    ids=["NaN", "infinite", "negative", "largest", "ones"],
)
@pytest.mark.parametrize("temperature", sampled([0.0, 1.0], 1.0))
async def test_numbers_that_mean_nothing(
    value: bytes, temperature: float, plan: SplitPlan, worker: WorkerProcess
) -> None:
    """What they become is nonsense, or an error; the engine answers, and still does with true ones."""
    liar = Liar(
        worker,
        lambda kind, true: (kind, value * (len(true) // 4) if kind == DATA else true),
        at_once=False,
    )
    async with client(plan, [liar]) as asking:
        supervisor = asking.engine.supervisor
        body = QUESTION | {"cache_prompt": False, "temperature": temperature}
        for lies in (True, False):
            liar.lies = lies
            status, document = await asking.post("/completion", body)
            assert status in (200, 500), document
        assert supervisor.report.state is EngineState.READY
