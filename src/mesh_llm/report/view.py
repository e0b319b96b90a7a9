"""What reports may read of a node: its parts, and what it says of itself. They never see the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_llm.config import NodeConfig
from mesh_llm.frozen import frozen
from mesh_llm.gateway.key_usage import KeyReport
from mesh_llm.gateway.metrics import FirstToken
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.mesh_settings import MeshSettings, ModelSettings
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_plans import ModelPlans
from mesh_llm.peers.remote_engine import RemoteEngine
from mesh_llm.planning.experience import Experience
from mesh_llm.planning.making_room import Loaded, Room
from mesh_llm.types import Fingerprint, MeshId, NodeId, Plan
from mesh_llm.worker.lending import Lending


@frozen
class ModelView:
    """One of the models."""

    hosting: Hosting
    plans: ModelPlans
    remote_engine: RemoteEngine
    slot_queue: SlotQueue
    settings: Callable[[], ModelSettings | None]
    health: Callable[[], Health]


@frozen
class NodeView:
    id: NodeId
    name: str
    config: NodeConfig
    mesh: Mesh
    models: Callable[[], Sequence[ModelView]]
    """The default one first."""
    lending: Lending
    model_files: ModelFiles
    mesh_id: Callable[[], MeshId | None]
    settings: Callable[[], MeshSettings | None]
    """Those in force, or as the home remembers them."""
    health: Callable[[], Health]
    api_url: Callable[[], str | None]
    key_reports: Callable[[], Sequence[KeyReport]]
    """API keys, and what was asked with each."""
    shared_url: Callable[[], str | None]
    """Where guests on the local network find the API."""
    console_url: Callable[[], str | None]
    first_token: Callable[[], FirstToken | None]
    """What the last client here waited for one, of the engine that serves now."""
    others_loaded: Callable[[ModelSettings], Sequence[Loaded]]
    """Models that have memory, and may have to go for another one."""
    settled: Callable[[Room, Fingerprint], Room]
    """Room for a model, with what becomes of those that give way to it."""
    token_s: Callable[[PlanRun], float | None]
    """Between two tokens of one answer, as last seen."""
    experience: Callable[[Plan], Experience]
    """What a plan has shown while this node hosted it."""
    experience_before: Callable[[Plan], Experience]
    """The same, but for what the plan that runs shows now."""

    @property
    def hosting(self) -> Hosting:
        """Of the default model; the same holds below."""
        return self.models()[0].hosting

    @property
    def remote_engine(self) -> RemoteEngine:
        return self.models()[0].remote_engine

    @property
    def slot_queue(self) -> SlotQueue:
        return self.models()[0].slot_queue
