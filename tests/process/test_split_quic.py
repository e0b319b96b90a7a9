"""A split engine whose links go over QUIC answers as one whose links are sockets, whoever splices them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mesh_llm.engine import build
from mesh_llm.lab.quic import Splicing
from tests.support import tiny_gguf
from tests.support.split import Answer, client, over, plan_for, token_ids


@pytest.fixture(scope="module")
def splice_library() -> Path:
    built = asyncio.run(build.ensure((build.SPLICE,), lambda _: None, retry=True))
    if error := built.missing.get(build.SPLICE):
        pytest.skip(f"libmesh-splice cannot be built: {error.message}")
    return built.libraries[build.SPLICE]


async def test_links_over_quic(libraries: dict[str, Path], splice_library: Path, tmp_path: Path) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", layers=6)
    plan = over(await plan_for(model, libraries), 2, 2)
    answers: list[Answer] = []
    for splicing in (None, Splicing(library=splice_library), Splicing()):
        async with client(over(plan, 2, 2, splicing=splicing)) as asker:
            answers.append(await asker.complete(token_ids(150), n_predict=16, ignore_eos=True))
    assert len(answers[0].tokens) == 16
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
