"""The composition root: one node, from its home to its last child.

The life of a node, in order:

1. take the home, answer `mesh-llm status` from here on;
2. check what was asked for: token, engine, model file (what cannot work ends it
   here, before anything is built, fetched or bound);
3. open the API port: clients get 503 and the reason until there is an engine;
4. enter the mesh: its own, the one it was invited to, or the one it was in;
5. fetch the model and build the native libraries, both at once, and measure the
   machine, where that has not been done; the CPU library can wait until 6;
6. take part: host the plan, or lend the device to whoever hosts, or neither,
   and say so; all over again with every change, until told to stop;
7. drain: let others take over and answers under way finish, then end the children.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from functools import partial
from typing import Any

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.console.event_feed import Feed
from mesh_llm.console.routes import Managed, management_app, serve_on_socket
from mesh_llm.engine.children import external
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.page import page_files
from mesh_llm.engine.spec import WorkerSpec
from mesh_llm.errors import MeshError
from mesh_llm.gateway.chat_page import ChatPage
from mesh_llm.gateway.metrics import FirstToken
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.home import Home, link_door
from mesh_llm.host.worker_launch import worker_spec
from mesh_llm.local.hardware import Hardware, build_libraries, equip
from mesh_llm.local.modalities import held_bytes
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.api_keys import ApiKeys
from mesh_llm.node.cpu_library import CpuLibrary
from mesh_llm.node.drain import drain
from mesh_llm.node.engines import Engines
from mesh_llm.node.file_watch import FileWatch
from mesh_llm.node.incoming_streams import IncomingStreams
from mesh_llm.node.invites import Invites
from mesh_llm.node.joining import Joining
from mesh_llm.node.model_control import ModelControl
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.model_service import NodeParts
from mesh_llm.node.node_console import NodeConsole
from mesh_llm.node.node_state import NodeState
from mesh_llm.node.pairing import Pairing
from mesh_llm.node.polite_lending import PoliteLending
from mesh_llm.node.served_models import ServedModels
from mesh_llm.node.sharing import Sharing
from mesh_llm.node.unload import ModelUnload
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.link_measuring import MeasuredLinks
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.model_demand import Demands
from mesh_llm.peers.model_plans import HostedPlans
from mesh_llm.planning.memory_budget import lent_text
from mesh_llm.report import status, what_if
from mesh_llm.report.events import News
from mesh_llm.report.history import History
from mesh_llm.report.metrics import NodeMetrics
from mesh_llm.report.network import network_document
from mesh_llm.report.plan_experience import PlanExperience
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import to_document
from mesh_llm.tasks import cancelled, each_in_turn, meanwhile, task_group
from mesh_llm.transport.direct_links import open_door
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.native_splice import load_native
from mesh_llm.transport.network import Network
from mesh_llm.types import EventSink, ModelFacts, NodeFacts, Progress, ProgressSink, Role, State
from mesh_llm.worker.lending import Lease, Lending, Step, Terms, Weights

INVITE_DEFAULT_S = 7 * 86400.0
"""A week: long enough to walk over to the other machine, not for ever."""

log = logging.getLogger(__name__)


class Node:
    """One machine's part. `run` lives as long as the node does."""

    def __init__(self, config: NodeConfig, *, tell: EventSink, progress: ProgressSink) -> None:
        self.config = config
        self.home = Home(config.home)
        self.name = config.name or socket.gethostname()
        self.model_files = ModelFiles(any_architecture=config.bin_dir is not None)
        self.hardware: Hardware | None = None
        self._stop = asyncio.Event()
        self._leave = False
        self._feed = Feed(self.status, catch_up=lambda: self.history.catch_up())
        self._announcements = Announcements(tell, progress, self._feed)
        self._say = self._announcements.say
        self._news = News()

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when told to stop; raises a `MeshError` when it cannot go on."""
        with self.home.lock():
            # Another mesh, another key: members of the old one would be members of this one, too.
            self._new_secret = secrets.token_bytes(32) if self.config.new_mesh else None
            self.identity = Identity.from_secret(self._new_secret or self.home.secret())
            self._compose()
            app = management_app(self._managed, self._feed)
            async with serve_on_socket(app, self.home.control_socket):
                serving = asyncio.create_task(self._serve(), name="serve")
                console = asyncio.create_task(self._console.run(), name="console")
                stopping = asyncio.create_task(self._stop.wait(), name="wait for stop")
                try:
                    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done():
                        await self._drain()
                finally:
                    # Another Ctrl-C cuts off the step that is under way, and none of the others.
                    await each_in_turn(
                        partial(cancelled, serving),
                        partial(cancelled, stopping),
                        self._gateway.stop,
                        self._console.close,
                        partial(cancelled, console),
                    )
                if not serving.cancelled() and (error := serving.exception()) is not None:
                    raise error

    def stop(self, leave: bool = False) -> None:
        """Drain and end; with `leave` the home also forgets its mesh. Safe to call more than once."""
        self._leave = self._leave or leave
        self._stop.set()

    def _stop_as_told(self, leave: bool) -> None:
        """From outside of this terminal, where somebody may wonder."""
        if not self._stop.is_set():
            what = "leave the mesh" if leave else "stop"
            self._say("stopping", f"Told to {what}: others take over, and open answers end first")
        self.stop(leave)

    def _compose(self) -> None:
        """Wire the parts; nothing runs yet."""
        config = self.config
        self._failure: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        facts = NodeFacts(
            name=self.name,
            role=Role.CLIENT if config.client else Role.NODE,
            version=__version__,
            hosting=config.hosting,
            plain_lan=config.plain_lan,
        )
        self.mesh = Mesh(
            self.identity.id,
            facts,
            incarnation=int(time.time() * 1000),
            on_change=self._on_mesh,
            on_refused=self._announcements.refused,
        )
        self._compose_api()
        self.joining = Joining(self.home, config, self.identity, new_secret=self._new_secret)
        self.offers = ModelOffers(
            config=config,
            model_files=self.model_files,
            joining=self.joining,
            mesh=self.mesh,
            busy=lambda: self._gateway.active > 0,
        )
        self.lending = Lending(
            specify=self._worker_spec,
            weights=self._weights,
            on_change=lambda: self.mesh.publish(lent_bytes=self.lending.lent_bytes),
            tell=self._tell_lease,
            progress=self._progress,
        )
        measured_links = MeasuredLinks(self.mesh, otherwise=self.lending.receive)
        self.data_links = DataLinks(
            self.mesh,
            receive=measured_links.receive,
            answer=self._gateway.serve_guest,
            bind_ip=config.bind_ip,
        )
        self._measure_link = partial(measured_links.measure, self.data_links)
        self._compose_models()
        self._compose_reports()

    def _compose_api(self) -> None:
        """The gateway, and what it tells of this node."""
        self.state = NodeState(
            self.mesh,
            models=lambda: [service.state for service in self.models.services],
            announce_api=lambda: self._announcements.api(
                self.models.default.name, self._gateway.url, config=self.config
            ),
        )
        self._engines = Engines(
            lambda: [service.engines for service in self.models.services],
            lambda: [service.engines for service in self.models.every()],
            self._announcements,
            metrics=lambda engine: self.metrics.text(engine),
            load=lambda name: self.model_control.load_over_http(name),
            unload=lambda name: self.model_control.unload_over_http(name),
        )
        config = self.config
        self._page = ChatPage()
        self._gateway = Gateway(
            GatewayConfig(
                listen=config.listen,
                port=config.port,
                api_key=config.api_key,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                keys_file=self.home.keys_file,
                key_usage_file=self.home.key_usage_file,
            ),
            self._engines,
            self._page,
        )

    def _compose_models(self) -> None:
        """A service for each model of the mesh."""
        self.cpu_library = self._compose_cpu_library()
        self.demands = Demands(self.mesh, on_change=lambda: self.models.wake(), facts=self.model_files.facts)
        parts = NodeParts(
            name=self.name,
            mesh=self.mesh,
            joining=self.joining,
            model_files=self.model_files,
            offers=self.offers,
            data_links=self.data_links,
            hosted=HostedPlans(self.mesh, on_decided=lambda: self.models.on_decided()),
            demands=self.demands,
            announcements=self._announcements,
            progress=self._progress,
            hardware=lambda: self.hardware,
            node_state=lambda: (self.state.value, self.state.reason),
            starting=self.state.start,
            on_change=self.state.reflect,
            on_engine=lambda report: self.metrics.on_engine(report),
            on_wait=self._gateway.on_wait,
            watch_library=self.cpu_library.watch,
        )
        self.models = ServedModels(parts, self.config)
        self._file_watch = FileWatch(
            model_files=self.model_files,
            offers=self.offers,
            lending=self.lending,
            settings=lambda: self.joining.settings,
            service=self.models.find,
            tell=self._announcements.tell,
            on_files=self._on_mesh,
        )

    def _compose_cpu_library(self) -> CpuLibrary:
        return CpuLibrary(
            self.config,
            mesh=self.mesh,
            models=lambda: [(each.hosting, each.slot_queue) for each in self.models.every()],
            lending=self.lending,
            say=lambda text: self._say("build", text),
            # Not at the terminal: an answer may be under way there.
            progress=self._feed.progress,
            take_up=partial(setattr, self, "hardware"),
        )

    def _compose_reports(self) -> None:
        """What can be seen of this node, and asked of it."""
        self.view = NodeView(
            id=self.identity.id,
            name=self.name,
            config=self.config,
            mesh=self.mesh,
            models=lambda: [service.view for service in self.models.services],
            lending=self.lending,
            model_files=self.model_files,
            mesh_id=lambda: self.joining.membership.mesh,
            settings=lambda: self.mesh.settings() or self.joining.settings,
            health=self.models.default.health,
            api_url=lambda: self._gateway.url if self._gateway.port else None,
            key_reports=self._gateway.key_usage.reports,
            shared_url=lambda: self.sharing.url,
            console_url=lambda: self._console.url,
            first_token=self._first_token,
            others_loaded=self.demands.others_loaded,
            settled=self.demands.settled,
            token_s=lambda run: self.history.token_s(run),
            experience=lambda plan: self._experience.of(plan),
            experience_before=lambda plan: self._experience.before(plan),
        )
        self._experience = PlanExperience(self.view, self.home.experience_file)
        self.metrics = NodeMetrics(self.view)
        self.history = History(
            self.view, self._feed, self._gateway.take_first_tokens_s, learn=self._experience.learn
        )
        self.invites = Invites(self.joining, self.mesh, self.identity)
        self.pairing = Pairing(self.name, self.invites, self._announcements, bind_ip=self.config.bind_ip)
        self.api_keys = ApiKeys(self._gateway)
        self.sharing = Sharing(self._gateway, self.home, self.config, self._say)
        self.unload = ModelUnload(self.mesh, self.models.wake, self.lending, self._announcements)
        self._polite = PoliteLending(self.config.lend, self.mesh, self.unload)
        self.model_control = ModelControl(
            config=self.config,
            joining=self.joining,
            mesh=self.mesh,
            model_files=self.model_files,
            offers=self.offers,
            announcements=self._announcements,
            progress=self._progress,
            on_change=self._on_mesh,
            service=self.models.find,
        )
        self._managed = Managed(
            status=self.status,
            stop=self._stop_as_told,
            unload=self.unload.begin,
            load=self._polite.load,
            pause=self._polite.pause,
            resume=self._polite.resume,
            plan=partial(what_if.over_mesh, self.view),
            snapshot=partial(what_if.snapshot_document, self.view),
            network=partial(network_document, self.view),
            invite=self.invites.make,
            promote=self.invites.promote,
            invites=self.invites.listed,
            revoke=self.invites.revoke,
            pair=self.pairing.begin,
            pairing=self.pairing.state,
            answer_pairing=self.pairing.answer,
            end_pairing=self.pairing.end,
            load_model=self.model_control.load,
            unload_model=self.model_control.unload,
            use_model=self.model_control.use,
            keys=self.api_keys.listed,
            add_key=self.api_keys.add,
            revoke_key=self.api_keys.revoke,
            share=self.sharing.share,
            stop_sharing=self.sharing.stop,
            measure=self._measure_link,
        )
        self._console = NodeConsole(self.view, self._feed, self.history, self._managed, self._announcements)
        self._streams = IncomingStreams(
            self.view, self.data_links, self.offers, self.history, self._gateway.warm
        )

    async def _serve(self) -> None:
        given = await self._check()
        await self._gateway.start()
        await self._console.open()
        network = Network(self.joining.network_config(), self.joining.membership, self.mesh)
        self.mesh.attach(network, self._streams.services)
        async with task_group() as group, open_door(link_door(self.identity.id)) as self.data_links.door:
            try:
                await network.start()
                group.create_task(self._fail_when_told(), name="failure")
                group.create_task(self._take_page(), name="web page")
                group.create_task(self.mesh.run(), name="mesh")
                await self._enter(network)
                self.models.follow()
                if not self.config.client:
                    await self._take_part(given)
                    group.create_task(self._build_cpu_library(), name="CPU library")
                    group.create_task(self._polite.run(), name="polite lending")
                else:
                    self.state.take_part()
                group.create_task(self._file_watch.run(), name="model files")
                group.create_task(self.model_control.load_named(), name="more models")
                group.create_task(self.demands.run(), name="models on demand")
                await self.models.run(hosts=not self.config.client)
            finally:
                self.mesh.leave()
                await each_in_turn(
                    self.pairing.close,
                    self.model_control.close,
                    self.models.close,
                    self.unload.close,
                    self.lending.close,
                    self.data_links.close,
                    partial(network.close, "the node is stopping"),
                )

    async def _fail_when_told(self) -> None:
        raise await self._failure

    async def _take_page(self) -> None:
        try:
            self._page.fill(await page_files())
        except MeshError as error:
            log.warning("no web page cause=%s", error)
            self._page.lack(error.message)

    async def _check(self) -> ModelFacts | None:
        """Everything that can be refused without touching anything; the model's facts if it is here."""
        self.joining.read()
        if self.config.client:
            return None
        find_wheel()
        if self.config.bin_dir is not None:
            await external.check_version(self.config.bin_dir)
        return await self.models.default.supply.given()

    async def _enter(self, network: Network) -> None:
        """Become, or be again, a member. Settings are known afterwards, or made by `_take_part`."""
        self.joining.opened(network)
        if self.joining.invite is not None:
            self.state.change(State.STARTING, "joining the mesh")
            inviter = await self.joining.join(self.mesh)
            self._say("joined", f"Joined the mesh of {inviter}")
        else:
            await self.joining.return_to(self.mesh)
        self.mesh.publish(address=network.address, role=self.joining.membership.role(self.identity.id))

    async def _take_part(self, given: ModelFacts | None) -> None:
        """Find the model, equip this machine, and tell the mesh."""
        supply = self.models.default.supply
        # A download leaves the processor idle, and a compiler the network.
        async with meanwhile(build_libraries(self.config, self._progress), "native libraries") as building:
            model = await supply.bring_first(given)
            await supply.settle(model)
            self.mesh.claim()
            self.models.adopt()
            self.state.change(State.STARTING, "native libraries are being built")
            libraries = await building
        self.hardware = await equip(
            self.config,
            libraries,
            say=lambda text: self._say("build", text),
            held_bytes=held_bytes(self.config, model, supply.side_file_supply.projector()),
            model=model,
        )
        self.data_links.splicer = load_native(self.hardware.splice)
        self.mesh.publish(
            splits=self.config.bin_dir is None,
            **self.offers.told(),
            state=State.WAITING,
            **self.hardware.facts(),
        )
        if self.config.bin_dir is None and (text := lent_text(self.hardware.devices)):
            self._say("device", text)
        token = self.invites.make(Role.NODE, INVITE_DEFAULT_S, reuse=True)["token"]
        self._say("invite", f"Invite token: {token}", secret=True)
        self.models.default.state.progress = (State.WAITING, "the plan is being made")
        self.state.take_part()

    async def _build_cpu_library(self) -> None:
        settings = self.mesh.settings()
        model = self.model_files.facts(settings.fingerprint) if settings is not None else None
        await self.cpu_library.build(self.hardware, model)

    async def _drain(self) -> None:
        self.state.change(State.DRAINING, "the node is stopping")
        if self.mesh.has_network:
            hosting = [service.hosting for service in self.models.every()]
            await drain(self.mesh, hosting, self.lending, self._gateway)
        if self._leave:
            self.joining.forget()

    # -- what it tells -------------------------------------------------------------------------

    def _first_token(self) -> FirstToken | None:
        seen, upstream = self._gateway.last_first_token(), self.models.default.engines.upstream()
        return seen if upstream is not None and seen is not None and seen.engine == upstream.url else None

    def _progress(self, step: Progress) -> None:
        self.metrics.progress(step)
        self._announcements.progress(step)

    async def status(self) -> dict[str, Any]:
        """What `mesh-llm status --json` prints."""
        document: dict[str, Any] = to_document(await status.status(self.view))
        return document

    def _tell_lease(self, lease: Lease) -> None:
        facts = self.model_files.facts(lease.terms.fingerprint)
        layers = len(facts.layers) if facts is not None else lease.terms.last
        self._say("worker", f"Worker for {self.mesh.name_of(lease.host)}: {lease.terms.text(layers)}")

    # -- what happens --------------------------------------------------------------------------

    def _on_mesh(self) -> None:
        if self.mesh.failure is not None:
            if not self._failure.done():
                self.joining.remember(self.mesh)
                self._failure.set_result(self.mesh.failure)
            return
        self.joining.remember(self.mesh)
        self.model_control.catch_up()
        self.models.adopt()
        self.models.wake()
        # Whoever stops a node does not want to hear how the mesh goes on without it.
        stops = self.state.value is State.DRAINING
        self._announcements.news(list(self._news.read(self.mesh)), quietly=stops)
        self.state.reflect()

    # -- what children are told ----------------------------------------------------------------

    async def _weights(self, terms: Terms, step: Step) -> Weights:
        """A host may be behind: what is no longer the mesh's was its default model's."""
        service = self.models.find(terms.fingerprint) or self.models.default
        return await service.supply.layers.weights(terms, step)

    def _worker_spec(self, device: str) -> WorkerSpec:
        assert self.hardware is not None
        return worker_spec(
            self.config,
            self.hardware,
            self.home.worker_socket,
            device,
            nodes_here=self.mesh.own_machine.nodes(),
        )
