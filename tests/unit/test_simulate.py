"""Simulated meshes: what they are drawn from, what is measured, and how good plans are."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import combinations, permutations
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from mesh_llm.cli.lab_simulate import simulate
from mesh_llm.errors import UsageError
from mesh_llm.lab.simulate.days import day_case
from mesh_llm.lab.simulate.distributions import (
    KINDS,
    NAT_SHARES,
    REGION_SHARES,
    Nat,
    delay_s,
    departures_per_s,
    draw_arriving,
    draw_departing,
    draw_nodes,
    link_of,
    with_links,
)
from mesh_llm.lab.simulate.measures import growth, mistaken, per_node_second, quantile
from mesh_llm.lab.simulate.modelled import modelled_case
from mesh_llm.lab.simulate.optimum import optimum
from mesh_llm.lab.simulate.planning_cases import (
    GOOD,
    SIZES,
    inputs_of,
    model_of,
    plan_quality,
    planning_time,
    small_case,
    snapshot_of,
)
from mesh_llm.lab.simulate.whole_views import whole_case
from mesh_llm.planning.layer_costs import Span
from mesh_llm.planning.placement import Layout, seconds_of
from mesh_llm.planning.plan_inputs import PlanInputs
from mesh_llm.results.document import from_json
from mesh_llm.types import LinkKind, NodeId

# -- distributions -------------------------------------------------------------------------------


def test_a_seed_gives_the_same_nodes() -> None:
    assert draw_nodes(Random(3), 50) == draw_nodes(Random(3), 50)
    assert draw_nodes(Random(3), 50) != draw_nodes(Random(4), 50)


def test_shares_add_up_and_are_kept() -> None:
    assert sum(kind.share for kind in KINDS) == pytest.approx(1)
    assert sum(NAT_SHARES.values()) == pytest.approx(1)
    assert sum(REGION_SHARES) == pytest.approx(1)
    drawn = Counter(node.kind for node in draw_nodes(Random(1), 4000))
    assert {kind.name: drawn[kind.name] / 4000 for kind in KINDS} == pytest.approx(
        {kind.name: kind.share for kind in KINDS}, abs=0.03
    )


def test_who_stays_for_a_short_time_comes_and_goes() -> None:
    random, nodes = Random(1), draw_nodes(Random(1), 500)
    going = Counter(draw_departing(random, nodes).kind for _ in range(400))
    coming = Counter(draw_arriving(random, key).kind for key in range(400))
    for kinds in (going, coming):
        assert kinds["laptop"] > 3 * kinds["desktop"]
        assert kinds["server"] < 10
    assert departures_per_s(nodes) * 3600 == pytest.approx(0.32 * 500, rel=0.2)


def test_two_behind_hard_nats_take_the_relay_and_neighbours_do_not() -> None:
    nodes = draw_nodes(Random(1), 400)
    hard = [node for node in nodes if node.nat is Nat.HARD]
    one, other = next((a, b) for a, b in combinations(hard, 2) if a.site != b.site)
    assert link_of(one, other).kind is LinkKind.RELAY
    near, same = next((a, b) for a, b in combinations(nodes, 2) if a.site == b.site)
    assert (link_of(near, same).kind, delay_s(near, same)) == (LinkKind.QUIC, 0.0002)
    assert all(0 < delay_s(a, b) < 0.2 for a, b in combinations(nodes[:60], 2))


def test_a_node_of_a_large_mesh_knows_few_delays() -> None:
    nodes = with_links(draw_nodes(Random(1), 100))
    assert {len(node.facts.links) for node in nodes} <= {4, 5, 6}
    assert {len(node.facts.links) for node in with_links(nodes[:20], all_pairs=True)} == {19}


# -- measures ------------------------------------------------------------------------------------


def test_quantiles() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, part) for part in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1, 1, 3, 5, 5]
    assert quantile([], 0.5) == 0.0


def test_rates_growth_and_mistakes() -> None:
    rate = per_node_second(messages=600, size_bytes=12_000, nodes=10, seconds=3)
    assert (rate.messages, rate.bytes) == (20, 400)
    assert growth([10, 100, 1000], [7.0, 9.0, 7.0]) == 0
    assert growth([10, 1000], [2.0, 200.0]) == pytest.approx(1)
    assert growth([10], [2.0]) == 0
    assert mistaken([["a", "b"], ["a", "c", "d"]], {"a", "b"}) == 1.5


# -- planning ------------------------------------------------------------------------------------


def brute_force(inputs: PlanInputs) -> float | None:
    """Every layout there is, one by one."""
    count, found = inputs.load.count, []
    nodes = sorted(inputs.rooms)
    for host in nodes:
        others = [node for node in nodes if node != host]
        for number in range(len(nodes)):
            for workers in permutations(others, number):
                for cuts in combinations(range(count), number):
                    found += _timed(inputs, host, workers, cuts)
    return min(found, default=None)


def _timed(
    inputs: PlanInputs, host: NodeId, workers: tuple[NodeId, ...], cuts: tuple[int, ...]
) -> list[float]:
    edges = [0, *cuts, inputs.load.count]
    spans = tuple(
        Span(node, first, last)
        for node, first, last in zip((host, *workers), edges, edges[1:], strict=False)
        if last > first
    )
    times = [
        seconds_of(inputs, Layout(host=host, spans=spans, head_on_worker=there))
        for there in ((False, True) if workers else (False,))
    ]
    return [seconds for seconds in times if seconds is not None]


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_the_best_of_all_layouts(seed: int) -> None:
    random = Random(seed)
    snapshot = snapshot_of(with_links(draw_nodes(random, random.randint(2, 4)), all_pairs=True))
    inputs = inputs_of(snapshot, model_of(random.randint(2, 5), random.uniform(5, 60)))
    best = next(iter(optimum(inputs).values()), None)
    assert (best and best.seconds) == pytest.approx(brute_force(inputs))


MISSED = (1002, 1004, 1005, 1020, 1027, 1039, 1040, 1058, 1168, 1268, 1291)
"""Of the lab's sample, some that planning was once more than 5 % off with."""


