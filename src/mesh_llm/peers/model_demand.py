"""Who waits for a model that is loaded on demand, and when it goes again.

Whoever is asked for such a model says so in its facts. All nodes plan it from then on, and its host keeps
it until it has been idle for long enough, or until a model that somebody waits for needs its memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator

from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.planning.giving_way import GivingWay
from mesh_llm.planning.making_room import Loaded, Room, make_room, with_kept
from mesh_llm.sanitise import SENTENCE_CHARS
from mesh_llm.types import Demand, Fingerprint, Mode, ModelFacts, NodeId, Plan, Role

DEMAND_TICK_S = 0.5
"""Between two looks at what is to be told: each change is gossip to everybody."""
WANTED_S = 3.0
"""That a model counts as wanted after somebody was last seen waiting for it, who looks every 20 ms."""
GOES_S = 3.0
"""That a request for another model's memory lasts after it was last made, once a second."""
UNLOAD_S = 10.0
"""That an owner's wish to unload a model is told: gossip takes a second or two."""
HOLD_S = 300.0
"""That a model which is to be loaded counts as wanted until it is: as long as a request would wait for it."""
STAY_S = 60.0
"""That a model stays after it was loaded, or for its idle time where that is shorter: clients that ask for
several models in turn must not have them loaded for every request."""
FAILURES_MOST = 3
"""In a row, before clients are told that it cannot be loaded: a node that was lost is one of them."""
QUIET_S = 1.0
"""After its last answer, before a model counts as idle: the next turn of a conversation comes at once."""


class Demands:
    """What this node tells of all models on demand."""

    def __init__(
        self,
        mesh: Mesh,
        on_change: Callable[[], None],
        *,
        facts: Callable[[Fingerprint], ModelFacts | None],
    ) -> None:
        """`on_change`: another model is wanted here, or one no longer. `facts`: of those that are here."""
        self._facts = facts
        self.mesh = mesh
        self.models: list[ModelDemand] = []
        self.going: dict[Fingerprint, tuple[Fingerprint, float]] = {}
        """Models that are to go, for which one, and until when that is told."""
        self._on_change = on_change

    async def run(self) -> None:
        """Keeps it up to date, until cancelled."""
        while True:
            await asyncio.sleep(DEMAND_TICK_S)
            self.tell()

    def tell(self) -> None:
        told = tuple(each for model in self.models if (each := model.told()) is not None)
        if told != self.mesh.facts.demand:
            before = _wanted(self.mesh.facts.demand)
            self.mesh.publish(demand=told)
            if _wanted(told) != before:
                self._on_change()

    def goes_for(self, fingerprint: Fingerprint) -> Fingerprint:
        found, until = self.going.get(fingerprint, (Fingerprint(""), 0.0))
        return found if time.monotonic() < until else Fingerprint("")

    def told_of(self, fingerprint: Fingerprint) -> Iterator[tuple[NodeId, Role, Demand]]:
        """What anybody who is here tells of a model, clients that are connected to this node included."""
        for member in self.mesh.alive():
            for each in member.facts.demand:
                if each.fingerprint == fingerprint:
                    yield member.id, member.facts.role, each

    def is_wanted(self, fingerprint: Fingerprint) -> bool:
        return any(each.wanted for _, _, each in self.told_of(fingerprint))

    def has_memory(self, fingerprint: Fingerprint) -> bool:
        """Whether it is loaded, or being loaded."""
        return self.mesh.serving(fingerprint) is not None or any(
            plan.fingerprint == fingerprint for member in self.mesh.alive() for plan in member.facts.starting
        )

    def idle_since(self, fingerprint: Fingerprint) -> int:
        """By its host's word."""
        published = self.mesh.serving(fingerprint)
        told = self.told_of(fingerprint)
        return next((each.idle_since for id, _, each in told if published and id == published[0]), 0)

    def others_loaded(self, own: ModelSettings) -> list[Loaded]:
        """What has memory now and may have to go for `own`: models on demand, and those that give way."""
        settings = self.mesh.settings()
        if settings is None:
            return []
        return [
            Loaded(
                fingerprint=each.fingerprint,
                name=each.alias,
                idle_since=self.idle_since(each.fingerprint),
                priority=each.rank,
                gives_way=settings.gives_way(each, own),
                plans=self._plans_of(each.fingerprint),
            )
            for each in self._others_with_memory(own)
            if settings.is_on_demand(each) or settings.gives_way(each, own)
        ]

    def others_kept(self, own: ModelSettings) -> list[Loaded]:
        """What has memory now and need not go for `own`."""
        may_go = {each.fingerprint for each in self.others_loaded(own)}
        return [
            Loaded(fingerprint=each.fingerprint, name=each.alias, priority=each.rank)
            for each in self._others_with_memory(own)
            if each.fingerprint not in may_go
        ]

    def settled(self, room: Room, own: Fingerprint) -> Room:
        """Room for a model, with what becomes of those that give way."""
        settings = self.mesh.settings()
        models = settings.by_priority if settings is not None else ()
        return GivingWay(
            snapshot=self.mesh.snapshot(),
            beside={
                each.fingerprint: self._plans_of(each.fingerprint)
                for each in models
                if each.fingerprint != own
            },
            models=models,
            facts=self._facts,
            may_go=self.others_loaded,
            barred=self.mesh.unready(),
        ).settled(room)

    def _plans_of(self, fingerprint: Fingerprint) -> tuple[Plan, ...]:
        """That have memory: those that serve, and replicas that are being loaded."""
        starting = (plan for member in self.mesh.alive() for plan in member.facts.starting)
        plans = {each.replica: each.plan for each in starting if each.fingerprint == fingerprint}
        served = self.mesh.replicas(fingerprint).items()
        return tuple({**plans, **{number: each.plan for number, (_, each) in served}}.values())

    def _others_with_memory(self, own: ModelSettings) -> list[ModelSettings]:
        models = () if (settings := self.mesh.settings()) is None else settings.models
        others = (each for each in models if each.fingerprint != own.fingerprint)
        return [each for each in others if self.has_memory(each.fingerprint)]


