"""A mesh over hours: nodes come and go, the plan changes, and users wait. Membership is taken as instant,
but for what it takes to notice a crash; what a plan's start takes is assumed.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate.distributions import (
    HOUR_S,
    LEAVES,
    DrawnNode,
    departures_per_s,
    draw_arriving,
    draw_departing,
    draw_nodes,
    link_of,
    with_links,
)
from mesh_llm.lab.simulate.planning_cases import ModelSize, model_of, plain_settings, snapshot_of
from mesh_llm.membership.ring import chosen
from mesh_llm.planning.decide import decide
from mesh_llm.types import Mode, NodeId, Plan, ServingPlan

NOTICED_S = 3.0
"""From a crash until all know it; the simulation of whole views measures the same."""
START_S = 3.0
"""For leases, links, the engine and a first token."""
LOAD_BYTES_PER_S = 1e9
"""At which a node reads layers that it did not hold: an ordinary SSD."""
_REQUESTS = 2000


@frozen
class DayCase:
    nodes: int
    hours: float
    events: int
    changes: int
    """Of the plan."""
    pauses: int
    """Changes that users noticed: a part of the plan was lost."""
    without_plan: float
    """Share of the time in which no plan served."""
    wait_s: tuple[float, ...]
    """Of users who ask at any time: until the first token of an answer to 512 tokens. Those are left out
    for whom there never was a plan."""
    prompt_s: tuple[float, ...]
    """Of that, what the engine takes for the prompt."""


@frozen
class _Span:
    """A time with one plan; `ready` is when it serves."""

    begun: float
    ready: float
    first_token_s: float | None


def day_case(seed: int, count: int, size: ModelSize, *, hours: float, most_events: int) -> DayCase:
    """At most so many hours, and so many events: in a large mesh they follow each other closely."""
    day = _Day(seed, count, size)
    end = hours * HOUR_S
    events = 0
    while events < most_events:
        at = day.now + day.random.expovariate(2 * departures_per_s(tuple(day.nodes.values())))
        if at > end:
            day.now = end
            break
        events += 1
        day.happen(at)
    waits = day.waits()
    return DayCase(
        nodes=count,
        hours=day.now / HOUR_S,
        events=events,
        changes=day.changes,
        pauses=day.pauses,
        without_plan=day.without_plan(),
        wait_s=tuple(sorted(wait for wait, _ in waits)),
        prompt_s=tuple(sorted(prompt for _, prompt in waits)),
    )


class _Day:
    def __init__(self, seed: int, count: int, size: ModelSize) -> None:
        self.random = Random(seed)
        self.nodes: dict[NodeId, DrawnNode] = {
            node.id: node for node in with_links(draw_nodes(self.random, count))
        }
        self._model, self._settings = model_of(size.layers, size.gb), plain_settings()
        self._keys = count
        self.now = 0.0
        self.changes = self.pauses = 0
        self._plan = self._decided(None)
        self._spans = [self._span(0.0)]

    def happen(self, at: float) -> None:
        """One goes or comes, and everybody looks at the plan."""
        self.now = at
        lost = crashed = False
        if len(self.nodes) > 2 and self.random.random() < 0.5:
            gone = draw_departing(self.random, tuple(self.nodes.values())).id
            del self.nodes[gone]
            lost = gone == self._plan.host or any(stage.node == gone for stage in self._plan.stages)
            crashed = lost and self.random.random() >= LEAVES
        else:
            self._arrive()
        old, self._plan = self._plan, self._decided(self._plan)
        if self._plan.key == old.key:
            return
        self.changes += 1
        # Who leaves in an orderly way stays until another plan serves; so does a plan that is beaten.
        paused = crashed or old.mode is Mode.WAITING or (lost and self._plan.mode is Mode.WAITING)
        self.pauses += lost and crashed
        pause_s = (NOTICED_S if crashed else 0.0) + self._start_s(old) if paused else 0.0
        self._spans.append(self._span(pause_s))

    def _arrive(self) -> None:
        node = draw_arriving(self.random, self._keys)
        self._keys += 1
        ring = sorted({*self.nodes, node.id})
        links = tuple(
            (other, link_of(node, self.nodes[other])) for other in sorted(chosen(node.id, ring) - {node.id})
        )
        self.nodes[node.id] = replace(node, facts=replace(node.facts, links=links))

    def _decided(self, running: Plan | None) -> Plan:
        serves = running is not None and running.mode is not Mode.WAITING
        current = ServingPlan(epoch=1, plan=running) if running is not None and serves else None
        return decide(snapshot_of(tuple(self.nodes.values())), self._model, self._settings, current=current)

    def _start_s(self, old: Plan) -> float:
        """What those who get most have to read takes longest; weights that are there stay."""
        held = {stage.node: (stage.first, stage.last) for stage in old.stages}

        def new_bytes(node: NodeId, first: int, last: int, size: int) -> float:
            low, high = held.get(node, (0, 0))
            kept = max(0, min(last, high) - max(first, low))
            return size * (1 - kept / max(1, last - first))

        most = max(
            (new_bytes(each.node, each.first, each.last, each.weight_bytes) for each in self._plan.stages),
            default=0.0,
        )
        return START_S + most / LOAD_BYTES_PER_S

    def _span(self, pause_s: float) -> _Span:
        predicted = self._plan.predicted
        return _Span(
            begun=self.now,
            ready=self.now + pause_s,
            first_token_s=predicted.first_token_s if predicted else None,
        )

    # -- what users saw -------------------------------------------------------------------------

    def without_plan(self) -> float:
        ends = [span.begun for span in self._spans[1:]] + [self.now]
        idle = sum(
            end - span.begun if span.first_token_s is None else min(end, span.ready) - span.begun
            for span, end in zip(self._spans, ends, strict=True)
        )
        return idle / self.now if self.now else 0.0

    def waits(self) -> list[tuple[float, float]]:
        """All of it, and reading the prompt."""
        found = []
        for _ in range(_REQUESTS):
            at = self.random.random() * self.now
            here = max(index for index, span in enumerate(self._spans) if span.begun <= at)
            # Where there is no plan, until there is one again.
            serves = next((span for span in self._spans[here:] if span.first_token_s is not None), None)
            if serves is not None and serves.first_token_s is not None:
                found.append((max(at, serves.ready) - at + serves.first_token_s, serves.first_token_s))
        return found
