"""Every architecture that the engine lists answers over workers as alone, bit by bit, and in N + 1 hops.

With the product's own settings: flash attention is left to the engine, prompts are read in its own steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mesh_llm.types import Setting
from tests.support.architectures import (
    CUTS,
    ENCODERS,
    EXCEPTIONS,
    HOPS_OF_TWO,
    MODELS,
    OMITTED,
    ONE_AT_ONCE,
    REASONS,
    SHARED,
    Exemption,
    Metadata,
)
from tests.support.engine_lab import EngineLab, completion, embedding
from tests.support.sampling import first, sampled
from tests.support.split import token_ids

MORE = 4
REQUESTS = [
    completion(token_ids(1), 1),
    completion(token_ids(1), 1 + MORE),
    completion(token_ids(17, seed=1), 3),
    # Longer than what is read at once: the first part has no outputs.
    completion(token_ids(600, seed=2), 3),
]


def test_every_architecture_of_the_engine_has_a_line(lab: EngineLab) -> None:
    known = lab.ask({"kind": "names"})["architectures"]
    assert sorted(known) == sorted([*MODELS, *ENCODERS, *REASONS])


@pytest.mark.parametrize("architecture", MODELS)
def test_over_workers_as_alone(architecture: str, lab: EngineLab) -> None:
    check_text(architecture, lab, CUTS.get(architecture, (2, 2)))


@pytest.mark.parametrize(
    ("architecture", "cut"),
    first(
        1, [("gemma4", (1, 4)), ("gemma4", (4,)), ("gemma4", (2, 4)), ("gemma3n", (4,)), ("gemma3n", (3, 5))]
    ),
)
def test_shared_caches_lie_together(architecture: str, cut: tuple[int, ...], lab: EngineLab) -> None:
    check_text(architecture, lab, cut, metadata=SHARED[architecture])


@pytest.mark.full
def test_a_cut_among_shared_caches_costs_hops(lab: EngineLab) -> None:
    """Why none is ever planned: whole caches cross a link for each token."""
    tiny = lab.write("gemma4", SHARED["gemma4"])
    split = lab.answers(tiny, REQUESTS, 1, 2)
    hops, _ = split.costs[1].per_token(split.costs[0], MORE)
    assert hops > 3


@pytest.mark.parametrize(("architecture", "cut"), first(1, [("gemma4", (1, 1, 4)), ("gemma3n", (1, 17, 4))]))
def test_inputs_of_every_layer_without_a_layer_on_the_host(
    architecture: str, cut: tuple[int, ...], lab: EngineLab
) -> None:
    """The host makes them: a worker has no link to others than its neighbours."""
    check_text(architecture, lab, cut, metadata=SHARED[architecture])


@pytest.mark.full
@pytest.mark.parametrize("architecture", sorted(MODELS.keys() - CUTS.keys() - EXCEPTIONS.keys()))
def test_three_workers_have_all_layers(architecture: str, lab: EngineLab) -> None:
    check_text(architecture, lab, (2, 2, 2))


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoder_over_workers_as_alone(architecture: str, lab: EngineLab) -> None:
    check_embedding(architecture, lab, (2, 2))


@pytest.mark.full
@pytest.mark.parametrize("cut", [(6,), (3, 1)], ids=str)
@pytest.mark.parametrize("architecture", ENCODERS)
def test_other_cuts_of_encoders(architecture: str, cut: tuple[int, ...], lab: EngineLab) -> None:
    check_embedding(architecture, lab, cut)


@pytest.mark.parametrize("architecture", sampled(MODELS, "llama", "qwen3moe", "deepseek2", "nemotron_h_moe"))
def test_asked_about_all_weights_at_once(architecture: str, lab: EngineLab) -> None:
    """Workers that do not answer as the host would; one that lacks an op is asked as one with a GPU is."""
    tiny = lab.write(architecture, MODELS[architecture], omitted=OMITTED.get(architecture, ()))
    cut = CUTS.get(architecture, (2, 2))
    answers = lab.answers(tiny, REQUESTS[:1], *cut, lacks="ROPE_BACK", poison=False)
    of_weights, of_graphs = answers.waits
    assert of_weights == 1
    assert of_graphs <= 9


def check_embedding(architecture: str, lab: EngineLab, cut: tuple[int, ...]) -> None:
    mean: dict[str, Setting] = {"pooling_type": 1}
    requests = [embedding(token_ids(17)), embedding(token_ids(100, seed=1))]
    tiny = lab.write(architecture, ENCODERS[architecture])
    alone = lab.answers(tiny, requests, embeddings=True, settings=mean)
    split = lab.answers(tiny, requests, *cut, embeddings=True, settings=mean)
    assert split.said == alone.said
    assert alone.said[0] != alone.said[1]
    check_cost(architecture, split.costs[0].hops, dict(split.costs[0].runs), workers=len(cut))


@pytest.mark.full
@pytest.mark.parametrize("cut", [(6,), (1, 1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("architecture", sorted(MODELS.keys() - CUTS.keys()))
def test_other_cuts(architecture: str, cut: tuple[int, ...], lab: EngineLab) -> None:
    check_text(architecture, lab, cut)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"flash_attn_type": 0}, {"n_ubatch": 64}], ids=str)
@pytest.mark.parametrize("architecture", MODELS)
def test_other_settings(architecture: str, settings: dict[str, Setting], lab: EngineLab) -> None:
    check_text(architecture, lab, CUTS.get(architecture, (2, 2)), settings)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in ONE_AT_ONCE])
def test_two_answers_at_once(architecture: str, lab: EngineLab) -> None:
    """The same runs are for both: two cost no more hops than one."""
    both = [token_ids(60, seed=1), token_ids(90, seed=2)]
    requests = [completion(both, 1), completion(both, 1 + MORE)]
    cut, hops = CUTS.get(architecture, (2, 2)), HOPS_OF_TWO.get(architecture)
    check_text(architecture, lab, cut, requests=requests, slots=2, hops=hops)


def check_text(
    architecture: str,
    lab: EngineLab,
    cut: tuple[int, ...],
    settings: dict[str, Setting] | None = None,
    *,
    metadata: Metadata | None = None,
    hops: int | None = None,
    requests: Sequence[dict[str, Any]] = REQUESTS,
    slots: int = 1,
) -> None:
    """`hops`: for each token, where they are not one for each worker and one back."""
    tiny = lab.write(architecture, metadata or MODELS[architecture], omitted=OMITTED.get(architecture, ()))
    alone = lab.answers(tiny, requests, settings=settings, slots=slots)
    # Several runs for a token leave something to each other.
    poison = architecture not in EXCEPTIONS
    split = lab.answers(tiny, requests, *cut, settings=settings, poison=poison, slots=slots)
    assert split.said == alone.said
    assert split.declined == []
    # A model that always says the same would hide every fault.
    assert len(set(map(str, alone.said))) == len(requests)
    needed, runs = split.costs[1].per_token(split.costs[0], MORE)
    check_cost(architecture, needed, runs, workers=len(cut), most=hops)


def check_cost(
    architecture: str, hops: float, runs: dict[str, float], *, workers: int, most: int | None = None
) -> None:
    usual = Exemption(hops=most or workers + 1, runs=1, cause="")
    allowed = EXCEPTIONS.get(architecture, usual)
    assert hops <= allowed.hops
    assert len(runs) == workers
    assert max(runs.values()) <= allowed.runs
