"""The plan that should run, the one that runs, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.membership.plan_documents import plan_from_document, plan_to_document
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import CacheSettings, memory_need
from mesh_llm.planning.snapshot import Candidate, Snapshot
from mesh_llm.types import (
    Fingerprint,
    HeldModel,
    HostingMode,
    Mode,
    ModelFacts,
    NodeId,
    Plan,
    Prediction,
    Role,
    Speed,
)
from tests.support.planning import (
    GB,
    counts,
    gpu,
    layers,
    link,
    mesh,
    model,
    node,
    reasons,
    running,
    settings,
)

BIG = model()
SMALL = model(10, 100_000_000)


def fresh(snapshot: Snapshot, facts: ModelFacts = BIG, wishes: MeshSettings | None = None) -> Plan:
    return decide(snapshot, facts, wishes or settings(), current=None)


def changed(snapshot: Snapshot, name: str, *, alive: bool = True, **changes: Any) -> Snapshot:
    return Snapshot(
        nodes=tuple(
            replace(each, alive=alive, facts=replace(each.facts, **changes)) if each.id == name else each
            for each in snapshot.nodes
        )
    )


# -- solo, split, waiting --


def test_what_fits_on_one_runs_there() -> None:
    plan = fresh(mesh(node("a", 64), node("b", 64)))

    assert (plan.mode, plan.host, layers(plan)) == (Mode.SOLO, "a", {"a": (0, 40)})
    assert plan.stages[0].weight_bytes == 20 * GB
    assert plan.stages[0].share == 1.0
    assert plan.need_bytes == memory_need(BIG, CacheSettings(context=4096, slots=1)).total_bytes
    assert plan.have_bytes == 128 * GB


def test_forty_and_twenty_never_make_twenty_four() -> None:
    """Tokens per second, each alone. The faster one goes on alone, and the other is told why."""
    facts = model(40, 25_000_000)
    read = (40 * 25_000_000 + 400_000_000) / GB
    fast, slow = node("a", 64, gb_s=40 * read, links={"b": 2}), node("b", 64, gb_s=20 * read)

    plan = fresh(mesh(fast, slow), facts)

    assert (plan.mode, plan.host) == (Mode.SOLO, "a")
    assert plan.predicted
    assert plan.predicted.tok_s == pytest.approx(40)
    assert reasons(plan) == {"b": "would make it slower: 29 instead of 40 tok/s"}


def test_waiting_says_what_there_is_and_what_is_missing() -> None:
    plan = fresh(mesh(node("a", 10), node("b", 8)))

    assert plan.mode is Mode.WAITING
    assert plan.reason == "need 21.6 GB for the model, have 18.0 GB on 2 nodes"
    need = memory_need(BIG, CacheSettings(context=4096, slots=1)).total_bytes
    assert (plan.need_bytes, plan.have_bytes) == (need, 18 * GB)
    assert (plan.host, plan.stages, plan.predicted) == (None, (), None)
    assert reasons(plan) == dict.fromkeys("ab", "waiting: there is no plan yet")


def test_nodes_that_cannot_host_do_not_keep_others_from_it() -> None:
    tiny = [node(f"tiny{number}", 1, hosting=HostingMode.PREFER) for number in range(3)]
    others = [node(f"ann{number}", 8) for number in range(5)]
    embedding = replace(BIG, embedding_bytes=2 * GB)
    assert fresh(mesh(*tiny, *others), embedding).mode is Mode.SPLIT
    assert fresh(mesh(*tiny, *others, node("ann5", 8)), embedding).mode is Mode.SPLIT
    assert fresh(mesh(*tiny, *others, node("ann5", 8)), embedding, settings(split=True)).mode is Mode.SPLIT


@pytest.mark.parametrize("wishes", [settings(), settings(split=True)], ids=["as it comes", "--split"])
@pytest.mark.parametrize("count", [7, 9, 11, 13])
def test_nodes_that_share_a_machine_do_not_keep_others_from_a_split(count: int, wishes: MeshSettings) -> None:
    good = [node(name, 12) for name in ("ann", "ben", "cleo")]
    shared = [node(f"box{number}", 13, machine="box") for number in range(count)]
    large = model(20, GB)
    assert fresh(mesh(*good), large, wishes).mode is Mode.SPLIT
    assert fresh(mesh(*good, *shared), large, wishes).mode is Mode.SPLIT


def test_waiting_for_memory_in_larger_pieces() -> None:
    """22.5 GB in all, but each stage has its own scratch memory, and layers stay whole."""
    plan = fresh(mesh(*(node(f"{index:02}", 1.5) for index in range(15))))

    assert plan.mode is Mode.WAITING
    assert plan.reason == (
        "need 21.6 GB for the model, have 22.5 GB on 15 nodes, "
        "but not in pieces that hold whole layers of 500 MB"
    )


def test_waiting_for_the_model() -> None:
    plan = fresh(mesh(node("a", 64, models=())))

    assert (plan.mode, plan.reason) == (Mode.WAITING, "no node here has the model big")
    assert plan.have_bytes == 0


def test_waiting_for_a_node_that_is_paused() -> None:
    """It has the model: nobody has to look for a file."""
    nodes = mesh(node("a", 64), node("b", 64, models=()))
    barred = {NodeId("a"): "is paused: its user paused it"}
    plan = decide(nodes, BIG, settings(), current=None, barred=barred)

    assert plan.mode is Mode.WAITING
    assert plan.reason == "no node that has the model big can compute: a is paused: its user paused it"


def test_nobody_at_all() -> None:
    assert fresh(mesh()).mode is Mode.WAITING


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        (settings(cache_type_k="q9"), "q9 is not a cache type"),
        (settings(context=0), "context, slots and micro-batch must be at least 1"),
        (settings(slots=0), "context, slots and micro-batch must be at least 1"),
        (settings(tensor_split=()), "--tensor-split shares must be at least 0"),
        (settings(tensor_split=(0.0,)), "--tensor-split shares must be at least 0"),
        (settings(tensor_split=(1e308, 1e308)), "--tensor-split shares must be at least 0"),
        (settings(tensor_split=(float("nan"),)), "--tensor-split shares must be at least 0"),
        (settings(layers=()), "--layers gives 0 layers, the model has 40"),
        (settings(layers=(("a", -5, 40),)), "--layers a=-5-39: layer -5 is given twice"),
    ],
)
def test_settings_that_nobody_can_obey(wishes: MeshSettings, reason: str) -> None:
    snapshot = mesh(node("a", 64), node("b", 64))
    for current in (None, running(fresh(snapshot))):
        plan = decide(snapshot, BIG, wishes, current=current)

        assert plan.mode is Mode.WAITING
        assert plan.reason.startswith(reason)
        assert list(reasons(plan)) == ["a", "b"]


@pytest.mark.parametrize("gb_s", [float("inf"), float("nan"), -1.0])
def test_a_speed_that_is_none_is_not_believed(gb_s: float) -> None:
    plan = fresh(mesh(node("a", 64), node("b", 65, gb_s=gb_s), node("c", -5, gpus=(gpu(-1),))))

    assert (plan.host, plan.predicted) == ("b", None)


# -- context --


def test_the_context_is_the_largest_that_fits() -> None:
    plan = fresh(mesh(node("a", 64)), wishes=settings(context=None))
    tight = fresh(mesh(node("a", 23)), wishes=settings(context=None))

    assert plan.context == 32_768
    assert 4096 < tight.context < 32_768
    assert tight.context % 256 == 0
    more = CacheSettings(context=tight.context + 256, slots=1)
    assert tight.need_bytes <= 23 * GB < memory_need(BIG, more).total_bytes


def test_another_node_rather_than_a_useless_context() -> None:
    """One holds it with 512 tokens, not with 4096."""
    least = memory_need(BIG, CacheSettings(context=512, slots=1)).total_bytes
    narrow = node("a", least / GB)

    alone = fresh(mesh(narrow), wishes=settings(context=None))
    both = fresh(mesh(narrow, node("b", 4)), wishes=settings(context=None))

    assert (alone.mode, alone.context) == (Mode.SOLO, 512)
    assert both.mode is Mode.SPLIT
    assert both.context >= 4096
    assert both.reason == "no node alone holds it with 4096 tokens of context; 2 nodes do"
    joined = decide(mesh(narrow, node("b", 4)), BIG, settings(context=None), current=running(alone))
    assert joined.key == both.key
    asked_for = decide(mesh(narrow, node("b", 4)), BIG, settings(context=512), current=running(alone))
    assert asked_for.key == alone.key


def test_context_does_not_push_weights_out_of_a_gpu() -> None:
    """32k tokens of four slots would take 21 GB of the GPU's 24."""
    wide = node("a", 64, gb_s=900, gpus=(gpu(24),))
    plan = fresh(mesh(wide), wishes=settings(context=None, slots=4))

    assert 4096 <= plan.context < 8192
    assert plan.predicted
    assert plan.predicted.tok_s > 900 / 20.4 / 1.2 - 0.1


