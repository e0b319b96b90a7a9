"""What simulated meshes are made of, each figure with its reason. All of it is assumed, none is measured
in a mesh of ours: there is none of this size. Chance comes from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random

from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.network import Between
from mesh_llm.lab.simulate.signing import node_id
from mesh_llm.membership.ring import chosen
from mesh_llm.types import (
    Address,
    Device,
    DeviceKind,
    Fingerprint,
    HeldModel,
    LinkFacts,
    LinkKind,
    NodeFacts,
    NodeId,
    Role,
    Speed,
)

GB = 10**9
HOUR_S = 3600.0
ENGINE = "2026.10.11549"
FINGERPRINT = Fingerprint("5" * 64)
HELD = HeldModel(fingerprint=FINGERPRINT, name="large", size_bytes=40 * GB)


@frozen
class MachineKind:
    """`memory_gb` is free main memory, drawn evenly on a logarithmic scale; speeds are drawn evenly."""

    name: str
    share: float
    """Of the nodes that are there at any moment."""
    memory_gb: tuple[float, float]
    read_gb_s: tuple[float, float]
    session_h: float
    """That it stays, on average. Sessions in peer-to-peer networks are many short ones and a few very long
    ones (Stutzbach and Rejaie, 2006), so that it is the kinds with short ones that come and go."""
    gpu_gb: tuple[int, ...] = ()
    flops_per_byte: float = 20.0
    """At prompts, for each byte that decoding reads in the same time: CPUs with vector units, M1 to Max."""


KINDS = (
    # Two channels of DDR4 or LPDDR5; closed in the evening, and now and then in between.
    MachineKind(name="laptop", share=0.45, memory_gb=(4, 24), read_gb_s=(20, 50), session_h=2.0),
    MachineKind(name="desktop", share=0.25, memory_gb=(8, 48), read_gb_s=(25, 60), session_h=6.0),
    # Cards of the last three generations; their owners play with them, too.
    MachineKind(
        name="gaming",
        share=0.18,
        memory_gb=(12, 48),
        read_gb_s=(300, 900),
        session_h=4.0,
        gpu_gb=(8, 12, 16, 24),
        # An RTX 3090 reads 0.94 TB/s, and prompts of 7B models at 60 to 70 TFLOPS.
        flops_per_byte=65.0,
    ),
    # Unified memory, of M1 to Max.
    MachineKind(name="mac", share=0.07, memory_gb=(8, 64), read_gb_s=(70, 300), session_h=8.0),
    # Eight channels and more; restarted for updates.
    MachineKind(name="server", share=0.05, memory_gb=(64, 400), read_gb_s=(80, 250), session_h=200.0),
)

LEAVES = 0.8
"""Who stops in an orderly way; the others crash, sleep or lose their network."""
FACTS_CHANGE_S = 600.0
"""On average, between two changes of what a node tells: a delay that moved, a model that was added."""
SITE_SIZE = 2.0
"""Nodes on one local network, on average: households and small offices."""
SITE_DELAY_S = 0.0002
ACCESS_S = (0.002, 0.012)
"""One way from a node to its provider: fibre, to cable or DSL with a wireless hop."""
ROUND_THE_WORLD_S = 0.15
"""One way to the other side: light in glass takes 0.1 s, routes are longer."""
REGIONS = (0.0, 0.02, 0.25, 0.3, 0.55)
"""Where people live, as parts of the way round the world; the first two are as near as two countries."""
REGION_SHARES = (0.35, 0.25, 0.15, 0.15, 0.10)


class Nat(StrEnum):
    OPEN = "open"
    EASY = "easy"
    """Holes can be punched."""
    HARD = "hard"
    """Another port for each destination: two of these need a relay."""
    CLOSED = "closed"
    """No UDP at all: everything takes the relay."""


NAT_SHARES = {Nat.OPEN: 0.2, Nat.EASY: 0.6, Nat.HARD: 0.15, Nat.CLOSED: 0.05}
"""Hole punching works for four pairs in five (Ford and others, 2005): these give 0.88."""
RELAY_DETOUR_S = 0.015


@frozen
class DrawnNode:
    """A machine and where it is."""

    key: int
    id: NodeId
    kind: str
    site: int
    region: float
    access_s: float
    nat: Nat
    facts: NodeFacts


def draw_nodes(random: Random, count: int, *, first: int = 0) -> tuple[DrawnNode, ...]:
    """Machines of all kinds on networks all over the world; `first` is the key of the first."""
    nodes: list[DrawnNode] = []
    site, region = first, 0.0
    for key in range(first, first + count):
        if not nodes or random.random() < 1 / SITE_SIZE:
            site, region = key, random.choices(REGIONS, REGION_SHARES)[0]
        nodes.append(_node(random, key, site, region))
    return tuple(nodes)


def _node(random: Random, key: int, site: int, region: float) -> DrawnNode:
    kind = random.choices(KINDS, [kind.share for kind in KINDS])[0]
    low, high = kind.memory_gb
    memory = int(low * (high / low) ** random.random() * GB)
    gpus = tuple(_gpu(size) for size in (random.choice(kind.gpu_gb),)) if kind.gpu_gb else ()
    facts = NodeFacts(
        name=f"{kind.name} {key}",
        role=Role.NODE,
        version="0.2.0",
        engine=ENGINE,
        address=Address(direct=("192.0.2.1:7777",)),
        machine=f"machine {key}",
        memory_bytes=memory,
        machine_memory_bytes=memory,
        gpus=gpus,
        speed=_speed(kind, random.uniform(*kind.read_gb_s)),
        models=(HELD,),
    )
    return DrawnNode(
        key=key,
        id=node_id(key),
        kind=kind.name,
        site=site,
        region=region,
        access_s=random.uniform(*ACCESS_S),
        nat=random.choices(list(NAT_SHARES), list(NAT_SHARES.values()))[0],
        facts=facts,
    )


def _gpu(gb: int) -> Device:
    return Device(name="CUDA0", description="", kind=DeviceKind.GPU, free_bytes=gb * GB, total_bytes=gb * GB)


def _speed(kind: MachineKind, gb_s: float) -> Speed:
    flops = kind.flops_per_byte * gb_s * GB
    return Speed(read_bytes_per_s=gb_s * GB, flops_per_s=flops, attention_per_s=flops / 2)


# -- ways ----------------------------------------------------------------------------------------


def delay_s(one: DrawnNode, other: DrawnNode) -> float:
    """One way."""
    if one.site == other.site:
        return SITE_DELAY_S
    apart = abs(one.region - other.region)
    far_s = 2 * min(apart, 1 - apart) * ROUND_THE_WORLD_S
    straight_s = one.access_s + other.access_s + far_s
    return straight_s + (RELAY_DETOUR_S if relayed(one, other) else 0.0)


def relayed(one: DrawnNode, other: DrawnNode) -> bool:
    if one.site == other.site:
        return False
    nats = {one.nat, other.nat}
    return Nat.CLOSED in nats or nats == {Nat.HARD}


def link_of(one: DrawnNode, other: DrawnNode) -> LinkFacts:
    kind = LinkKind.RELAY if relayed(one, other) else LinkKind.QUIC
    return LinkFacts(kind=kind, rtt_s=round(2 * delay_s(one, other), 4))


def between(nodes: Mapping[object, DrawnNode]) -> Between:
    """For a world whose keys are those of the nodes, which may grow."""
    return lambda one, other: delay_s(nodes[one], nodes[other])


def with_links(nodes: Sequence[DrawnNode], *, all_pairs: bool = False) -> tuple[DrawnNode, ...]:
    """The same with the delays that they know of each other: to those that they are connected to."""
    by_id = {node.id: node for node in nodes}
    ring = sorted(by_id)

    def known(node: DrawnNode) -> list[NodeId]:
        others = ring if all_pairs else sorted(chosen(node.id, ring))
        return [other for other in others if other != node.id]

    return tuple(
        replace(
            node,
            facts=replace(
                node.facts, links=tuple((other, link_of(node, by_id[other])) for other in known(node))
            ),
        )
        for node in nodes
    )


# -- coming and going ----------------------------------------------------------------------------


def mean_session_s(kind: str) -> float:
    return next(each.session_h for each in KINDS if each.name == kind) * HOUR_S


def departures_per_s(nodes: Sequence[DrawnNode]) -> float:
    """Of so many that are there: who stays long on average goes seldom. As many come."""
    return sum(1 / mean_session_s(node.kind) for node in nodes)


def draw_departing(random: Random, nodes: Sequence[DrawnNode]) -> DrawnNode:
    """One of these goes: rather one that never stays for long."""
    while True:
        node = random.choice(nodes)
        if random.random() < _SHORTEST_S / mean_session_s(node.kind):
            return node


def draw_arriving(random: Random, key: int) -> DrawnNode:
    """One comes: rather one that never stays for long, so that shares stay as they are."""
    while True:
        (node,) = draw_nodes(random, 1, first=key)
        if random.random() < _SHORTEST_S / mean_session_s(node.kind):
            return node


_SHORTEST_S = min(mean_session_s(kind.name) for kind in KINDS)
