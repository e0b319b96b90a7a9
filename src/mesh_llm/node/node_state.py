"""What this node is doing: derived in one place, from what it hosts and from what its mesh does."""

from __future__ import annotations

from collections.abc import Callable

from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.engines import Engines
from mesh_llm.node.unload import UNLOADED
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import line
from mesh_llm.types import Event, State


class NodeState:
    """Watches the plans that this node hosts (host.hosting.Watcher)."""

    def __init__(
        self,
        mesh: Mesh,
        slot_queue: SlotQueue,
        announcements: Announcements,
        *,
        advice: Callable[[], str],
        announce_api: Callable[[], None],
    ) -> None:
        """`advice`: what a person could change to serve on this machine alone."""
        self.value = State.STARTING
        self.reason = "starting"
        self.takes_part = False
        """It is equipped, or a lite client: before, it is busy with itself, and says so."""
        self.engines: Engines | None = None
        self._mesh = mesh
        self._slot_queue = slot_queue
        self._announcements = announcements
        self._advice = advice
        self._announce_api = announce_api
        self._progress: tuple[State, str] | None = None
        """What hosting is about; None when it serves, or leaves that to others."""

    def take_part(self, progress: tuple[State, str] | None = None) -> None:
        """From now on the mesh decides what this node does."""
        self.takes_part = True
        self._progress = progress
        self.reflect()

    def reflect(self) -> None:
        """Derive the state anew."""
        assert self.engines is not None
        if self.engines.upstream() is not None:
            self.change(State.SERVING, "")
            self._announce_api()
        elif not self.takes_part:
            return
        elif self._progress is not None:
            self.change(*self._progress)
        elif (published := self._mesh.serving()) is not None:
            self.change(State.LOADING, f"{self._mesh.name_of(published[0])} is about to serve")
        else:
            self.change(State.WAITING, self._mesh.others_reason() or "no node of the mesh serves yet")

    def change(self, state: State, reason: str) -> None:
        # One that is still starting may serve what others compute.
        if self.value is State.DRAINING or (state is State.STARTING and self.value is State.SERVING):
            return
        self.value, self.reason = state, line(reason)
        if self.takes_part:
            self._mesh.publish(state=state, reason=reason[:200])

    # -- what hosting reports ------------------------------------------------------------------

    def on_hosting(self, state: State, reason: str) -> None:
        """What hosting is about, while nothing serves."""
        if self.value is State.DRAINING:
            return
        rests = state is State.WAITING and self._mesh.facts.resting
        self._progress = (state, UNLOADED if rests else reason)
        self.reflect()
        if state is State.WAITING and not rests:
            self._announcements.say("waiting", f"Waiting for more peers: {reason}", once=True)
            if not self._mesh.has_company():
                # Alone, a person may rather change an option than fetch another machine.
                text = f"On this machine alone: {self._advice()}"
                self._announcements.say("advice", text, once=True)

    def on_standing_by(self) -> None:
        self._progress = None
        self.reflect()

    def on_serving(self, run: PlanRun) -> None:
        assert run.supervisor is not None
        self._slot_queue.resize(run.settings.slots)
        self._progress = None
        self._announcements.say("ready", f"Engine ready in {run.supervisor.report.ready_s:.1f} s")
        for warning in run.warnings:
            self._announcements.say("warning", warning)
        self.reflect()

    def on_failed(self, reason: str) -> None:
        self._announcements.note(Event(kind="failed", text=f"The plan failed: {reason}"))

    def leans_on(self, run: PlanRun) -> bool:
        assert self.engines is not None
        return self.engines.leans_on(run)

    def on_drained(self) -> None:
        self.reflect()

    def on_engine(self, report: EngineReport) -> None:
        """Of the plan that serves: one without links restarts by itself; others end with their plan."""
        match report.state:
            case EngineState.READY:
                self._progress = None
                self._announcements.say("ready", f"Engine ready in {report.ready_s:.1f} s")
            case EngineState.LOADING:
                self._progress = (State.LOADING, report.reason)
            case EngineState.FAILED:
                self._progress = (State.LOADING, f"{report.reason}; it is being restarted")
                self._announcements.say("engine", f"Engine lost: {report.reason}. Restarting it")
        self.reflect()
