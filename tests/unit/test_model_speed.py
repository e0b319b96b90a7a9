"""What a device can do with the model at hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mesh_llm.defaults import KERNELS_LIMIT
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.planning.model_speed import (
    ATTENTION,
    OPERATION,
    attention_of,
    kernels_of,
    model_speed,
    nearest,
    work_of,
)
from mesh_llm.planning.predict import MEASURED_WITHIN, USUAL_WITHIN, predict
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.types import Kernel, KernelSpeed, Matrices, ModelFacts, NodeId, Prediction, Speed, Stage
from tests.support.planning import GB, mesh, model, node

Q4 = Kernel(kind="q4_1", width=5120, rows=5120)
Q6 = Kernel(kind="q6_K", width=5120, rows=25_600)
HEAD = Kernel(kind="q8_0", width=5120, rows=150_000)
USUAL = Speed(read_bytes_per_s=40 * GB, flops_per_s=800 * GB, attention_per_s=400 * GB)


def typed() -> ModelFacts:
    """Half of each layer's bytes in either type, and a head of a third."""
    plain = model()
    weights = (
        Matrices(kernel=Q4, bytes=GB / 4, elements=0.4e9),
        Matrices(kernel=Q6, bytes=GB / 4, elements=0.3e9),
    )
    return replace(
        plain,
        layers=tuple(replace(layer, weights=weights, operations=10) for layer in plain.layers),
        head=Matrices(kernel=HEAD, bytes=plain.head_bytes, elements=0.4e9),
    )


def known(**rates: tuple[float, float]) -> Speed:
    """Gigabytes, and billions of operations, a second."""
    kernels = {"q4": Q4, "q6": Q6, "head": HEAD, **special()}
    return replace(
        USUAL,
        kernels=tuple(
            KernelSpeed(kernel=kernels[name], read_bytes_per_s=read * GB, flops_per_s=flops * GB)
            for name, (read, flops) in rates.items()
        ),
    )


def special() -> dict[str, Kernel]:
    attention = attention_of(model())
    assert attention
    return {"attention": attention, "op": Kernel(kind=OPERATION, width=5120)}


def predicted(speed: Speed, *, tokens: int = 512) -> Prediction:
    alone: Candidate = node("a", 64)
    facts = replace(alone.facts, speed=speed)
    found = predict(
        typed(),
        [Stage(node=NodeId("a"), first=0, last=40, weight_bytes=0, need_bytes=0, share=1.0)],
        mesh(replace(alone, facts=facts)),
        host=NodeId("a"),
        settings=CacheSettings(context=4096, slots=1),
        prompt_tokens=tokens,
    )
    assert found
    return found


def test_types_count_by_the_bytes_that_have_them() -> None:
    found = model_speed(known(q4=(10, 100), q6=(30, 300), head=(20, 1)), work_of(typed()))

    assert found.read_bytes_per_s == pytest.approx(2 / (1 / 10 + 1 / 30) * GB)
    assert found.flops_per_s == pytest.approx(0.7 / (0.4 / 100 + 0.3 / 300) * GB)
    assert found.head_bytes_per_s == 20 * GB
    assert found.is_measured


def test_without_kernels_it_is_a_usual_model() -> None:
    found = model_speed(USUAL, work_of(typed()))

    assert (found.read_bytes_per_s, found.flops_per_s) == (USUAL.read_bytes_per_s, USUAL.flops_per_s)
    assert (found.operation_s, found.cached_bytes_per_s, found.is_measured) == (0.0, math.inf, False)
    assert predicted(USUAL).tok_s == pytest.approx(40 / 20.4)
    assert predicted(USUAL).tok_s_within == USUAL_WITHIN


def test_a_type_that_was_not_measured_counts_as_a_usual_one() -> None:
    found = model_speed(known(q4=(10, 100)), work_of(typed()))

    assert found.read_bytes_per_s == pytest.approx(2 / (1 / 10 + 1 / 40) * GB)
    assert not found.is_measured