# -- exclusions --


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (node("b", models=()), "no such model file"),
        (
            node(
                "b",
                models=(HeldModel(fingerprint=Fingerprint("0123456789abcdef"), name="big", size_bytes=1),),
            ),
            "has another file of that name (fingerprint 0123456789ab)",
        ),
        (
            node("b", models=(HeldModel(fingerprint=Fingerprint("0" * 16), name="else", size_bytes=1),)),
            "no such model file",
        ),
        (node("b", engine="2026.9.1"), "runs mesh-llm engine 2026.9.1, the others 2026.10.11549"),
        (node("b", engine=""), "has no engine"),
        (node("b", splits=False), "runs an engine that its user built, which cannot be part of a split"),
        (node("b", 0.3), "not enough memory: 300 MB free, a layer needs 741 MB"),
        (node("b", role=Role.CLIENT), "is a client"),
        (node("b", alive=False), "lost"),
        (node("b", reachable=False), "cannot be reached"),
        (node("b", gb_s=None), "not needed: the model fits on fewer nodes"),
        (node("b", links={"a": 180}), "too slow a link: 180 ms would make it 1.8 instead of 3.1 tok/s"),
        (node("b", gb_s=10), "would make it slower: 1.9 instead of 3.1 tok/s"),
    ],
)
def test_why_a_node_has_no_part(other: Candidate, reason: str) -> None:
    plan = fresh(mesh(node("a", 64, gb_s=64), other))

    assert plan.host == "a"
    assert reasons(plan) == {"b": reason}


