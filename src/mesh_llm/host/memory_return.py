"""What a model that keeps failing here does for those that gave way to it: it leaves them the memory."""

from __future__ import annotations

from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.planning.backoff import GivingBack
from mesh_llm.types import NodeId

_FAILING = "failed with it again and again; others have its memory until it is tried again"


class MemoryReturn:
    def __init__(self, mesh: Mesh, plans: ModelPlans) -> None:
        self._mesh = mesh
        self._plans = plans
        self._giving_back = GivingBack()
        self._failed_by: object = None
        """What the engine was started with that failed."""

    @property
    def until_s(self) -> float:
        return self._giving_back.until_s

    def failed(self, *, now: float, well_s: float) -> None:
        """A plan of this node's, after it had served for so long."""
        self._giving_back = self._giving_back.failed(now=now, well_s=well_s)

    def look(self, settings: ModelSettings, now: float) -> None:
        """Tell the mesh whether others have the memory; until a change by an owner, which may mend it."""
        if settings.engine_key != self._failed_by:
            self._giving_back, self._failed_by = GivingBack(), settings.engine_key
        self._plans.fail(now < self.until_s and bool(self._gave_way()))

    def failing(self) -> dict[NodeId, str]:
        """Nodes on which the model failed again and again, each with the reason to leave it out for now."""
        fingerprint = self._plans.fingerprint
        return {m.id: _FAILING for m in self._mesh.alive() if fingerprint in m.facts.failing}

    def is_awaited(self) -> bool:
        """Whether a model of a lower priority does not run."""
        return any(self._mesh.serving(each.fingerprint) is None for each in self._gave_way())

    def _gave_way(self) -> list[ModelSettings]:
        settings, own = self._mesh.settings(), self._plans.settings()
        if settings is None or own is None:
            return []
        return [each for each in settings.models if settings.gives_way(each, own)]