def test_the_nearest_size_of_a_type_stands_for_others() -> None:
    sizes = [Kernel(kind="q4_1", width=width, rows=width) for width in (576, 4096)]
    mixed = Kernel(kind="q4_1", width=5120, rows=5120, experts=8, used=2)
    speeds = {
        kernel: KernelSpeed(kernel=kernel, read_bytes_per_s=1e9, flops_per_s=1e9)
        for kernel in (*sizes, mixed)
    }

    found = nearest(speeds, Q4)

    assert found
    assert found.kernel == sizes[1]
    assert nearest(speeds, Q6) is None


def test_small_operations_and_attention_take_their_time() -> None:
    """Ten in each of 40 layers, of 20 kB each; 512 tokens of 2 kB in keys, and as much in values."""
    plain = predicted(known(q4=(40, 800), q6=(40, 800), head=(40, 1)))
    rates = {"q4": (40, 800), "q6": (40, 800), "head": (40, 1)}
    slower = predicted(known(**rates, op=(2, 1), attention=(10, 400)))

    operations_s = 400 * 4 * 5120 / (2 * GB)
    attention_s = 40 * 512 * 2 * (1024 + 1024) / (10 * GB)
    assert 1 / slower.tok_s - 1 / plain.tok_s == pytest.approx(operations_s + attention_s)
    assert plain.tok_s_within == slower.tok_s_within == MEASURED_WITHIN


def test_depth_makes_tokens_slower() -> None:
    """The engine reads 256 cells together."""
    speed = known(q4=(40, 800), q6=(40, 800), attention=(10, 400))
    first, early, late = (predicted(speed, tokens=tokens) for tokens in (1, 256, 4000))

    grown_s = 40 * (4096 - 256) * 2 * (1024 + 1024) / (10 * GB)
    assert first.tok_s == early.tok_s
    assert 1 / late.tok_s - 1 / early.tok_s == pytest.approx(grown_s)


@pytest.mark.parametrize("figure", [0.0, -1.0, 1.0, math.inf, math.nan])
def test_what_is_no_speed_is_not_taken_for_one(figure: float) -> None:
    bad = KernelSpeed(kernel=Q4, read_bytes_per_s=figure, flops_per_s=1e9)

    found = model_speed(replace(USUAL, kernels=(bad,)), work_of(typed()))

    assert found == model_speed(USUAL, work_of(typed()))


def test_a_model_is_measured_by_a_bounded_number_of_kernels() -> None:
    plain = typed()
    many = tuple(
        Matrices(kernel=Kernel(kind="q4_0", width=32 * each, rows=64), bytes=each, elements=each)
        for each in range(1, 100)
    )
    found = kernels_of(replace(plain, layers=(replace(plain.layers[0], weights=many),)))

    assert len(found) == KERNELS_LIMIT
    assert [kernel.kind for kernel in found[:3]] == [OPERATION, ATTENTION, "q8_0"]
    # The largest of the others first.
    assert found[3].width == 32 * 99
    assert kernels_of(model()) == ()
    odd = replace(many[0], kernel=replace(Q4, kind="i32"))
    assert "i32" not in {
        kernel.kind
        for kernel in kernels_of(replace(plain, layers=(replace(plain.layers[0], weights=(odd, many[1])),)))
    }


def test_threads_of_its_own_leave_room_for_others_at_prompts() -> None:
    """Two nodes with four threads each on a machine with eight: both halves of a prompt at once."""
    pair = [node("a", 64, machine="m", threads=4), node("b", 64, machine="m", threads=4)]
    halves = [
        Stage(node=NodeId(name), first=first, last=first + 20, weight_bytes=0, need_bytes=0, share=0.5)
        for name, first in (("a", 0), ("b", 20))
    ]

    def first_token_s(machine_threads: int) -> float:
        nodes = [replace(each, facts=replace(each.facts, machine_threads=machine_threads)) for each in pair]
        found = predict(
            model(),
            halves,
            mesh(*nodes),
            host=NodeId("a"),
            settings=CacheSettings(context=4096, slots=1),
            prompt_tokens=2048,
        )
        assert found
        return found.first_token_s

    assert first_token_s(4) > 1.5 * first_token_s(8)