def test_why_a_node_has_no_part_in_a_split() -> None:
    wishes = settings()
    snapshot = mesh(
        node("a", 12.5), node("b", 12), node("c", 12, gb_s=10), node("d", 0.3), node("e", models=())
    )

    plan = decide(snapshot, BIG, wishes, current=None, barred={NodeId("b"): "refused: busy"})

    assert set(counts(plan)) == {"a", "c"}
    assert reasons(plan) == {
        "b": "refused: busy",
        "d": "not enough memory: 300 MB free, a layer needs 741 MB",
        "e": "no such model file",
    }


def test_other_engines_compute_among_themselves() -> None:
    """Two with the old engine hold it together; the largest, with the new one, does not alone."""
    plan = fresh(mesh(node("a", 12, engine="1"), node("b", 12, engine="1"), node("c", 16)))

    assert set(counts(plan)) == {"a", "b"}
    assert reasons(plan) == {"c": "runs mesh-llm engine 2026.10.11549, the others 1"}


# -- keeping what runs --


def test_a_running_plan_survives_what_does_not_matter() -> None:
    snapshot = mesh(node("a", 12), node("b", 12))
    plan = fresh(snapshot)
    for other in (
        mesh(node("a", 12), node("b", 12), node("c", 14)),
        mesh(node("a", 12), node("b", 12, reachable=False)),
        mesh(node("a", 12), node("b", 12), rtt_ms=0.8),
        mesh(node("a", 12), node("b", 12, gb_s=30)),
        mesh(node("a", 12), node("b", 12, gb_s=None)),
        mesh(node("a", 12), node("b", 12), node("0", 12, hosting=HostingMode.PREFER)),
    ):
        kept = decide(other, BIG, settings(), current=running(plan))
        assert kept.key == plan.key
        assert kept.reason == plan.reason
        assert set(reasons(kept)) == {each.id for each in other.nodes} - {"a", "b"}


def test_figures_of_a_kept_plan_are_fresh() -> None:
    plan = fresh(mesh(node("a", 12), node("b", 12)))
    later = decide(mesh(node("a", 12), node("b", 12), rtt_ms=40), BIG, settings(), current=running(plan))

    assert plan.predicted
    assert later.predicted
    assert later.predicted.tok_s < plan.predicted.tok_s
    assert later.key == plan.key


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("b", {"alive": False}),
        ("a", {"alive": False}),
        ("b", {"role": Role.CLIENT}),
        ("b", {"models": ()}),
        ("b", {"engine": "2026.9.1"}),
        ("b", {"splits": False}),
        ("b", {"memory_bytes": 3 * GB}),
        ("a", {"hosting": HostingMode.NEVER}),
    ],
)
def test_a_running_plan_that_became_invalid_is_replaced(name: str, change: dict[str, Any]) -> None:
    snapshot = mesh(node("a", 13), node("b", 12), node("c", 11.9))
    plan = fresh(snapshot)
    assert set(counts(plan)) == {"a", "b"}

    after = changed(snapshot, name, **change)
    found = decide(after, BIG, settings(), current=running(plan))

    assert found.key != plan.key
    assert found == fresh(after)


