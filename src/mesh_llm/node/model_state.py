"""What this node does for one model: derived from what it hosts, and from what its mesh does."""

from __future__ import annotations

from collections.abc import Callable

from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.engines import ModelEngines
from mesh_llm.node.unload import why_resting
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import ModelDemand
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.planning.replicas import Crowding
from mesh_llm.types import Event, State

_NOBODY = "no node of the mesh serves yet"
AT_HAND = "it is at hand, and loaded when somebody asks for it"


class ModelState:
    """Watches the plans of one model that this node hosts (host.hosting.HostingWatcher)."""

    def __init__(
        self,
        mesh: Mesh,
        plans: ModelPlans,
        engines: ModelEngines,
        slot_queue: SlotQueue,
        announcements: Announcements,
        demand: ModelDemand,
        *,
        advice: Callable[[], str],
        on_change: Callable[[], None],
    ) -> None:
        """`advice`: what a person could change to serve on this machine alone."""
        self.value = State.WAITING
        self.reason = "the plan is being made"
        self.progress: tuple[State, str] | None = None
        """What hosting is about; None when it serves, or leaves that to others."""
        self._supply: tuple[State, str] | None = None
        """What is done to bring its files, while they are not here."""
        self._mesh = mesh
        self._plans = plans
        self._engines = engines
        self._slot_queue = slot_queue
        self._announcements = announcements
        self._demand = demand
        self._advice = advice
        self._on_change = on_change
        self._said = ""
        self._crowding = Crowding()

    def reflect(self) -> None:
        """Derive the state anew."""
        if self._engines.upstream() is not None:
            self.value, self.reason = State.SERVING, ""
        elif self._demand.rests:
            self.value, self.reason = State.WAITING, AT_HAND
        elif self._supply is not None and self._plans.serving() is None:
            self.value, self.reason = self._supply
        elif self.progress is not None:
            self.value, self.reason = self.progress
        elif (published := self._plans.serving()) is not None:
            self.value = State.LOADING
            self.reason = f"{self._mesh.name_of(published[0])} is about to serve"
        elif self._plans.is_default:
            self.value, self.reason = State.WAITING, self._mesh.others_reason() or _NOBODY
        else:
            self.value, self.reason = self._by_others()

    def _by_others(self) -> tuple[State, str]:
        """What a node says that has the model's file."""
        word = self._demand.word()
        if self._demand.settings is not None:
            hopeless = word is not None and word.hopeless
            reason = word.reason if word is not None else "the mesh is about to load it"
            return State.WAITING if hopeless else State.LOADING, reason
        starting = [plan.fingerprint for member in self._mesh.alive() for plan in member.facts.starting]
        state = State.LOADING if self._plans.fingerprint in starting else State.WAITING
        return state, word.reason if word is not None else _NOBODY

    def _say(self, kind: str, text: str) -> None:
        """Of another model than the default one, with its name."""
        named = text if self._plans.is_default else f"{self._engines.names[0]}: {text}"
        self._announcements.say(kind, named)

    def _say_waiting(self, text: str) -> None:
        if self._said == text:
            return
        self._said = text
        self._say("waiting", text)
        if not self._mesh.has_company():
            # Alone, a person may rather change an option than fetch another machine.
            self._say("advice", f"On this machine alone: {self._advice()}")

    # -- what its supply reports ---------------------------------------------------------------------

    def on_supply(self, state: State, what: str) -> None:
        """Its files are being brought, or are waited for."""
        self._supply = (state, what)
        self._demand.reason = what
        self._on_change()

    def on_supplied(self) -> None:
        """Nothing more is done about its files."""
        self._supply = None
        self._on_change()

    # -- what hosting reports ------------------------------------------------------------------

    def on_hosting(self, state: State, reason: str) -> None:
        """What hosting is about, while nothing serves."""
        rests = state is State.WAITING and self._mesh.facts.resting
        self.progress = (state, why_resting(self._mesh.facts) if rests else reason)
        self._demand.reason = reason
        self._on_change()
        if self._demand.settings is not None:
            return  # whoever asks for it is told
        if state is State.WAITING and not rests and self._mesh.facts.state is not State.DRAINING:
            self._say_waiting(f"Waiting for more peers: {reason}")

    def on_standing_by(self) -> None:
        self.progress = None
        self._demand.reason = ""
        self._on_change()

    def on_serving(self, run: PlanRun) -> None:
        assert run.supervisor is not None
        self._slot_queue.resize(run.lanes.slots)
        self._demand.load()
        self.progress, self._said = None, ""
        self._say("ready", f"Engine ready in {run.supervisor.report.ready_s:.1f} s")
        for warning in run.warnings:
            self._say("warning", warning)
        self._on_change()

    def on_failed(self, reason: str) -> None:
        self._demand.fail(reason)
        name = "" if self._plans.is_default else f" of {self._engines.names[0]}"
        self._announcements.note(Event(kind="failed", text=f"The plan{name} failed: {reason}"))

    def leans_on(self, run: PlanRun) -> bool:
        return self._engines.leans_on(run)

    def on_drained(self) -> None:
        self._on_change()

    def is_crowded(self, now: float) -> bool:
        turns = self._slot_queue
        return self._crowding.look(now=now, taken=turns.taken, waiting=turns.waiting, slots=turns.slots)

    def on_engine(self, report: EngineReport) -> None:
        """Of the plan that serves: one without links restarts by itself; others end with their plan."""
        match report.state:
            case EngineState.READY:
                self.progress = None
                self._say("ready", f"Engine ready in {report.ready_s:.1f} s")
            case EngineState.LOADING:
                self.progress = (State.LOADING, report.reason)
            case EngineState.FAILED:
                self.progress = (State.LOADING, f"{report.reason}; it is being restarted")
                self._say("engine", f"Engine lost: {report.reason}. Restarting it")
        self._on_change()