class ModelDemand:
    """Of one model."""

    def __init__(self, demands: Demands, plans: ModelPlans, *, is_busy: Callable[[], bool]) -> None:
        """`is_busy`: whether its engine here has something to do."""
        self._demands = demands
        self._mesh = demands.mesh
        self._plans = plans
        self.is_busy = is_busy
        self._wanted_at = float("-inf")
        self._used_at = self._loaded_at = time.monotonic()
        self._used_unix_s = 0
        self._held_until = float("-inf")
        self._failures = 0
        self.reason = ""
        """Why it does not serve yet, as this node sees it."""
        self.hopeless = False
        demands.models.append(self)

    def close(self) -> None:
        self._demands.models.remove(self)

    # -- what clients do -----------------------------------------------------------------------

    @property
    def settings(self) -> ModelSettings | None:
        """Of a model on demand; None for any other."""
        settings = self._plans.settings()
        return (
            settings if settings is not None and settings.on_demand and not self._plans.is_default else None
        )

    def want(self) -> None:
        """Somebody waits for the model now."""
        before, self._wanted_at = self._wanted_at, time.monotonic()
        if self.settings is not None and self._wanted_at - before >= WANTED_S:
            self._demands.tell()

    def hold(self) -> None:
        """Somebody who may wants it loaded, and does not wait for it."""
        self._held_until = time.monotonic() + HOLD_S
        self._demands.tell()

    def use(self) -> None:
        """Its engine here is used."""
        self._used_at, self._used_unix_s = time.monotonic(), int(time.time())

    def load(self) -> None:
        """Its engine here was loaded."""
        self.use()
        self._loaded_at = self._used_at
        self.reason, self.hopeless, self._failures = "", False, 0

    def fail(self, reason: str) -> None:
        """A plan of this node's did not come about."""
        self._failures += 1
        self.reason = reason

    def unload(self) -> None:
        """At an owner's word; answers under way are finished."""
        fingerprint = self._fingerprint
        self._demands.going[fingerprint] = (fingerprint, time.monotonic() + UNLOAD_S)
        self._held_until = float("-inf")
        self._demands.tell()

    # -- what follows --------------------------------------------------------------------------

    @property
    def _fingerprint(self) -> Fingerprint:
        return self._plans.fingerprint or Fingerprint("")

    @property
    def is_wanted(self) -> bool:
        """By anybody's clients."""
        return self._demands.is_wanted(self._fingerprint)

    @property
    def rests(self) -> bool:
        """Nobody has it loaded, and nobody waits for it."""
        return self.is_over and self._plans.published is None

    @property
    def is_over(self) -> bool:
        """The model is not to run: nobody asks for it, or another one needs its memory more."""
        settings = self.settings
        if settings is None or self.is_wanted:
            return False
        if self._plans.begun is not None:
            return self._is_unloaded()
        if self._plans.published is None:
            return self._plans.serving() is None
        if self._is_unloaded():
            return True
        if self._idle_s() < self._stay_s(settings):
            return False
        return self._idle_s() >= settings.idle_s or self._is_in_the_way()

    def _idle_s(self) -> float:
        if self.is_busy():
            self.use()
        return time.monotonic() - self._used_at

    def _stay_s(self, settings: ModelSettings) -> float:
        loaded_s = time.monotonic() - self._loaded_at
        return QUIET_S if loaded_s >= min(STAY_S, settings.idle_s) else float("inf")

    def _is_unloaded(self) -> bool:
        own = self._fingerprint
        return any(
            each.goes_for == own and role is Role.OWNER for _, role, each in self._demands.told_of(own)
        )

    def _is_in_the_way(self) -> bool:
        """Whether a model that somebody waits for cannot be loaded beside it."""
        settings = self._mesh.settings()
        for _, _, each in self._demands.told_of(self._fingerprint):
            model = settings.of(each.goes_for) if settings is not None and each.goes_for else None
            if model is None or model.fingerprint == self._fingerprint:
                continue
            needed = not model.on_demand or self._demands.is_wanted(model.fingerprint)
            if needed and self._mesh.serving(model.fingerprint) is None:
                return True
        return False

    # -- room for it ---------------------------------------------------------------------------

    def room_for(self, plan: Plan, plan_without: Callable[[Collection[Fingerprint]], Plan]) -> Room | None:
        """Where nothing fits: which others have to go, if any have memory. Idle ones are asked to."""
        own = self._plans.settings()
        self.hopeless = plan.mode is Mode.WAITING
        if own is None or plan.mode is not Mode.WAITING:
            return None
        loaded = self._demands.others_loaded(own)
        room = make_room(loaded, plan_without) if loaded else Room(plan=plan)
        self.hopeless = not room.is_enough
        if not room.is_enough and (kept := self._demands.others_kept(own)):
            room = with_kept(room, loaded, kept, plan_without)
        idle = [each for each in room.goes if not each.gives_way]
        if idle and room.plan.host == self._mesh.me:
            until = time.monotonic() + GOES_S
            self._demands.going |= {each.fingerprint: (self._fingerprint, until) for each in idle}
            self._demands.tell()
        return self._demands.settled(room, own.fingerprint)

    # -- what is told --------------------------------------------------------------------------

    @property
    def loads(self) -> bool:
        """Whether a request for it is worth waiting for."""
        if self.settings is None:
            return False
        if self.hopeless or any(each.hopeless for _, _, each in self._demands.told_of(self._fingerprint)):
            return self._demands.has_memory(self._fingerprint)
        return True

    def word(self) -> Demand | None:
        """What another node says of why it does not serve yet."""
        told = (each for id, _, each in self._demands.told_of(self._fingerprint) if id != self._mesh.me)
        return next((each for each in told if each.reason), None)

    def told(self) -> Demand | None:
        """None where there is nothing to tell."""
        settings, own = self.settings, self._fingerprint
        if settings is None:
            return self._told_of_pinned()
        wanted = self._is_wanted_here()
        if self._demands.goes_for(own) == own and not self._demands.has_memory(own):
            # Done: whoever asks for it now is to have it.
            del self._demands.going[own]
        is_due = wanted or self.is_wanted
        if not is_due:
            self.reason, self.hopeless, self._failures = "", False, 0
        has_failed = self._failures >= FAILURES_MOST
        speaks = is_due and (has_failed or self._plans.begun is not None or self._is_speaker())
        demand = Demand(
            fingerprint=own,
            wanted=wanted,
            idle_since=self._may_go_since(settings),
            goes_for=self._demands.goes_for(own),
            reason=self.reason[:SENTENCE_CHARS] if speaks else "",
            hopeless=speaks and (has_failed or self.hopeless),
        )
        return demand if demand != Demand(fingerprint=own) else None

    def _told_of_pinned(self) -> Demand | None:
        """Why a model that is always loaded does not serve: nodes without its file cannot see. That of the
        default model is its nodes' own state."""
        known = self._plans.settings() is not None and not self._plans.is_default
        if not known or not self.reason or self._plans.serving() is not None:
            return None
        if self._plans.begun is None and not self._is_speaker():
            return None
        return Demand(fingerprint=self._fingerprint, reason=self.reason[:SENTENCE_CHARS])

    def _is_wanted_here(self) -> bool:
        """By this node's clients, or by lite clients that are connected to it."""
        now_s = time.monotonic()
        if now_s - self._wanted_at < WANTED_S or (now_s < self._held_until and not self._plans.serving()):
            return True
        told = self._demands.told_of(self._fingerprint)
        return any(each.wanted and role is Role.CLIENT for id, role, each in told if id != self._mesh.me)

    def _is_speaker(self) -> bool:
        """One node is enough to say why it does not serve: the first of those that have its file."""
        have = (
            member.id
            for member in self._mesh.alive()
            if any(held.fingerprint == self._fingerprint for held in member.facts.models)
        )
        return min(have, default=None) == self._mesh.me

    def _may_go_since(self, settings: ModelSettings) -> int:
        if self._plans.published is None or self._idle_s() < self._stay_s(settings):
            return 0
        return self._used_unix_s


def _wanted(demand: tuple[Demand, ...]) -> set[Fingerprint]:
    return {each.fingerprint for each in demand if each.wanted}
