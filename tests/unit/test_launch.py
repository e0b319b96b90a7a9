"""From a plan to what the engine child is told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.engine.children.external import arguments
from mesh_llm.engine.spec import EngineSpec, LinkSpec, StatesSpec
from mesh_llm.errors import ModelDoesNotFit
from mesh_llm.host.launch import Launch
from mesh_llm.local.hardware import Hardware
from mesh_llm.mesh_settings import Draft, MeshSettings
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import stage_need
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.planning.solo_fit import Fit, fit_solo
from mesh_llm.planning.speculation import cache_settings
from mesh_llm.types import Fingerprint, HostingMode, LayerCache, ModelFacts, NodeId, Prediction
from tests.support.planning import GB, counts, gpu, mesh, model, node, plan_of, settings

DRAFT = Draft(
    name="small",
    fingerprint=Fingerprint("d" * 32),
    weight_bytes=1 << 20,
    cache_bytes=64,
    compute_bytes=1 << 20,
)


HAS = Hardware(
    libraries={},
    splice=None,
    gpus=(),
    memory_bytes=100 * GB,
    machine_memory_bytes=100 * GB,
    machine="",
    speed=None,
)


def engine(
    folder: Path,
    facts: dict[str, bool] | None = None,
    wanted: MeshSettings | None = None,
    draft: Path | None = None,
    **options: Any,
) -> EngineSpec:
    """Of a node that reads 1,000 tokens of a prompt in a second."""
    wanted = wanted or settings()
    known = model(files=(folder / "Big-8B-Q4_K_M.gguf",), **(facts or {}))
    plan = decide(Snapshot(nodes=(node("a", 100),)), known, wanted, current=None, barred={})
    launch = Launch(
        me=NodeId("a"),
        config=NodeConfig(home=folder, threads=1, **options),
        hardware=HAS,
        model=known,
        settings=wanted,
        draft=draft,
    )
    predicted = Prediction(tok_s=10.0, first_token_s=0.612, prompt_tok_s=1000.0)
    return launch.engine(replace(plan, predicted=predicted), (), nodes_here=1)


def test_a_step_is_as_long_as_the_plan_allows(tmp_path: Path) -> None:
    spec = engine(tmp_path)
    assert (spec.batch, spec.micro_batch, spec.settings) == (192, 192, {})
    argv = arguments(spec)
    assert argv[argv.index("--batch-size") + 1] == "192"
    assert argv[argv.index("--ubatch-size") + 1] == "192"


@pytest.mark.parametrize("slots", [1, 64])
def test_the_shortest_step_has_room_for_a_token_of_every_slot(tmp_path: Path, slots: int) -> None:
    pace = engine(tmp_path, wanted=settings(slots=slots)).pace
    assert pace is not None
    assert (pace.usual, pace.fewest) == (64 + slots, 16 + slots)


def test_an_engine_whose_inputs_cannot_be_cut_is_not_paced(tmp_path: Path) -> None:
    assert engine(tmp_path, {"encodes": True}).pace is None


@pytest.mark.parametrize(
    ("wishes", "batch"), [({"n_batch": 2048}, 192), ({"n_ubatch": 1024}, 1024), ({"n_ubatch": 32}, 192)]
)
def test_what_a_person_sets_is_passed_on_and_has_room(
    tmp_path: Path, wishes: dict[str, int], batch: int
) -> None:
    spec = engine(tmp_path, settings=wishes)
    assert spec.settings == wishes  # applied last, by the engine child
    assert spec.batch == batch


@pytest.mark.parametrize(
    ("slots", "wishes", "depths"),
    [
        (1, {}, (24, 6)),
        (8, {}, (23, 6)),  # 8 times 23, and one of each: all of 192
        (10, {}, (18, 6)),
        (64, {}, (2, 2)),
        (64, {"n_batch": 2048}, (24, 6)),
        (1, {"n_batch": 8}, (7, 6)),
        (8, {"n_batch": 8}, (0, 0)),
    ],
)
def test_the_guesses_of_all_slots_fit_into_a_step(
    tmp_path: Path, slots: int, wishes: dict[str, int], depths: tuple[int, int]
) -> None:
    drafting = replace(settings(guess=True, slots=slots), draft=DRAFT, draft_max=6)
    spec = engine(tmp_path, wanted=drafting, draft=tmp_path / "small.gguf", settings=wishes)
    assert (spec.draft.text_depth, spec.draft.model_depth) == depths
    assert (spec.draft.model is not None) == (depths[1] > 0)


def test_an_eagle3_head_that_would_read_over_links_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    wanted = replace(settings(guess=True), draft=replace(DRAFT, layers=(2, 20, 37)), draft_max=6)
    ann, ben = NodeId("a"), NodeId("b")
    launch = Launch(
        me=ann,
        config=NodeConfig(home=tmp_path, threads=1),
        hardware=HAS,
        model=model(files=(tmp_path / "Big-8B-Q4_K_M.gguf",)),
        settings=wanted,
        draft=tmp_path / "small.gguf",
    )
    links = (LinkSpec(name="MESH0", fd=9, layers=3),)
    plans = [plan_of((ann, 0, last), (ben, last, 40)) for last in (37, 20)]
    roomy = [
        replace(plan, stages=tuple(replace(stage, need_bytes=90 * GB) for stage in plan.stages))
        for plan in plans
    ]
    near, far = (launch.engine(plan, links, nodes_here=1).draft for plan in roomy)
    assert (near.reads_layers, near.model_depth) == (True, 6)
    assert (far.model, far.reads_layers, far.model_depth) == (None, False, 0)
    assert far.text_depth > 0
    assert "small is off: what it reads of layers 37 is on other nodes" in caplog.text


def test_an_engine_of_a_person_s_own_guesses_nothing(tmp_path: Path) -> None:
    assert engine(tmp_path, wanted=settings(guess=True)).draft.depth > 0
    assert engine(tmp_path, wanted=settings(guess=True), bin_dir=tmp_path).draft.depth == 0


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


# -- the GPUs of a host ---------------------------------------------------------------------------


def beside_a_worker(folder: Path, layers: int, known: ModelFacts, **has: Any) -> EngineSpec:
    """Of a host with the first of 40 layers; a worker has the others."""
    hardware = replace(HAS, **has)
    published = {**hardware.facts(), "engine": node("a").facts.engine, "machine": "a", "speed": None}
    host, shares = node("a", hosting=HostingMode.PREFER, **published), (layers / 40, 1 - layers / 40)
    wanted = settings(tensor_split=shares)
    plan = decide(mesh(host, node("b", 64)), known, wanted, current=None)
    assert counts(plan) == {each: count for each, count in (("a", layers), ("b", 40 - layers)) if count}
    launch = Launch(
        me=NodeId("a"),
        config=NodeConfig(home=folder, threads=1, gpu_layers=hardware.gpu_layers),
        hardware=hardware,
        model=replace(known, files=(folder / "Big.gguf",)),
        settings=wanted,
    )
    return launch.engine(plan, (LinkSpec(name="b", fd=3, layers=40 - layers),), nodes_here=1)


def hosted(folder: Path, layers: int, **has: Any) -> tuple[tuple[str, ...], int]:
    """The devices of such a host, and its layers there."""
    spec = beside_a_worker(folder, layers, model(), **has)
    return spec.devices, spec.gpu_layers


def test_a_split_engine_saves_states_and_each_node_has_room_for_its_part(tmp_path: Path) -> None:
    known = model()
    spec = beside_a_worker(tmp_path, 20, known)
    # Eight times the cells of its own layers, and the positions of as many tokens.
    cells = 20 * 4096 * 2048 * 2
    assert spec.states == StatesSpec(
        checkpoints=4, prompt_cache_mib=math.ceil(8 * (cells + 24 * 4096) / 2**20)
    )
    assert [link.state_bytes for link in spec.links] == [0]
    assert beside_a_worker(tmp_path, 0, known).states == StatesSpec(checkpoints=4, prompt_cache_mib=1)

    state = replace(known.layers[0], cache=LayerCache(state_bytes=1000))
    hybrid = replace(known, layers=(*known.layers[:30], *[state] * 10))
    spec = beside_a_worker(tmp_path, 20, hybrid)
    assert [link.state_bytes for link in spec.links] == [4 * 10 * 1000]


def test_a_host_without_room_for_its_part_keeps_less_of_it(tmp_path: Path) -> None:
    need = stage_need(model(), cache_settings(model(), settings(), 4096), (0, 20), host=True, head=True)
    for spare_mib, kept_mib in ((200, 100), (1, 1), (0, 0)):
        has = need.total_bytes + (spare_mib << 20)
        spec = beside_a_worker(tmp_path, 20, model(), memory_bytes=has)
        assert spec.states is not None
        assert spec.states.prompt_cache_mib == kept_mib


def test_an_engine_alone_keeps_its_states_itself(tmp_path: Path) -> None:
    assert engine(tmp_path).states is None


def test_a_host_has_on_its_gpus_what_was_planned_there(tmp_path: Path) -> None:
    both = ("CUDA0", "CUDA1")
    assert hosted(tmp_path, 20) == ((), 0)
    assert hosted(tmp_path, 20, gpus=(gpu(24),)) == (("CUDA0",), 20)
    assert hosted(tmp_path, 20, gpus=(gpu(24),), gpu_layers=7) == (("CUDA0",), 7)
    assert hosted(tmp_path, 20, gpus=(gpu(6), gpu(6, "CUDA1"))) == (both, 20)
    # Six GB are the head, scratch memory and ten layers; the rest is for main memory.
    assert hosted(tmp_path, 20, gpus=(gpu(6),)) == (("CUDA0",), 10)
    # Too small for the head: nothing of it goes there.
    assert hosted(tmp_path, 20, gpus=(gpu(0.4),)) == ((), 0)
    assert hosted(tmp_path, 0, gpus=(gpu(6),)) == (("CUDA0",), 0)


def test_alone_a_bound_counts_for_gpus_and_main_memory_together() -> None:
    """The GPU has what the embedding leaves of it."""
    wish = cache_settings(model(10), settings(), 4096)

    def fit(most: int | None) -> Fit:
        return fit_solo(
            model(10),
            wish,
            wish,
            memory_bytes=100 * GB,
            gpus=(gpu(24),),
            gpu_layers=None,
            max_memory_bytes=most,
        )

    assert (fit(None).have_bytes, fit(None).gpu_layers) == (124 * GB, 11)
    assert (fit(8 * GB).have_bytes, fit(8 * GB).gpu_layers) == (8 * GB, 11)
    with pytest.raises(ModelDoesNotFit):
        fit(6 * GB)
