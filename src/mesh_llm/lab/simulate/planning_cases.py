"""Planning for drawn meshes: how long it takes, and how good plans are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from mesh_llm.defaults import CLEARLY_FASTER
from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.distributions import FINGERPRINT, GB, DrawnNode, draw_nodes, with_links
from mesh_llm.lab.simulate.optimum import optimum
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.decide import decide
from mesh_llm.planning.plan_inputs import PlanInputs, ground_of
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.planning.speculation import cache_settings
from mesh_llm.types import Layer, LayerCache, Mode, ModelFacts, ServingPlan

CONTEXT = 4096
GOOD = 0.95
"""Of the best speed that any plan has."""
Clock = Callable[[], float]


@frozen
class ModelSize:
    """A dense model of that many bytes."""

    name: str
    layers: int
    gb: float


SIZES = (
    ModelSize(name="20 GB", layers=64, gb=20),
    ModelSize(name="140 GB", layers=80, gb=140),
    ModelSize(name="400 GB", layers=61, gb=400),
)
"""A 32B model in four bits, which fits on one node in four; a 70B one in sixteen bits, which fits on a few
servers; and one that fits on none, so that plans are splits."""


def model_of(layers: int, gb: float) -> ModelFacts:
    return ModelFacts(
        files=(Path("large.gguf"),),
        fingerprint=FINGERPRINT,
        size_bytes=int(gb * GB),
        name="Large",
        architecture="llama",
        quantisation="Q4_K_M",
        layers=(Layer(weight_bytes=int(gb * GB / layers), cache=LayerCache(k_width=1024, v_width=1024)),)
        * layers,
        embedding_bytes=300_000_000,
        head_bytes=400_000_000,
        other_bytes=20_000,
        hidden=5120,
        feed_forward=25_600,
        heads=64,
        vocabulary=150_000,
        context_trained=32_768,
        experts=0,
        experts_used=0,
        expert_feed_forward=0,
        query_elements=2 * 64 * 128,
        widest=25_600,
        causal=True,
        pooled=False,
        chat_template=None,
    )


def plain_settings() -> MeshSettings:
    return MeshSettings(
        version=1,
        model="large",
        fingerprint=FINGERPRINT,
        alias="large",
        context=CONTEXT,
        slots=1,
        guess=False,
    )


def snapshot_of(nodes: Sequence[DrawnNode]) -> Snapshot:
    return Snapshot(nodes=tuple(Candidate(id=node.id, facts=node.facts) for node in nodes))


# -- time ----------------------------------------------------------------------------------------


@frozen
class PlanningTime:
    nodes: int
    model: str
    mode: Mode
    stages: int
    seconds: tuple[float, ...]
    """Of CPU time: a first plan, then decisions to keep it, each with its snapshot."""


def planning_time(seed: int, count: int, size: ModelSize, *, rounds: int, clock: Clock) -> PlanningTime:
    nodes = with_links(draw_nodes(Random(seed), count))
    model, settings = model_of(size.layers, size.gb), plain_settings()
    current, seconds, plan = None, [], None
    for _ in range(rounds):
        begun = clock()
        plan = decide(snapshot_of(nodes), model, settings, current=current)
        seconds.append(clock() - begun)
        current = ServingPlan(epoch=1, plan=plan) if plan.mode is not Mode.WAITING else None
    assert plan is not None
    return PlanningTime(
        nodes=count, model=size.name, mode=plan.mode, stages=len(plan.stages), seconds=tuple(seconds)
    )


# -- quality -------------------------------------------------------------------------------------


@frozen
class PlanQuality:
    """Speeds in tokens a second, as predicted; None where there is no plan."""

    seed: int
    nodes: int
    mode: Mode
    tok_s: float | None
    best_tok_s: float | None
    best_stages: int
    same_host_tok_s: float | None
    """Of the best plan that the same node hosts."""

    @property
    def share(self) -> float:
        """Of the best speed; 1 where neither finds a plan."""
        return 1.0 if self.best_tok_s is None else (self.tok_s or 0.0) / self.best_tok_s

    @property
    def kept_whole(self) -> bool:
        """On one node though several would be somewhat faster: less than clearly, as planning has it."""
        return self.mode is Mode.SOLO and 1 / CLEARLY_FASTER - 1e-9 <= self.share < GOOD

    @property
    def searched(self) -> float:
        """Of the best speed with the same host: what the search for workers and cuts is worth."""
        return self.share if self.same_host_tok_s is None else (self.tok_s or 0.0) / self.same_host_tok_s


def small_case(seed: int) -> tuple[Snapshot, ModelFacts]:
    """Two to six nodes that know all delays, and a model of 4 to 12 layers that many have to split."""
    random = Random(seed)
    nodes = with_links(draw_nodes(random, random.randint(2, 6)), all_pairs=True)
    snapshot = snapshot_of(nodes)
    most_gb = (
        max(each.facts.memory_bytes + sum(gpu.free_bytes for gpu in each.facts.gpus) for each in nodes) / GB
    )
    return snapshot, model_of(random.randint(4, 12), most_gb * random.uniform(0.2, 1.8))


def plan_quality(seed: int) -> PlanQuality:
    snapshot, model = small_case(seed)
    plan = decide(snapshot, model, plain_settings(), current=None)
    by_host = optimum(inputs_of(snapshot, model))
    best = next(iter(by_host.values()), None)
    same = by_host.get(plan.host) if plan.host else None
    return PlanQuality(
        seed=seed,
        nodes=len(snapshot.nodes),
        mode=plan.mode,
        tok_s=plan.predicted.tok_s if plan.predicted else None,
        best_tok_s=1 / best.seconds if best else None,
        best_stages=len(best.layout.spans) if best else 0,
        same_host_tok_s=1 / same.seconds if same else None,
    )


def inputs_of(snapshot: Snapshot, model: ModelFacts) -> PlanInputs:
    return ground_of(snapshot, model, cache_settings(model, plain_settings(), CONTEXT))