@pytest.mark.parametrize(
    "wishes",
    [
        settings(context=2048),
        settings(slots=2),
        settings(tensor_split=(1.0, 3.0)),
        settings(layers=(("a", 0, 10), ("b", 10, 40))),
    ],
)
def test_other_settings_make_another_plan(wishes: MeshSettings) -> None:
    snapshot = mesh(node("a", 64), node("b", 64))
    plan = fresh(snapshot)

    assert decide(snapshot, BIG, wishes, current=running(plan)).key == fresh(snapshot, wishes=wishes).key
    assert fresh(snapshot, wishes=wishes).key != plan.key


def test_a_running_plan_obeys_forced_shares_whoever_joins() -> None:
    """A node that sorts between the others, or would be elected, changes no running plan."""
    wishes = settings(tensor_split=(1.0, 1.0))
    plan = fresh(mesh(node("b", 64), node("d", 64)), wishes=wishes)
    joined = mesh(node("b", 64), node("d", 64), node("c", 64), node("a", 99, gb_s=900))

    assert layers(plan) == {"b": (0, 20), "d": (20, 40)}
    assert decide(joined, BIG, wishes, current=running(plan)).key == plan.key
    assert layers(fresh(joined, wishes=wishes)) == {"a": (0, 20), "b": (20, 40)}
    other = settings(tensor_split=(1.0, 3.0))
    assert decide(joined, BIG, other, current=running(plan)).key != plan.key


def test_named_layers_that_run_are_kept() -> None:
    wishes = settings(layers=(("b", 0, 10), ("a", 10, 40)))
    snapshot = mesh(node("a", 64), node("b", 64))
    plan = fresh(snapshot, wishes=wishes)

    assert plan.host == "b"
    assert decide(snapshot, BIG, wishes, current=running(plan)) == plan


@pytest.mark.parametrize("b", ["b", "other"])
def test_layers_of_a_node_that_is_named_by_its_id_are_kept(b: str) -> None:
    """With more memory a new plan would have a longer context, for which nobody restarts."""

    def nodes(gb: float) -> Snapshot:
        second = node("b", gb)
        return mesh(node("a", gb), replace(second, facts=replace(second.facts, name=b)))

    wishes = settings(context=None, layers=(("b", 0, 20), ("a", 20, 40)))
    plan = fresh(nodes(12), wishes=wishes)

    assert fresh(nodes(20), wishes=wishes).context > plan.context
    assert decide(nodes(20), BIG, wishes, current=running(plan)).key == plan.key


@pytest.mark.parametrize(("gb_s", "moves"), [(41, False), (47, False), (49, True), (90, True)])
def test_solo_moves_for_what_is_clearly_faster(gb_s: float, moves: bool) -> None:
    plan = fresh(mesh(node("a", 64, gb_s=40)))

    after = decide(
        mesh(node("a", 64, gb_s=40), node("b", 64, gb_s=gb_s)), BIG, settings(), current=running(plan)
    )

    assert after.host == ("b" if moves else "a")


def test_solo_does_not_move_between_nodes_of_one_machine_for_what_was_measured() -> None:
    plan = fresh(mesh(node("a", 64, gb_s=40, machine="box")))
    both = mesh(node("a", 64, gb_s=40, machine="box"), node("b", 64, gb_s=90, machine="box"))

    assert decide(both, BIG, settings(), current=running(plan)).host == "a"


def test_a_split_ends_when_one_node_holds_it() -> None:
    plan = fresh(mesh(node("a", 12), node("b", 12), rtt_ms=40))
    after = decide(
        mesh(node("a", 12), node("b", 12), node("c", 64, gb_s=60), rtt_ms=40),
        BIG,
        settings(),
        current=running(plan),
    )

    assert (after.mode, after.host) == (Mode.SOLO, "c")


