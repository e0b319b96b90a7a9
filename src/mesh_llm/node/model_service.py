"""All that this node does for one model: bring its files, host its plans, reach whoever else hosts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DEFAULT_MODEL, DEFAULT_SLOTS
from mesh_llm.engine.spec import EngineSpec, LinkSpec
from mesh_llm.engine.supervisor import EngineReport
from mesh_llm.frozen import frozen
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health, ModelDetails
from mesh_llm.home import Home
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.launch import Launch
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.local.hardware import Hardware
from mesh_llm.local.modalities import described
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.membership.member import Published
from mesh_llm.mesh_settings import ModelSettings
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.engines import ModelEngines
from mesh_llm.node.joining import Joining
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.model_state import ModelState
from mesh_llm.node.model_supply import ModelSupply
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.members import loses_node
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands, ModelDemand
from mesh_llm.peers.model_plans import HostedPlans, ModelPlans
from mesh_llm.peers.remote_engine import RemoteEngine
from mesh_llm.planning.speculation import made_by
from mesh_llm.report.view import ModelView
from mesh_llm.tasks import task_group
from mesh_llm.types import Fingerprint, ModelFacts, Plan, ProgressSink, State


@frozen
class NodeParts:
    """What the services of all models share."""

    name: str
    mesh: Mesh
    joining: Joining
    model_files: ModelFiles
    offers: ModelOffers
    data_links: DataLinks
    hosted: HostedPlans
    demands: Demands
    announcements: Announcements
    progress: ProgressSink
    hardware: Callable[[], Hardware | None]
    node_state: Callable[[], tuple[State, str]]
    starting: Callable[[str], None]
    """Told what the node is busy with, before it takes part."""
    on_change: Callable[[], None]
    """Something is different for the gateway."""
    on_engine: Callable[[EngineReport], None]
    on_wait: Callable[[float], None]
    watch_library: Callable[[Plan], Callable[[], bool]]
    """Tells whether a node of the plan computes with another CPU library than now."""


class ModelService:
    def __init__(self, parts: NodeParts, config: NodeConfig, fingerprint: Fingerprint | None) -> None:
        """`config`: what this node was asked to do with the model."""
        self._parts = parts
        self._config = config
        self._home = Home(config.home)
        mesh = parts.mesh
        self.plans = ModelPlans(parts.hosted, fingerprint)
        self.remote_engine = RemoteEngine(mesh, parts.data_links, self.plans)
        self.slot_queue = SlotQueue(DEFAULT_SLOTS)
        """At the engine here, for the clients of all nodes."""
        self.slot_queue.on_wait = self._on_wait
        self.demand = ModelDemand(
            parts.demands, self.plans, is_busy=lambda: self.slot_queue.taken + self.slot_queue.waiting > 0
        )
        self.engines = ModelEngines(
            parts.name,
            self.plans,
            self.remote_engine,
            settings=self.settings,
            health=self.health,
            details=self.details,
            want=self.demand.want,
            loses_node=partial(loses_node, mesh),
        )
        self.engines.slot_queue = self.slot_queue
        self.state = ModelState(
            mesh,
            self.plans,
            self.engines,
            self.slot_queue,
            parts.announcements,
            self.demand,
            advice=lambda: self._launch().advice(self.plans.own_memory_bytes()),
            on_change=parts.on_change,
        )
        self.supply = ModelSupply(
            config=config,
            settings=self.settings,
            model_files=parts.model_files,
            offers=parts.offers,
            joining=parts.joining,
            mesh=mesh,
            tell=parts.announcements.tell,
            doing=self._on_supply,
            failing=partial(self._on_supply, failed=True),
            progress=parts.progress,
            on_model=self._tell_model,
        )
        self.hosting = self.engines.hosting = Hosting(
            mesh=mesh,
            plans=self.plans,
            make_run=self._make_run,
            model=self._known,
            watcher=self.state,
            demand=self.demand,
            asked_for=lambda: (self.slot_queue.taken, self.slot_queue.waiting),
        )

    # -- life ----------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Reach whoever hosts the model. Returns only by being cancelled."""
        await self.remote_engine.run(self._parts.on_change)

    async def serve(self) -> None:
        """Bring the model's files, and host it where that is to be. Returns only by failing."""
        async with task_group() as group:
            group.create_task(self.supply.follow(self._on_model), name="model")
            group.create_task(self.supply.publish_digest(), name="digest")
            group.create_task(self.supply.side_file_supply.follow(self._on_files), name="side files")
            await self.hosting.run()

    def wake(self) -> None:
        """Something has changed in the mesh."""
        self.hosting.wake()
        self.remote_engine.wake()
        self.supply.wake()

    def _on_model(self) -> None:
        """It has come, or is another one now."""
        self.state.on_supplied()
        self._on_files()

    def _on_files(self) -> None:
        """The model, or a file that goes with it, has come, or is another one now."""
        self._parts.offers.tell()
        self.hosting.wake()
        self._parts.on_change()

    # -- what it tells -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        if (settings := self.settings()) is not None:
            return settings.alias
        return self._config.alias or self._config.model or DEFAULT_MODEL

    def settings(self) -> ModelSettings | None:
        """In force, or as the home remembers them."""
        settings = self._parts.joining.settings
        if settings is None or self.plans.fingerprint is None:
            return settings
        return settings.of(self.plans.fingerprint)

    @property
    def view(self) -> ModelView:
        return ModelView(
            hosting=self.hosting,
            plans=self.plans,
            remote_engine=self.remote_engine,
            slot_queue=self.slot_queue,
            settings=self.settings,
            health=self.health,
        )

    def health(self) -> Health:
        state, reason = self._parts.node_state()
        if not self.plans.is_default and state not in (State.STARTING, State.DRAINING):
            state, reason = self.state.value, self.state.reason
        return Health(state=state, reason=reason, model=self.name, loads=self.demand.loads)

    def details(self) -> ModelDetails:
        settings, published = self.settings(), self.plans.serving()
        facts = self._parts.model_files.facts(settings.fingerprint) if settings is not None else None
        context = published[1].plan.context if published is not None else None
        sees = settings is not None and settings.projector is not None
        encodes = facts.encodes if facts is not None else self._encodes(settings, published)
        return ModelDetails(
            context=context or (settings.context if settings is not None else None),
            takes=("text", "image") if sees else ("text",),
            gives=("embeddings",) if encodes else ("text",),
            on_demand=self.demand.settings is not None,
            seed=settings.seed if settings is not None else None,
        )

    def _encodes(self, settings: ModelSettings | None, published: Published | None) -> bool:
        """Whether it makes embeddings, by the word of its host; else of anybody who has its file."""
        mesh = self._parts.mesh
        host = mesh.member(published[0]) if published is not None else None
        told = (model for member in ([host] if host else mesh.alive()) for model in member.facts.models)
        return settings is not None and any(
            model.encodes for model in told if model.fingerprint == settings.fingerprint
        )

    def _on_wait(self, waited_s: float) -> None:
        self.demand.use()
        self._parts.on_wait(waited_s)

    def _tell_model(self, facts: ModelFacts | None) -> None:
        self.state.on_supplied()
        missing = f"{self.name} is not on this machine and --no-fetch is set; not acting as a worker"
        self._parts.announcements.say("model", missing if facts is None else described(self._config, facts))

    def _on_supply(self, what: str, *, failed: bool = False) -> None:
        if self.plans.is_default:
            self._parts.starting(what)
        self.state.on_supply(State.WAITING if failed else State.LOADING, what)

    def _on_engine(self, run: PlanRun, report: EngineReport) -> None:
        self._parts.on_engine(report)
        if run is self.hosting.serving and run.broken is None:
            self.state.on_engine(report)

    def _on_lanes(self, run: PlanRun) -> None:
        if run is self.hosting.serving:
            self.slot_queue.resize(run.lanes.slots)

    # -- what children are told ----------------------------------------------------------------

    def _known(self) -> tuple[ModelFacts, ModelSettings] | None:
        settings = self.plans.settings()
        facts = self._parts.model_files.facts(settings.fingerprint) if settings is not None else None
        return (facts, settings) if facts is not None and settings is not None else None

    def _make_run(self, epoch: int, plan: Plan) -> PlanRun:
        known = self._known()
        assert known is not None
        parts, launch = self._parts, self._launch()
        files, drafts = self.supply.side_files, self.supply.drafts
        model = "model" if self.plans.is_default else self.name
        parts.announcements.say(
            "elected",
            f"Elected as host ({plan.have_bytes / 1e9:.1f} GB available for the "
            f"{known[0].weight_bytes / 1e9:.1f} GB {model})",
            once=True,
        )

        library_changed = parts.watch_library(plan)

        def specify(plan: Plan, links: tuple[LinkSpec, ...]) -> EngineSpec:
            return launch.engine(plan, links, nodes_here=parts.mesh.own_machine.nodes())

        def is_outdated() -> bool:
            projector_came = launch.projector is None and files.path(launch.settings.projector) is not None
            draft_came = launch.draft is None and drafts.file(launch.settings) is not None
            draft_came = draft_came and made_by(plan, *known).draft is not None
            return projector_came or draft_came or library_changed()

        log_name = "engine.log" if self.plans.is_default else f"engine-{known[0].fingerprint[:8]}.log"
        return PlanRun(
            epoch=epoch,
            plan=plan,
            fingerprint=known[0].fingerprint,
            settings=known[1],
            mesh=parts.mesh,
            data_links=parts.data_links,
            specify=specify,
            on_report=self._on_engine,
            log_file=self._home.log_folder / log_name,
            is_outdated=is_outdated,
            on_lanes=self._on_lanes,
        )

    def _launch(self) -> Launch:
        known, hardware = self._known(), self._parts.hardware()
        assert known is not None and hardware is not None
        files = self.supply.side_files
        projector = files.path(known[1].projector)
        adapters = files.paths_of(each.file.digest for each in known[1].adapters)
        side_files = files.stamps([*adapters.values(), *([projector] if projector is not None else [])])
        return Launch(
            me=self._parts.mesh.me,
            config=self._config,
            hardware=hardware.beside(self.plans.own_facts()),
            model=known[0],
            settings=known[1],
            draft=self.supply.drafts.file(known[1]),
            projector=projector,
            adapters=adapters,
            stamps={**self._parts.model_files.stamps(known[0].fingerprint), **side_files},
        )
