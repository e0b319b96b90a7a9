"""Workers over files of which only some layers are there: they compute with these, and never read a hole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.engine.inspect import read_gguf
from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import worker_spec
from mesh_llm.models.layer_ranges import Extent, Share, needed, tensor_table
from tests.support import tiny_gguf
from tests.support.split import client, lenders, over, plan_for, token_ids

LAYERS = 4
ASKED = {"n_predict": 8, "temperature": 0.0}
HOLES = "its files have holes where some of these weights belong"


async def test_only_what_is_there_is_read(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_gguf.write(tmp_path / "model.gguf", "llama", layers=LAYERS)
    plan = await plan_for(model, libraries)
    table = tensor_table(await read_gguf(model))
    names = needed(table, Share(first=2, last=4, head=False))
    part = tmp_path / "part.gguf"
    write_part(model, part, table.headers[0].size_bytes, [table.tensors[name] for name in names])
    async with client(plan) as whole:
        right = await whole.complete(token_ids(5), **ASKED)

    fingerprint = plan.facts.fingerprint
    spec = replace(worker_spec(plan, tmp_path / "w.sock"), models={})
    async with lenders(spec) as (worker,):
        await worker.add_model(fingerprint, [str(part)], names)
        with pytest.raises(EngineFailed, match=HOLES):
            await worker.prepare(fingerprint, (1, 3))
        assert await worker.prepare(fingerprint, (2, 4)) > 0
        async with client(over(plan, 2), [worker]) as split:
            assert await split.complete(token_ids(5), **ASKED) == right
        # An engine that asks for more than the plan said gets an error, and no zeros.
        with pytest.raises(EngineFailed, match=HOLES):
            async with client(over(plan, 3), [worker]):
                pass

        # More of it came: the same file, and no other weights.
        grown = needed(table, Share(first=1, last=4, head=False))
        write_part(model, part, table.headers[0].size_bytes, [table.tensors[name] for name in grown])
        await worker.add_model(fingerprint, [str(part)], grown)
        async with client(over(plan, 3), [worker]) as split:
            assert await split.complete(token_ids(5), **ASKED) == right

        # And all of it, elsewhere.
        await worker.add_model(fingerprint, [str(model)])
        async with client(over(plan, 4), [worker]) as split:
            assert await split.complete(token_ids(5), **ASKED) == right


def write_part(source: Path, target: Path, header_bytes: int, extents: list[Extent]) -> None:
    """In place: a worker has it open."""
    data = source.read_bytes()
    target.touch()
    os.truncate(target, len(data))
    with target.open("r+b") as file:
        file.write(data[:header_bytes])
        for where in extents:
            file.seek(where.offset)
            file.write(data[where.offset : where.end])
