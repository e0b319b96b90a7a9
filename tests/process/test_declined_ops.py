"""A worker that does not know an op of its layers: it is named as soon as the model is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import SplitPlan, worker_spec
from mesh_llm.types import DeclinedOp
from tests.support import tiny_gguf
from tests.support.split import Client, client, lenders, over, plan_for, token_ids

LAYERS = 4
PROMPT = token_ids(40)


@pytest.fixture
async def plan(libraries: dict[str, Path], tmp_path: Path) -> SplitPlan:
    model = tiny_gguf.write(tmp_path / "model.gguf", "llama", layers=LAYERS)
    # Several runs for a token leave something to each other.
    return await plan_for(model, libraries, settings={"n_ctx_checkpoints": 0}, poison=False)


async def split_without(op: str | None, plan: SplitPlan, folder: Path) -> tuple[DeclinedOp, ...]:
    """What the second of two workers leaves to the host; the text is that of the engine alone."""
    plan = over(plan, 1, 2)
    specs = [worker_spec(plan, folder / f"{index}.sock") for index in range(2)]
    async with (
        lenders(specs[0], replace(specs[1], lacks=op)) as workers,
        client(plan, workers) as asking,
        client(over(plan)) as alone,
    ):
        assert await answer(asking) == await answer(alone)
        return asking.engine.supervisor.report.declined


async def answer(asking: Client) -> object:
    return await asking.complete(PROMPT, n_predict=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("op", "declined"),
    [
        ("GLU", [("SWIGLU", "ffn_swiglu-2")]),
        ("MUL_MAT", [("MUL_MAT", "blk.2.attn_q.weight")]),
        (None, []),
    ],
    ids=["a node", "weights", "nothing"],
)
async def test_named_when_the_model_is_loaded(
    op: str | None, declined: list[tuple[str, str]], plan: SplitPlan, tmp_path: Path
) -> None:
    found = await split_without(op, plan, tmp_path)
    assert found == tuple(DeclinedOp(link="MESH1", op=op, node=node, layers=2) for op, node in declined)


async def test_refused_where_nobody_else_can_compute_it(plan: SplitPlan, tmp_path: Path) -> None:
    """What a layer writes to its cache can only be computed where the cache is."""
    plan = over(plan, LAYERS)
    async with lenders(replace(worker_spec(plan, tmp_path / "worker.sock"), lacks="SET_ROWS")) as workers:
        with pytest.raises(EngineFailed, match=r"does not compute SET_ROWS \(.+\), whose result"):
            async with client(plan, workers):
                pass
