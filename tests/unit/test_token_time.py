"""Where a token's time goes: parts that sum up, and the sentence that follows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mesh_llm.planning.plan_inputs import way_of
from mesh_llm.planning.token_time import (
    Measured,
    PartKind,
    TokenPart,
    TokenTime,
    host_seconds,
    links_seconds,
    sentence,
    token_time,
)
from mesh_llm.types import LinkFacts, LinkKind, NodeId, Speed
from tests.support.planning import model as model_of
from tests.support.planning import plan_of

DESK, MINI, MAC = NodeId("desk"), NodeId("mini"), NodeId("mac")
COMPUTE, WIRE, WAIT, DRAFT = PartKind.COMPUTE, PartKind.WIRE, PartKind.WAIT, PartKind.DRAFT


def parts(token: TokenTime) -> list[tuple[PartKind, NodeId | None, int]]:
    return [(part.kind, part.node, part.us) for part in token.parts]


def said(
    token: TokenTime,
    *,
    shares: Mapping[NodeId, float] | None = None,
    drafts: bool = False,
    host: NodeId = DESK,
) -> str:
    return sentence(token, host=host, name=str, shares=shares or {}, drafts=drafts)


def split(
    token_s: float = 0.061,
    *,
    workers: Mapping[NodeId, float] | None = None,
    links: Mapping[NodeId, float] | None = None,
    host_s: float | None = 0.005,
    tokens_per_pass: float = 1.0,
    draft_s: float | None = None,
) -> TokenTime:
    measured = Measured(
        token_s=token_s,
        workers_s={MINI: 0.010} if workers is None else workers,
        links_s={MINI: 0.044} if links is None else links,
        host_s=host_s,
        tokens_per_pass=tokens_per_pass,
        draft_s=draft_s,
    )
    token = token_time(measured, host=DESK)
    assert sum(part.us for part in token.parts) == token.total_us == round(token_s * 1e6)
    return token


# -- parts --------------------------------------------------------------------------------------


def test_a_split_over_two_nodes() -> None:
    assert parts(split()) == [
        (COMPUTE, DESK, 5_000),
        (WIRE, MINI, 44_000),
        (COMPUTE, MINI, 10_000),
        (WAIT, None, 2_000),
    ]


def test_alone_all_of_it_is_computing() -> None:
    token = split(0.0105, workers={}, links={}, host_s=0.004)
    assert parts(token) == [(COMPUTE, DESK, 10_500)]


def test_a_chain_keeps_the_order_of_its_stages() -> None:
    token = split(0.1, workers={MAC: 0.02, MINI: 0.03}, links={MAC: 0.004, MINI: 0.006}, host_s=0.01)
    assert parts(token) == [
        (COMPUTE, DESK, 10_000),
        (WIRE, MAC, 4_000),
        (COMPUTE, MAC, 20_000),
        (WIRE, MINI, 6_000),
        (COMPUTE, MINI, 30_000),
        (WAIT, None, 30_000),
    ]


def test_links_that_seem_longer_than_the_whole_are_made_to_fit() -> None:
    token = split(0.02, workers={MINI: 0.010}, links={MINI: 0.044})
    assert parts(token) == [(WIRE, MINI, 10_000), (COMPUTE, MINI, 10_000)]


def test_computing_of_a_slower_second_is_made_to_fit() -> None:
    token = split(0.010, workers={MINI: 0.03, MAC: 0.01}, links={MINI: 0.001, MAC: 0.001})
    assert parts(token) == [(COMPUTE, MINI, 7_500), (COMPUTE, MAC, 2_500)]


def test_thirds_still_sum_up() -> None:
    nodes = [NodeId(f"n{index}") for index in range(7)]
    split(0.0100003, workers=dict.fromkeys(nodes, 1.0), links=dict.fromkeys(nodes, 0.5))
    split(1 / 3, workers=dict.fromkeys(nodes, 0.01 / 3), links=dict.fromkeys(nodes, 0.02 / 3), host_s=0.1 / 3)


def test_a_pass_that_confirms_several_tokens_is_shared_by_them() -> None:
    token = split(0.020, tokens_per_pass=4.0, workers={MINI: 0.02}, links={MINI: 0.04}, draft_s=0.008)
    assert parts(token) == [
        (DRAFT, DESK, 2_000),
        (COMPUTE, DESK, 1_250),
        (WIRE, MINI, 10_000),
        (COMPUTE, MINI, 5_000),
        (WAIT, None, 1_750),
    ]


def test_without_the_hosts_speed_the_rest_is_called_so() -> None:
    assert parts(split(host_s=None))[-1] == (WAIT, None, 7_000)


# -- hops ---------------------------------------------------------------------------------------

HOPS = {(DESK, MINI): 1.0, (MINI, MAC): 2.0, (MAC, DESK): 4.0, (MINI, DESK): 8.0, (DESK, MAC): 16.0}


@pytest.mark.parametrize(
    ("workers", "pushes", "expected"),
    [
        ((), True, {}),
        ((MINI,), True, {MINI: 9.0}),
        ((MINI, MAC), True, {MINI: 1.0, MAC: 6.0}),
        # Over the host: mini's result comes back first.
        ((MINI, MAC), False, {MINI: 9.0, MAC: 20.0}),
    ],
)
def test_hops(workers: tuple[NodeId, ...], pushes: bool, expected: dict[NodeId, float]) -> None:
    found = links_seconds(DESK, workers, pushes=lambda _: pushes, hop_s=lambda a, b: HOPS[a, b])
    assert found == expected


# -- the host's own part ------------------------------------------------------------------------


def test_the_hosts_part_is_its_layers_and_the_head() -> None:
    model = model_of(layers=10, layer_bytes=1_000_000, head_bytes=500_000)
    speed = Speed(read_bytes_per_s=1e9, flops_per_s=1e9, attention_per_s=1e9)
    plan = plan_of((DESK, 0, 4), (MINI, 4, 10))
    assert host_seconds(model, plan, speed) == pytest.approx(0.0045)
    elsewhere = plan_of((DESK, 0, 4), (MINI, 4, 10), head_on_worker=True)
    assert host_seconds(model, elsewhere, speed) == pytest.approx(0.004)
    assert host_seconds(model, plan_of((MINI, 0, 10), host=DESK), speed) == pytest.approx(0.0005)
    assert host_seconds(model, plan, None) is None


# -- sentences ----------------------------------------------------------------------------------


def made(total_us: int, *entries: tuple[PartKind, NodeId | None, int]) -> TokenTime:
    return TokenTime(
        total_us=total_us, parts=tuple(TokenPart(kind=kind, node=node, us=us) for kind, node, us in entries)
    )


def test_a_far_link() -> None:
    token = split()
    assert said(token) == "72 % of 61 ms is the link to mini: a draft model would help"
    assert said(token, drafts=True) == "72 % of 61 ms is the link to mini: a shorter path would help"


def test_several_links_alike() -> None:
    token = made(50_000, (COMPUTE, DESK, 10_000), (WIRE, MINI, 20_000), (WIRE, MAC, 20_000))
    assert said(token) == "80 % of 50 ms is the links to mini and mac: a draft model would help"


def test_links_that_only_together_take_most() -> None:
    token = made(
        50_000, (COMPUTE, DESK, 18_000), (WIRE, MAC, 17_000), (WIRE, MINI, 5_000), (COMPUTE, MAC, 10_000)
    )
    assert said(token) == "34 % of 50 ms is the link to mac: a draft model would help"


def test_the_hosts_own_part() -> None:
    token = made(20_000, (COMPUTE, DESK, 12_000), (WIRE, MINI, 2_000), (COMPUTE, MINI, 6_000))
    assert said(token) == "60 % of 20 ms is the host's own part, on desk"


def test_a_worker_that_is_slow_for_its_share() -> None:
    token = made(20_000, (COMPUTE, DESK, 4_000), (WIRE, MINI, 2_000), (COMPUTE, MINI, 14_000))
    shares = {DESK: 0.75, MINI: 0.25}
    expected = "70 % of 20 ms is computing on mini, for 25 % of the layers: fewer there would help"
    assert said(token, shares=shares) == expected
    assert said(token, shares={DESK: 0.25, MINI: 0.75}) == "70 % of 20 ms is computing on mini"


def test_alone() -> None:
    assert said(made(9_440, (COMPUTE, DESK, 9_440))) == "all of 9.4 ms is computing on desk"
    assert said(made(9_960, (COMPUTE, DESK, 9_960))) == "all of 10 ms is computing on desk"


def test_what_nobody_can_explain() -> None:
    token = made(20_000, (COMPUTE, DESK, 4_000), (WAIT, None, 16_000))
    expected = "80 % of 20 ms is neither computing nor links: the machines are busy with something else"
    assert said(token) == expected


def test_a_draft_model_that_costs_too_much() -> None:
    token = made(20_000, (DRAFT, DESK, 11_000), (COMPUTE, DESK, 9_000))
    assert said(token) == "55 % of 20 ms is the draft model: a smaller one, or none, would help"


def test_nothing_yet() -> None:
    assert said(made(0)) == "nothing measured yet"


@pytest.mark.parametrize("rtt_s", [0.0, 5e-324, 0.02, 3600.0])
def test_whatever_others_say_of_a_link_has_its_place_in_the_sum(rtt_s: float) -> None:
    way = way_of(LinkFacts(kind=LinkKind.QUIC, rtt_s=rtt_s))
    hop_s = way.delay_s + way.overhead_s + 4 * 4096 / way.bytes_per_s
    token = token_time(
        Measured(token_s=0.05, workers_s={MINI: 0.01}, links_s={MINI: 2 * hop_s}, host_s=0.01), host=DESK
    )
    assert sum(part.us for part in token.parts) == token.total_us == 50_000
