"""How many engines run a split plan, and which of them gets a request."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from mesh_llm.gateway.engine_connection import EngineLost
from mesh_llm.gateway.engine_series import together
from mesh_llm.gateway.lanes import Lanes, lane_of
from mesh_llm.gateway.upstream import Upstream
from mesh_llm.membership.plan_documents import plan_from_document, plan_to_document
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import CacheSettings, stage_need
from mesh_llm.planning.lanes import LANES_FEWER_S, LANES_MORE_S, TAKE_TURNS, LaneDemand
from mesh_llm.types import HostingMode, Mode, NodeId, Plan, ServingPlan
from tests.support.planning import gpu, mesh, model, node, plan_of, settings

# -- how many ---------------------------------------------------------------------------------------


def planned(*gb: float, lanes: int = 1, current: Plan | None = None, **changes: Any) -> Plan:
    nodes = [node(name, each) for name, each in zip("abc", gb, strict=False)]
    serving = ServingPlan(epoch=1, plan=current, settings_version=1) if current else None
    return decide(mesh(*nodes), model(), settings(**{"lanes": 0, **changes}), current=serving, lanes=lanes)


def test_one_lane_where_owners_say_nothing() -> None:
    nodes = [node(name, 64) for name in "abc"]
    assert decide(mesh(*nodes), model(), settings(split=True), current=None, lanes=3).lanes == 1


def test_one_lane_unless_somebody_asks_for_more() -> None:
    plan = planned(14, 14)
    assert (plan.mode, plan.lanes, plan.lanes_reason) == (Mode.SPLIT, 1, "")


def test_lanes_follow_the_demand_up_to_the_number_of_stages_and_leave_the_layers_alone() -> None:
    one = planned(64, 14, 14, lanes=1, split=True)
    more = [planned(64, 14, 14, lanes=count, split=True, current=one) for count in (2, 3, 4)]
    assert [plan.lanes for plan in more] == [2, 3, 3]
    assert {plan.key for plan in more} == {one.key}
    assert more[1].need_bytes > more[0].need_bytes > one.need_bytes


def test_a_whole_model_has_one_engine_however_many_ask() -> None:
    plan = planned(64, 14, lanes=4)
    assert (plan.mode, plan.lanes) == (Mode.SOLO, 1)
    assert plan.need_bytes == planned(64, 14).need_bytes


def test_a_fixed_number_holds_whatever_is_asked_and_may_cost_context() -> None:
    nodes = mesh(node("a", 32), node("b", 16))

    def at(**changes: Any) -> Plan:
        wish = settings(**{"lanes": 0, "split": True, "context": None, **changes})
        return decide(nodes, model(context_trained=131_072), wish, current=None, lanes=4)

    assert [at(lanes=count).lanes for count in (1, 2)] == [1, 2]
    assert at(lanes=2).context < at(lanes=1).context == at().context
    assert at().lanes == 1, "what follows the demand never costs context"


def test_without_memory_for_them_there_are_fewer_and_it_says_so() -> None:
    plan = planned(11.6, 11.6, lanes=3, context=8192)
    assert (plan.mode, plan.lanes) == (Mode.SPLIT, 1)
    assert plan.lanes_reason == "there is no memory for 2 lanes"


def test_engines_that_share_a_gpu_are_not_multiplied_unless_a_person_says_so() -> None:
    nodes = node("a", 64, gpus=(gpu(12),)), node("b", 64, gpus=(gpu(16),))
    auto = decide(mesh(*nodes), model(), settings(split=True, lanes=0), current=None, lanes=2)
    assert (auto.lanes, auto.lanes_reason) == (1, TAKE_TURNS)
    told = decide(mesh(*nodes), model(), settings(split=True, lanes=2), current=None)
    assert (told.lanes, told.lanes_reason) == (2, "")


def test_with_the_multi_process_service_on_all_gpus_that_are_shared_lanes_follow_the_demand() -> None:
    def lanes(*served: bool) -> tuple[int, str]:
        """Two workers that share a GPU, and a host without one."""
        gpus = [replace(gpu(48), mps=each) for each in served]
        workers = [node(name, 64, gpus=(each,), machine="m") for name, each in zip("bc", gpus, strict=True)]
        nodes = mesh(node("a", 64, hosting=HostingMode.PREFER), *workers)
        plan = decide(nodes, model(), settings(split=True, lanes=0), current=None, lanes=2)
        assert {stage.node for stage in plan.stages} == {"a", "b", "c"}
        return plan.lanes, plan.lanes_reason

    assert lanes(True, True) == (2, "")
    assert lanes(True, False) == lanes(False, False) == (1, TAKE_TURNS)


def test_a_host_with_a_gpu_has_lanes_with_the_multi_process_service() -> None:
    def lanes(*, served: bool) -> int:
        nodes = [node(name, 64, gpus=(replace(gpu(24), mps=served),)) for name in "ab"]
        return decide(mesh(*nodes), model(), settings(split=True, lanes=0), current=None, lanes=2).lanes

    assert (lanes(served=True), lanes(served=False)) == (2, 1)


def test_each_lane_has_caches_and_a_worker_its_weights_once() -> None:
    one = CacheSettings(context=4096, slots=2)
    two = replace(one, lanes=2)
    for host in (False, True):
        needs = [stage_need(model(), each, (0, 10), host=host, head=host) for each in (one, two)]
        assert needs[1].cache_bytes == 2 * needs[0].cache_bytes
        assert needs[1].compute_bytes == 2 * needs[0].compute_bytes
        assert needs[1].weight_bytes == (2 if host else 1) * needs[0].weight_bytes


def test_a_plan_with_one_lane_is_written_as_before() -> None:
    plan = plan_of((NodeId("a" * 64), 0, 1), (NodeId("b" * 64), 1, 2))
    assert "lanes" not in plan_to_document(plan)
    assert plan_from_document(plan_to_document(replace(plan, lanes=3))).lanes == 3


def test_demand_grows_after_seconds_and_shrinks_after_a_minute() -> None:
    demand = LaneDemand().after(streams=4, waiting=0, now=0)
    assert demand.lanes == 1
    assert demand.after(streams=4, waiting=0, now=LANES_MORE_S - 0.1).lanes == 1
    demand = demand.after(streams=4, waiting=0, now=LANES_MORE_S)
    assert demand.lanes == 2
    idle = demand.after(streams=0, waiting=0, now=10)
    assert idle.after(streams=0, waiting=0, now=9 + LANES_FEWER_S).lanes == 2
    assert idle.after(streams=4, waiting=0, now=20).since is None, "it begins anew"
    assert idle.after(streams=0, waiting=0, now=10 + LANES_FEWER_S).lanes == 1


def test_one_person_never_asks_for_a_second_lane() -> None:
    demand = LaneDemand()
    for second in range(600):
        demand = demand.after(streams=1, waiting=0, now=second)
    assert demand.lanes == 1


def test_a_request_that_waits_does() -> None:
    demand = LaneDemand().after(streams=1, waiting=1, now=0).after(streams=1, waiting=1, now=LANES_MORE_S)
    assert demand.lanes == 2


# -- which one --------------------------------------------------------------------------------------

ENGINE = Upstream(url="http://127.0.0.1:1", key="k")


def two(slots: int = 2) -> tuple[Lanes, Upstream]:
    lanes = Lanes()
    for port in (1, 2):
        lanes.open(f"http://127.0.0.1:{port}", slots=slots)
    return lanes, replace(ENGINE, lanes=lanes)


def talk(*said: str, **more: Any) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": text} for text in said]}).encode()


def asked(stack: ExitStack, upstream: Upstream, request: bytes = b"") -> str:
    return stack.enter_context(lane_of(upstream, request, computes=True)).url[-1]


def test_requests_spread_and_the_first_lane_has_a_single_one() -> None:
    lanes, upstream = two()
    for _ in range(3):
        with ExitStack() as stack:
            assert asked(stack, upstream) == "1"
    with ExitStack() as stack:
        assert [asked(stack, upstream) for _ in range(4)] == ["1", "2", "1", "2"]
    assert [lanes.taken(url) for url in lanes.urls] == [0, 0]


def test_a_conversation_goes_on_where_it_began() -> None:
    _, upstream = two()
    first, second = "a" * 3000, "b" * 3000
    with ExitStack() as stack:
        assert [asked(stack, upstream, talk(each, seed=1)) for each in (first, second)] == ["1", "2"]
    for seed in range(3):
        with ExitStack() as stack:
            assert asked(stack, upstream, talk(second, "and then?", seed=seed)) == "2"
    with ExitStack() as stack:
        assert asked(stack, upstream, talk("c" * 3000)) == "1", "another one goes to the idlest"


def test_a_beginning_that_many_share_keeps_nobody_together() -> None:
    _, upstream = two()
    rules = "r" * 1500
    with ExitStack() as stack:
        seen = [asked(stack, upstream, talk(rules, name * 4000)) for name in "abcd"]
    assert seen == ["1", "2", "1", "2"]


def test_a_warm_lane_without_a_slot_is_passed_over() -> None:
    _, upstream = two(slots=1)
    request = talk("a" * 3000)
    with ExitStack() as stack:
        assert [asked(stack, upstream, request) for _ in range(2)] == ["1", "2"]


def test_one_that_broke_off_is_shunned_and_named() -> None:
    _, upstream = two()
    with pytest.raises(EngineLost) as caught, lane_of(upstream, b"", computes=True):
        raise EngineLost("it died")
    assert caught.value.engine is not None
    assert caught.value.engine.url.endswith(":1")
    with ExitStack() as stack:
        assert [asked(stack, upstream) for _ in range(2)] == ["2", "2"]


def test_a_lane_that_ends_takes_no_more_and_may_come_back() -> None:
    lanes, upstream = two()
    url = "http://127.0.0.1:2"
    with ExitStack() as stack:
        assert [asked(stack, upstream) for _ in range(2)] == ["1", "2"]
        lanes.close(url)
        assert [asked(stack, upstream) for _ in range(2)] == ["1", "1"]
        assert lanes.taken(url) == 1
        lanes.reopen(url)
        assert asked(stack, upstream) == "2"
    lanes.remove(url)
    assert lanes.urls == ("http://127.0.0.1:1",)


def test_what_needs_no_slot_goes_to_the_first() -> None:
    _, upstream = two()
    with ExitStack() as stack:
        for _ in range(3):
            assert stack.enter_context(lane_of(upstream, b"", computes=False)) == upstream


def test_series_of_several_engines_are_one_text() -> None:
    def text(tokens: int, speed: float) -> bytes:
        return (
            b"# HELP llamacpp:tokens_predicted_total Tokens\n# TYPE llamacpp:tokens_predicted_total counter\n"
            b"llamacpp:tokens_predicted_total %d\n# TYPE llamacpp:requests_processing gauge\n"
            b"llamacpp:requests_processing 1\n# TYPE llamacpp:predicted_tokens_seconds gauge\n"
            b"llamacpp:predicted_tokens_seconds %g\n" % (tokens, speed)
        )

    lines = together([text(3, 20.5), text(4, 10)]).decode().splitlines()
    assert "llamacpp:tokens_predicted_total 7" in lines
    assert "llamacpp:requests_processing 2" in lines
    assert "llamacpp:predicted_tokens_seconds 20.5" in lines
    assert together([text(3, 1)]) == text(3, 1)
