"""Every architecture that the engine lists answers over workers as alone, bit by bit, and in N + 1 hops.

With the product's own settings: flash attention is left to the engine, prompts are read in its own steps.
"""

from __future__ import annotations

import pytest

from mesh_llm.types import Setting
from tests.support.architectures import CUTS, ENCODERS, EXCEPTIONS, MODELS, OMITTED, REASONS, Exemption
from tests.support.engine_lab import EngineLab, completion, embedding
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


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoder_over_workers_as_alone(architecture: str, lab: EngineLab) -> None:
    mean: dict[str, Setting] = {"pooling_type": 1}
    requests = [embedding(token_ids(17)), embedding(token_ids(100, seed=1))]
    tiny = lab.write(architecture, ENCODERS[architecture])
    alone = lab.answers(tiny, requests, embeddings=True, settings=mean)
    split = lab.answers(tiny, requests, 2, 2, embeddings=True, settings=mean)
    assert split.said == alone.said
    assert alone.said[0] != alone.said[1]
    check_cost(architecture, split.costs[0].hops, dict(split.costs[0].runs), workers=2)


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


def check_text(
    architecture: str, lab: EngineLab, cut: tuple[int, ...], settings: dict[str, Setting] | None = None
) -> None:
    tiny = lab.write(architecture, MODELS[architecture], omitted=OMITTED.get(architecture, ()))
    alone = lab.answers(tiny, REQUESTS, settings=settings)
    # Several runs for a token leave something to each other.
    poison = architecture not in EXCEPTIONS
    split = lab.answers(tiny, REQUESTS, *cut, settings=settings, poison=poison)
    assert split.said == alone.said
    assert split.declined == []
    # A model that always says the same would hide every fault.
    assert len(set(map(str, alone.said))) == len(REQUESTS)
    hops, runs = split.costs[1].per_token(split.costs[0], MORE)
    check_cost(architecture, hops, runs, workers=len(cut))


def check_cost(architecture: str, hops: float, runs: dict[str, float], *, workers: int) -> None:
    usual = Exemption(hops=workers + 1, runs=1, cause="")
    allowed = EXCEPTIONS.get(architecture, usual)
    assert hops <= allowed.hops
    assert len(runs) == workers
    assert max(runs.values()) <= allowed.runs
