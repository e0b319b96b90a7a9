"""The split bench's pieces: both kinds of workers start, answer alike, are counted and leave nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench import meters
from bench.split_sides import write_synthetic
from mesh_llm.bench import rigs
from mesh_llm.bench.client import client
from mesh_llm.bench.rigs import Rig, measured_delay_ms, moved
from mesh_llm.bench.sides import complete, over
from mesh_llm.engine import build
from mesh_llm.engine.inspect import read_gguf
from mesh_llm.lab.rpc_proxy import COMPUTING
from mesh_llm.lab.split import SplitPlan
from mesh_llm.models.facts import model_facts
from tests.support.sampling import first
from tests.support.split import plan_for, token_ids

DELAY_S = 0.002
SLACK_S = 3.0
LAYERS = 4


@pytest.fixture(scope="session")
def with_stock(libraries: dict[str, Path]) -> dict[str, Path]:
    """The libraries, and stock ggml-rpc beside them: ten seconds the first time."""
    built = asyncio.run(build.ensure((*build.STANDARD, "rpc"), lambda _: None))
    if built.missing:
        pytest.skip(f"ggml-rpc could not be built: {built.missing}")
    return built.libraries


@pytest.fixture
async def plan(tiny_model: Path, with_stock: dict[str, Path]) -> SplitPlan:
    return await plan_for(tiny_model, with_stock, settings={"n_ctx_checkpoints": 0})


@pytest.mark.full
async def test_both_kinds_of_workers_say_what_the_engine_alone_says(plan: SplitPlan) -> None:
    async with rigs.ours(plan) as alone, client() as asker:
        expected = (await complete(asker, alone, token_ids(20), 12)).document["content"]
    for setup in (over(plan, 2, delay_s=DELAY_S), over(plan, 2, delay_s=DELAY_S, stock=True)):
        async with setup.start() as rig, client() as asker:
            answer = await complete(asker, rig, token_ids(20), 12)
            pids = [rig.server.pid, *rig.workers]
        assert answer.document["content"] == expected, setup
        assert len(pids) == 3
        assert [pid for pid in pids if psutil.pid_exists(pid)] == [], "left running"


@pytest.mark.parametrize(("start", "weights_travel"), first(1, [(rigs.ours, False), (rigs.stock, True)]))
async def test_what_goes_over_the_links_is_counted(
    start: Callable[[SplitPlan], AbstractAsyncContextManager[Rig]], weights_travel: bool, plan: SplitPlan
) -> None:
    async with start(over(plan, 2, delay_s=DELAY_S).plan) as rig, client() as asker:
        loaded = await rig.passages()
        await complete(asker, rig, token_ids(20), 12)
        used = moved(loaded, await rig.passages())
        held = meters.buffers(rig.log())
    weights = sum(layer.weight_bytes for layer in plan.facts.layers)
    assert (sum(data_links.size_bytes for data_links in loaded) > weights) is weights_travel
    assert sum(used) > 12 * 4 * plan.facts.hidden
    # Never sooner. How much later is what a busy machine makes of it, and what the bench prints.
    assert 1000 * DELAY_S <= measured_delay_ms(loaded) < 1000 * (DELAY_S + SLACK_S)
    assert len([device for device in held if device.startswith(("MESH", "RPC"))]) == 2


async def test_only_what_computes_is_slowed_and_everything_is_counted(plan: SplitPlan) -> None:
    """The line that knows stock RPC, before the stock server: loading passes, each graph waits."""
    delay_s, decoded = 0.05, 6
    far = over(plan, 1, delay_s=delay_s).plan
    async with rigs.stock(far, only_compute=True) as rig, client() as asker:
        assert rig.lines is not None
        before = await rig.lines.read()
        loaded = rig.lines.rpc[0][-1]
        began = time.perf_counter()
        await complete(asker, rig, token_ids(20), decoded)
        took_s = time.perf_counter() - began
        after = await rig.lines.read()
        session = rig.lines.rpc[0][-1]
    weights = sum(layer.weight_bytes for layer in plan.facts.layers)
    assert loaded.refused is None
    assert loaded.counts["HELLO"].commands == 1
    assert loaded.counts["SET_TENSOR"].sent_bytes > weights
    # The warm-up computes, too; hundreds of commands that only load are not held up for a moment.
    assert loaded.total().commands > 10 * loaded.total(COMPUTING).commands
    assert before[0].chunks > 10
    assert before[0].median_ms < 1000 * delay_s
    computed = session.total(COMPUTING).commands - loaded.total(COMPUTING).commands
    assert decoded <= computed <= 2 * decoded
    assert took_s >= computed * delay_s
    assert session.counts["GET_TENSOR"].received_bytes > loaded.counts["GET_TENSOR"].received_bytes
    # Every byte is one of a command's, and those of sessions that only asked for the device's memory.
    sessions = rig.lines.rpc[0]
    assert sum(each.total().sent_bytes for each in sessions) == after[0].size_bytes
    assert sum(each.total().received_bytes for each in sessions) == after[1].size_bytes


async def test_a_block_that_fails_ends_everything_that_it_started(plan: SplitPlan) -> None:
    broken = replace(plan, settings={"n_ubatch": -5}, workers=(2, 2), context=-3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(Exception, match="engine"):
        async with rigs.stock(broken):
            pytest.fail("it started")
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert left == set()


@pytest.mark.full
async def test_the_synthetic_models_load_in_both_layouts(with_stock: dict[str, Path], tmp_path: Path) -> None:
    for quantisation in ("Q4_0", "Q4_K"):
        path = tmp_path / f"{quantisation}.gguf"
        write_synthetic(path, quantisation, layers=2)
        facts = model_facts(await read_gguf(path))
        assert quantisation in facts.quantisation
        base = SplitPlan(facts=facts, libraries=with_stock, workers=(), context=256)
        texts = set()
        for setup in (replace(base), over(base, 2).plan):
            async with rigs.ours(setup) as rig, client() as asker:
                texts.add((await complete(asker, rig, token_ids(20), 8)).document["content"])
        assert len(texts) == 1
