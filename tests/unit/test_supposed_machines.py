"""Plans for machines that are not there."""

from __future__ import annotations

import pytest

from mesh_llm.cli.plan_machines import wanted
from mesh_llm.errors import UsageError
from mesh_llm.models import catalog
from mesh_llm.models.catalog_facts import facts_of
from mesh_llm.models.header_cache import NO_FINGERPRINT
from mesh_llm.planning.snapshot import Snapshot
from mesh_llm.planning.supposed_machines import ASSUMED_WITHIN, SupposedMachine, joined, less_certain
from mesh_llm.planning.would_fit import supposed, whole_plan
from mesh_llm.types import Mode, ModelFacts

GB = 1_000_000_000


def machines(text: str) -> tuple[SupposedMachine, ...]:
    found = wanted(text, None)
    assert found is not None
    return found.machines


def mesh(text: str, rtt_s: float = 0.001) -> Snapshot:
    return supposed(joined(machines(text), (), rtt_s=rtt_s), NO_FINGERPRINT)


def model(name: str) -> ModelFacts:
    facts = facts_of(catalog.load().find(name))
    assert facts is not None
    return facts


def test_how_machines_are_written() -> None:
    assert machines("desktop=24GB:cuda, mac=16GB:Metal,mini=32GB,big=24GB:cuda+64GB@900GB/s") == (
        SupposedMachine(name="desktop", bytes=24 * GB, kind="cuda"),
        SupposedMachine(name="mac", bytes=16 * GB, kind="metal"),
        SupposedMachine(name="mini", bytes=32 * GB),
        SupposedMachine(
            name="big", bytes=24 * GB, kind="cuda", main_bytes=64 * GB, read_bytes_per_s=900 * GB
        ),
    )
    here = wanted("here,mini=32GB", "250us")
    assert here is not None
    assert (here.here, here.rtt_s) == (True, 0.00025)
    assert wanted(None, None) is None


def test_what_is_assumed_is_said_with_its_range() -> None:
    usual, told = machines("desktop=24GB:cuda,big=24GB:cuda@900GB/s")

    assert str(usual) == "desktop: cuda, 600 GB/s (others of the kind: 150 to 6,400)"
    assert str(told) == "big: cuda, 900 GB/s"


@pytest.mark.parametrize(
    ("text", "link", "words"),
    [
        ("mini", None, "--with mini is not a machine"),
        ("mini=32GB:tpu", None, "--with mini=32GB:tpu is not a machine"),
        ("mini=many", None, "'many' is not a size"),
        ("", None, "--with takes 1 to 64 machines"),
        ("here", None, "--with takes 1 to 64 machines"),
        ("a=1GB,a=2GB", None, "--with names a twice"),
        ("a=24:cuda", None, "--with a=24 would be 24 bytes"),
        ("a=1GB", "fast", "--link fast is not a round trip"),
        ("a=1GB", "1000s", "--link 1000s is not a round trip"),
        (None, "1ms", "--link needs --with"),
    ],
)
def test_what_is_no_machine(text: str | None, link: str | None, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wanted(text, link)

    assert caught.value.message == words


def test_three_machines_hold_what_none_does() -> None:
    plan = less_certain(
        whole_plan(mesh("desktop=24GB:cuda,mac=16GB,mini=32GB"), model("gpt-oss-120b"), slots=1)
    )

    assert plan.mode is Mode.SPLIT
    assert len(plan.stages) == 3
    assert plan.stages[0].first == 0
    assert plan.stages[-1].last == 36
    assert plan.context > 4096
    assert plan.predicted is not None
    assert plan.predicted.tok_s_within == plan.predicted.first_token_within == ASSUMED_WITHIN


def test_what_is_missing_is_told() -> None:
    plan = whole_plan(mesh("mac=16GB,mini=32GB"), model("gpt-oss-120b"), slots=1)

    assert plan.mode is Mode.WAITING
    assert plan.have_bytes == 48 * GB
    assert 15 * GB < plan.need_bytes - plan.have_bytes < 20 * GB


def test_a_slow_link_makes_it_slower() -> None:
    quick, slow = (
        whole_plan(mesh("a=20GB,b=20GB", rtt_s), model("Qwen3-32B"), slots=1).predicted
        for rtt_s in (0.0002, 0.05)
    )

    assert quick is not None
    assert slow is not None
    assert slow.tok_s < quick.tok_s


def test_memory_beside_a_gpu_is_lent_too() -> None:
    alone, more = (
        whole_plan(mesh(text), model("gpt-oss-120b"), slots=1) for text in ("a=24GB:cuda", "a=24GB:cuda+64GB")
    )

    assert alone.mode is Mode.WAITING
    assert more.mode is Mode.SOLO


def test_metals_memory_is_counted_once() -> None:
    assert whole_plan(mesh("a=16GB:metal"), model("Qwen3-32B"), slots=1).have_bytes == 16 * GB