@pytest.mark.parametrize("seed", [*range(12), *MISSED])
def test_plans_of_small_meshes_are_near_the_best(seed: int) -> None:
    case = plan_quality(seed)
    # One node is kept where several would be faster, but not clearly.
    assert case.share >= GOOD or case.kept_whole
    assert case.share <= case.searched + 1e-9
    assert case.share <= 1 + 1e-9


def test_the_sample_has_all_kinds_of_plans() -> None:
    assert {plan_quality(seed).best_stages for seed in range(12)} >= {0, 1, 2}


def test_small_cases_have_two_to_six_nodes() -> None:
    assert {len(small_case(seed)[0].nodes) for seed in range(40)} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_thousand_nodes_are_planned_quickly(size: object) -> None:
    took = planning_time(1, 1000, size, rounds=3, clock=time.process_time)  # type: ignore[arg-type]
    assert took.stages >= 1
    # A tenth of a second on a quiet machine.
    assert min(took.seconds) < 1.0


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_ten_thousand_nodes_are_planned_within_seconds(size: object) -> None:
    took = planning_time(1, 10_000, size, rounds=2, clock=time.process_time)  # type: ignore[arg-type]
    assert min(took.seconds) < 5.0


def test_a_day_has_plans_and_waits() -> None:
    day = day_case(1, 10, SIZES[0], hours=24, most_events=30)
    assert day.events > 5
    assert 0 < day.hours <= 24
    assert 0 <= day.pauses <= day.changes <= day.events
    assert 0 <= day.without_plan <= 1
    assert 0 < day.wait_s[0] <= day.wait_s[-1]
    assert all(prompt <= wait for prompt, wait in zip(day.prompt_s, day.wait_s, strict=True))


def test_nobody_waits_for_a_plan_that_never_comes() -> None:
    day = day_case(1, 10, SIZES[2], hours=2, most_events=5)
    assert day.without_plan == pytest.approx(1)
    assert day.wait_s == day.prompt_s == ()


# -- whole meshes --------------------------------------------------------------------------------


def test_whole_views_and_modelled_ones_say_about_as_much() -> None:
    whole = whole_case(1, 40, churn_s=2, say=lambda _: None)
    modelled = modelled_case(1, 40, views=20, churn_s=2, say=lambda _: None)
    assert whole.facts_s < 3
    assert whole.leave_s < 3
    assert whole.crash_s < 6
    assert modelled.quiet.messages == pytest.approx(whole.quiet.messages, rel=0.2)
    assert modelled.quiet.bytes == pytest.approx(whole.quiet.bytes, rel=0.2)


@pytest.mark.full
def test_views_among_thousands() -> None:
    case = modelled_case(1, 3000, views=20, churn_s=5, say=lambda _: None)
    assert case.churn_mistaken < 10
    assert quantile(case.arrival_s, 0.95) < 5


# -- the command ---------------------------------------------------------------------------------


@pytest.mark.full
def test_a_quick_simulation_writes_its_result(tmp_path: Path) -> None:
    done = CliRunner().invoke(simulate, ["--quick", "--json", "-o", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    document = from_json((tmp_path / "simulate.json").read_text("utf-8"))
    assert json.loads(done.stdout)["name"] == document.name == "simulate"
    assert [table.title for table in document.tables] == [
        "Planning time",
        "Plans of small meshes against the best of all plans",
        "Until everybody knows",
        "Messages of each node and second",
        "Plans and waits over hours",
    ]
    assert all(len(row) == len(table.columns) for table in document.tables for row in table.rows)
    assert document.plots[0].title == "Planning time"
    assert document.facts["seed"] == "1"


@pytest.mark.parametrize(
    "options",
    [
        *(["--nodes", "ten"], ["--nodes", "5"], ["--nodes", "20000"], ["--minutes", "0"]),
        *(["--quick", "--nodes", "10"], ["--minutes", "1", "--quick"]),
    ],
)
def test_what_cannot_be_simulated_is_refused(options: list[str]) -> None:
    done = CliRunner().invoke(simulate, options)
    assert isinstance(done.exception, UsageError)
