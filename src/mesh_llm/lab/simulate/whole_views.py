"""A mesh in which every node has a whole view: joins, departures, a partition, and minutes of churn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.distributions import (
    FACTS_CHANGE_S,
    LEAVES,
    DrawnNode,
    between,
    departures_per_s,
    draw_arriving,
    draw_departing,
    draw_nodes,
    with_links,
)
from mesh_llm.lab.simulate.measures import Rate, mistaken, per_node_second
from mesh_llm.lab.simulate.world import World

SETTLE_S = 4.0
"""Until nobody talks about the connections that a mesh starts with."""
QUIET_S = 5.0
WITHIN_S = 60.0
"""For one change to be known to all; it takes seconds."""
CUT_NODES = 20
"""Cut off together, at most a tenth of all: an office, or the customers of a small provider."""
CUT_S = 20.0
_STEP_S = 0.05
_LOOK_S = 5.0


@frozen
class WholeCase:
    nodes: int
    quiet: Rate
    join_s: float
    """Until all know it, and it knows all."""
    facts_s: float
    facts_bytes: float
    """For each node, beside what an idle mesh says."""
    leave_s: float
    crash_s: float
    """Detection included."""
    heal_s: float
    """From the end of a partition until all agree again."""
    churn: Rate
    churn_mistaken: float
    """Members that a view has wrong at a time, on average."""
    largest_bytes: int
    """Of one message."""


def whole_case(seed: int, count: int, *, churn_s: float, say: Callable[[str], None]) -> WholeCase:
    mesh = _Mesh(seed, count)
    say(f"{count} nodes: a mesh that knows itself")
    quiet = mesh.quiet()
    say(f"{count} nodes: one changes, joins, leaves, crashes")
    facts_s, facts_bytes = mesh.facts_change(quiet)
    join_s, leave_s, crash_s = mesh.join(), mesh.leave(), mesh.crash()
    say(f"{count} nodes: {churn_s:.0f} s of churn")
    churn, wrong = mesh.churn(churn_s)
    # Last: connections that it makes needful are kept for half a minute afterwards, and pinged.
    say(f"{count} nodes: a partition")
    heal_s = mesh.heal()
    return WholeCase(
        nodes=count,
        quiet=quiet,
        join_s=join_s,
        facts_s=facts_s,
        facts_bytes=facts_bytes,
        leave_s=leave_s,
        crash_s=crash_s,
        heal_s=heal_s,
        churn=churn,
        churn_mistaken=wrong,
        largest_bytes=mesh.world.scales.largest_bytes,
    )


class _Mesh:
    def __init__(self, seed: int, count: int) -> None:
        self._random = Random(seed)
        nodes = with_links(draw_nodes(self._random, count))
        self._nodes: dict[object, DrawnNode] = {node.key: node for node in nodes}
        # Every message at one in seven: enough for averages, and nothing comes in steps of seven.
        self.world = World(
            seed=seed, between=between(self._nodes), jitter_s=0.002, weigh_every=7 if count > 50 else 1
        )
        for node in nodes:
            self.world.start(node.key, told=node.facts)
        self.world.warm()
        self.world.run(SETTLE_S)

    # -- single changes -------------------------------------------------------------------------

    def quiet(self) -> Rate:
        return self._rate(lambda: self.world.run(QUIET_S), QUIET_S)

    def facts_change(self, quiet: Rate) -> tuple[float, float]:
        before = self._bytes()
        self._publish(self._somebody())
        took_s = self._until_agreed()
        rest_s = max(0.0, 2.0 - took_s)
        self.world.run(rest_s)
        spent = (self._bytes() - before) / len(self.world.up) - quiet.bytes * (took_s + rest_s)
        return took_s, max(0.0, spent)

    def join(self) -> float:
        self._arrive()
        return self._until_agreed()

    def leave(self) -> float:
        self.world.leave(self._somebody())
        return self._until_agreed()

    def crash(self) -> float:
        key = self._somebody()
        gone = self.world.hosts[key].id
        self.world.crash(key)
        witness = self.world.up[0].view

        def known() -> bool:
            member = witness.member(gone)
            return (member is None or not member.present) and self._agreed()

        return self.world.run_until(known, within_s=WITHIN_S, step_s=_STEP_S)

    def heal(self) -> float:
        keys = [host.key for host in self.world.up]
        cut = max(1, min(CUT_NODES, len(keys) // 10))
        self.world.network.part(keys[:cut], keys[cut:])
        self.world.run(CUT_S)
        self.world.network.heal()
        took_s = self._until_agreed()
        self.world.run(SETTLE_S)
        return took_s

    # -- churn ----------------------------------------------------------------------------------

    def churn(self, seconds: float) -> tuple[Rate, float]:
        """Nodes go and come as drawn, and others change what they tell."""
        world, wrong = self.world, []
        here = [self._nodes[host.key] for host in world.up]
        goes = departures_per_s(here)
        for rate, what in (
            (goes, self._depart),
            (goes, self._arrive),
            (len(here) / FACTS_CHANGE_S, self._change),
        ):
            self._again_and_again(rate, what, world.now + seconds)

        def run() -> None:
            end = world.now + seconds
            while world.now < end:
                world.run(min(_LOOK_S, end - world.now))
                wrong.append(self._mistaken())

        return self._rate(run, seconds), sum(wrong) / max(1, len(wrong))

    def _again_and_again(self, per_s: float, what: Callable[[], None], until: float) -> None:
        at = self.world.now + self._random.expovariate(per_s)

        def happen() -> None:
            what()
            self._again_and_again(per_s, what, until)

        if at < until:
            self.world.at(at, happen)

    def _depart(self) -> None:
        if len(self.world.up) > 2:
            node = draw_departing(self._random, [self._nodes[host.key] for host in self.world.up])
            orderly = self._random.random() < LEAVES
            (self.world.leave if orderly else self.world.crash)(node.key)

    def _arrive(self) -> None:
        node = draw_arriving(self._random, len(self._nodes))
        self._nodes[node.key] = node
        self._start(node)

    def _change(self) -> None:
        self._publish(self._somebody())

    # -- parts ----------------------------------------------------------------------------------

    def _start(self, node: DrawnNode) -> None:
        """As one that was invited: it knows one member."""
        friend = self.world.hosts[self._somebody()]
        known = [record for record in friend.view.records if record.node == friend.id]
        self.world.start(node.key, told=node.facts, know=known)

    def _publish(self, key: object) -> None:
        host, node = self.world.hosts[key], self._nodes[key]
        facts = replace(node.facts, lent_bytes=self._random.randrange(1, 1 << 30))
        self.world.perform(host, host.view.publish(facts, self.world.now))

    def _somebody(self) -> object:
        return self._random.choice(self.world.up).key

    def _agreed(self) -> bool:
        return len({host.view.digest for host in self.world.up}) == 1

    def _until_agreed(self) -> float:
        # A change takes a moment to be seen by anybody.
        self.world.run(_STEP_S)
        return _STEP_S + self.world.run_until(self._agreed, within_s=WITHIN_S, step_s=_STEP_S)

    def _mistaken(self) -> float:
        up = self.world.up
        some = self._random.sample(up, min(20, len(up)))
        seen = ([member.id for member in host.view.members if member.present] for host in some)
        return mistaken(seen, {host.id for host in up})

    def _bytes(self) -> int:
        return sum(self.world.scales.bytes_to.values())

    def _rate(self, run: Callable[[], None], seconds: float) -> Rate:
        messages, size = self.world.scales.messages, self._bytes()
        run()
        return per_node_second(
            self.world.scales.messages - messages, self._bytes() - size, len(self.world.up), seconds
        )
