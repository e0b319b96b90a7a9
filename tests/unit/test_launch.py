"""From a plan to what the engine child is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine.external import arguments
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.node.equipment import Equipment
from mesh_llm.node.launch import Launch
from mesh_llm.planning.decide import decide
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.types import NodeId, Prediction
from tests.support.planning import GB, model, node, settings


def engine(folder: Path, facts: dict[str, bool] | None = None, **options: Any) -> EngineSpec:
    """Of a node that reads 1,000 tokens of a prompt in a second."""
    known = model(files=(folder / "Big-8B-Q4_K_M.gguf",), **(facts or {}))
    plan = decide(Snapshot(nodes=(node("a", 100),)), known, settings(), current=None, barred={})
    launch = Launch(
        me=NodeId("a"),
        config=NodeConfig(home=folder, threads=1, **options),
        equipment=Equipment(
            libraries={},
            splice=None,
            gpus=(),
            memory_bytes=100 * GB,
            machine_memory_bytes=100 * GB,
            machine="",
            speed=None,
        ),
        model=known,
        settings=settings(),
    )
    predicted = Prediction(tok_s=10.0, first_token_s=0.512 + 0.1)
    return launch.engine(replace(plan, predicted=predicted), (), nodes_here=1)


def test_a_step_is_as_long_as_the_plan_allows(tmp_path: Path) -> None:
    spec = engine(tmp_path)
    assert (spec.batch, spec.micro_batch, spec.settings) == (224, 224, {})
    argv = arguments(spec)
    assert argv[argv.index("--batch-size") + 1] == "224"
    assert argv[argv.index("--ubatch-size") + 1] == "224"


@pytest.mark.parametrize(
    ("wishes", "batch"), [({"n_batch": 2048}, 224), ({"n_ubatch": 1024}, 1024), ({"n_ubatch": 32}, 224)]
)
def test_what_a_person_sets_is_passed_on_and_has_room(
    tmp_path: Path, wishes: dict[str, int], batch: int
) -> None:
    spec = engine(tmp_path, settings=wishes)
    assert spec.settings == wishes  # applied last, by the engine child
    assert spec.batch == batch


def test_an_embedding_model_embeds(tmp_path: Path) -> None:
    spec = engine(tmp_path, {"encodes": True})
    assert (spec.embeddings, spec.rerank, spec.batch, spec.micro_batch) == (True, False, 2048, 2048)
    assert "--embeddings" in arguments(spec)


def test_a_reranker_reranks(tmp_path: Path) -> None:
    spec = engine(tmp_path, {"encodes": True, "ranks": True})
    assert (spec.embeddings, spec.rerank) == (False, True)
    assert "--reranking" in arguments(spec)


def test_a_projector_beside_the_model_is_passed_on(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj-Big-8B-F16.gguf"
    projector.write_bytes(b"GGUF")
    spec = engine(tmp_path)
    assert (spec.mmproj, spec.batch, spec.micro_batch) == (str(projector), 512, 512)
    argv = arguments(spec)
    assert argv[argv.index("--mmproj") + 1] == str(projector)
