"""States that a split engine saves: they stay on the workers, and what is put back is what was saved.

An engine alone with as many checkpoints is the measure: the same tokens, every bit of their
log-probabilities, and as many tokens of each prompt taken from what was kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.engine.spec import StatesSpec
from mesh_llm.lab.split import SplitPlan
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.split import Answer, Client, client, over, plan_for, token_ids

LAYERS = 6
CHECKPOINTS = 4
STATES = StatesSpec(checkpoints=CHECKPOINTS)
FLASH_OFF, FLASH_ON = 0, 1
SETTINGS: dict[str, Setting] = {
    "n_batch": 64,
    "n_ubatch": 32,
    "n_ctx_checkpoints": CHECKPOINTS,
    # Left to itself, the engine turns it off for hybrids over workers.
    "flash_attn_type": FLASH_ON,
}
PROMPT = 300


async def plan(
    folder: Path, libraries: dict[str, Path], architecture: str, settings: dict[str, Setting], **fields: Any
) -> SplitPlan:
    model = tiny_gguf.write(folder / f"{architecture}.gguf", architecture, layers=LAYERS)
    return await plan_for(model, libraries, **({"context": 1024, "settings": SETTINGS | settings} | fields))


async def two_turns(client: Client, *, seed: int = 0, **options: Any) -> tuple[Answer, Answer]:
    """A question, and another one after an answer whose end has changed, as where reasoning is left out."""
    options = {"n_predict": 12, "ignore_eos": True} | options
    prompt = token_ids(PROMPT, seed=seed)
    first = await client.complete(prompt, **options)
    more = [*prompt, *first.tokens[:-2], *token_ids(40, seed=seed + 7)]
    return first, await client.complete(more, **options)


@pytest.mark.parametrize("architecture", ["lfm2", "granitehybrid"])
async def test_a_hybrid_goes_on_from_a_checkpoint(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    alone = await plan(tmp_path, libraries, architecture, {})
    async with client(alone) as asking:
        expected = await two_turns(asking)
    assert expected[1].cached >= PROMPT - 8

    for workers in ((6,), (2, 2), (2, 1, 2)):
        async with client(over(alone, *workers, states=STATES)) as asking:
            assert await two_turns(asking) == expected


async def test_without_states_all_is_read_again(libraries: dict[str, Path], tmp_path: Path) -> None:
    alone = await plan(tmp_path, libraries, "lfm2", {"n_ctx_checkpoints": 0})
    async with client(over(alone, 3, 3)) as asking:
        _, second = await two_turns(asking)
    assert second.cached == 0