def test_split_takes_in_who_joins() -> None:
    wishes = settings(split=True)
    two = mesh(node("a", 64), node("b", 64))
    three = mesh(node("a", 64), node("b", 64), node("c", 64))
    plan = fresh(two, wishes=wishes)

    assert set(counts(decide(three, BIG, wishes, current=running(plan)))) == set("abc")
    unable = mesh(node("a", 64), node("b", 64), node("c", 64, models=()))
    assert decide(unable, BIG, wishes, current=running(plan)).key == plan.key
    solo = fresh(two)
    assert decide(two, BIG, wishes, current=running(solo)).mode is Mode.SPLIT


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.5])
@pytest.mark.parametrize("rtt_ms", [1, 20, 200])
def test_jitter_changes_nothing(rtt_ms: float, factor: float) -> None:
    """Equal nodes at equal distances, one of which seems nearer or farther just now."""
    names = "abcd"
    snapshot = mesh(*(node(name, 12, gb_s=400) for name in names), rtt_ms=rtt_ms)
    plan = fresh(snapshot)
    assert set(counts(plan)) == {"a", "b"}
    for moved in names:
        noisy = mesh(
            *(
                node(
                    name,
                    12,
                    gb_s=400,
                    links={to: rtt_ms * (factor if moved in (name, to) else 1) for to in names if to != name},
                )
                for name in names
            )
        )
        assert decide(noisy, BIG, settings(), current=running(plan)).key == plan.key


def test_a_link_that_really_became_slow_is_left() -> None:
    snapshot = mesh(*(node(name, 12) for name in "abc"), rtt_ms=1)
    plan = fresh(snapshot)
    slow = changed(snapshot, "b", links=((NodeId("a"), link(900)), (NodeId("c"), link(1))))

    after = decide(slow, BIG, settings(), current=running(plan))

    assert set(counts(after)) == {"a", "c"}
    assert reasons(after)["b"].startswith("too slow a link: 900 ms would make it ")


def test_a_waiting_plan_is_no_plan_to_keep() -> None:
    waiting = fresh(mesh(node("a", 8)))

    assert decide(mesh(node("a", 64)), BIG, settings(), current=running(waiting)).mode is Mode.SOLO


def test_a_running_plan_for_another_model_is_no_plan_to_keep() -> None:
    snapshot = mesh(node("a", 64), node("b", 64))
    plan = fresh(snapshot)

    assert decide(snapshot, SMALL, settings(), current=running(plan)) == fresh(snapshot, SMALL)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"context": 0},
        {"context": -5},
        {"stages": ()},
        {"host": None},
        {"host": NodeId("nobody")},
    ],
)
def test_a_running_plan_that_makes_no_sense_is_not_kept(nonsense: dict[str, Any]) -> None:
    """A peer published it: it may say anything."""
    snapshot = mesh(node("a", 64))
    plan = fresh(snapshot)

    assert decide(snapshot, BIG, settings(), current=running(replace(plan, **nonsense))) == plan


def test_a_mixture_is_as_fast_as_what_it_reads() -> None:
    experts: dict[str, Any] = {
        "experts": 128,
        "experts_used": 8,
        "expert_feed_forward": 1500,
        "feed_forward": 0,
    }
    dense, mixture = fresh(mesh(node("a", 64))), fresh(mesh(node("a", 64)), model(**experts))

    assert dense.predicted
    assert mixture.predicted
    assert mixture.predicted.tok_s > 5 * dense.predicted.tok_s


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("flops_per_s", [5e-324, 0.5, 1e18])
@pytest.mark.parametrize("attention_per_s", [5e-324, 0.5, 1e18])
@pytest.mark.parametrize("read_bytes_per_s", [5e-324, 0.5, 1e18])
def test_whatever_a_node_claims_the_plan_can_be_told(
    read_bytes_per_s: float, flops_per_s: float, attention_per_s: float, split: bool
) -> None:
    """Others would take the host for broken whose facts hold what is no number."""
    claimed = Speed(
        read_bytes_per_s=read_bytes_per_s, flops_per_s=flops_per_s, attention_per_s=attention_per_s
    )
    snapshot = changed(mesh(node("a" * 64, 64), node("b" * 64, 64)), "b" * 64, speed=claimed)
    plan = fresh(snapshot, SMALL, settings(split=split))

    assert plan_from_document(plan_to_document(plan)) == plan


def test_a_prediction_that_is_no_number_is_not_told() -> None:
    plan = fresh(mesh(node("a" * 64, 64)))
    told = Prediction(tok_s=1.0, first_token_s=1.0, prompt_tok_s=1.0)
    assert plan_from_document(plan_to_document(replace(plan, predicted=told))).predicted == told
    for name in ("tok_s", "first_token_s", "prompt_tok_s"):
        for figure in (float("inf"), float("nan"), 1e10):
            odd = replace(plan, predicted=replace(told, **{name: figure}))
            assert plan_from_document(plan_to_document(odd)) == replace(plan, predicted=None)
