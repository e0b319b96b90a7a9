"""The composition root: one node, from its home to its last child.

The life of a node, in order:

1. take the home, answer `mesh-llm status` from here on;
2. check what was asked for: token, engine, model file (what cannot work ends it
   here, before anything is built, fetched or bound);
3. open the API port: clients get 503 and the reason until there is an engine;
4. enter the mesh: its own, the one it was invited to, or the one it was in;
5. fetch the model, build the native libraries, measure the machine, where that
   has not been done;
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
from typing import Any

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.console.routes import management_app, serve_on_socket
from mesh_llm.defaults import DEFAULT_MODEL, DEFAULT_SLOTS
from mesh_llm.engine.children import external
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.spec import EngineSpec, LinkSpec, WorkerSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState
from mesh_llm.errors import MeshError
from mesh_llm.gateway.metrics import FirstToken
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.slot_queue import SlotQueue
from mesh_llm.gateway.upstream import Health, Upstream
from mesh_llm.home import Home, link_door
from mesh_llm.host.hosting import Hosting
from mesh_llm.host.launch import Launch
from mesh_llm.host.plan_run import Run
from mesh_llm.local.hardware import Hardware, equip
from mesh_llm.local.modalities import described, held_bytes
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.node import incoming_streams, joining, words
from mesh_llm.node.drain import drain
from mesh_llm.node.invites import Invites
from mesh_llm.node.management import Management
from mesh_llm.node.model_supply import ModelSupply
from mesh_llm.node.node_console import NodeConsole
from mesh_llm.node.unload import UNLOADED, ModelUnload
from mesh_llm.peers.data_links import Passage
from mesh_llm.peers.mesh import Mesh
from mesh_llm.peers.remote_engine import Remote
from mesh_llm.planning.memory_budget import unlent
from mesh_llm.report import metrics, peer_documents, status
from mesh_llm.tasks import cancelled, task_group
from mesh_llm.transport.direct_links import open_door
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.native_splice import load_native
from mesh_llm.transport.network import Network
from mesh_llm.types import (
    Event,
    EventSink,
    MeshSettings,
    ModelFacts,
    NodeFacts,
    NodeId,
    Plan,
    ProgressSink,
    Role,
    State,
)
from mesh_llm.worker.lending import Lease, Lending

INVITE_DEFAULT_S = 7 * 86400.0
"""A week: long enough to walk over to the other machine, not for ever."""


log = logging.getLogger(__name__)


class Node:
    """One machine's part. `run` lives as long as the node does."""

    def __init__(self, config: NodeConfig, *, tell: EventSink, progress: ProgressSink) -> None:
        self.config = config
        self.home = Home(config.home)
        self.model_files = ModelFiles(any_architecture=config.bin_dir is not None)
        self.hardware: Hardware | None = None
        self._stop = asyncio.Event()
        self._leave = False
        self.state = State.STARTING
        self._reason = "starting"
        self._progressing: tuple[State, str] | None = None
        """What hosting is about; None when it serves, or leaves that to others."""
        self.slot_queue = SlotQueue(DEFAULT_SLOTS)
        """At the engine here, for the clients of all nodes."""
        self._gateway = Gateway(
            GatewayConfig(
                listen=config.listen,
                port=config.port,
                api_key=config.api_key,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
            ),
            self,
            self.slot_queue,
        )
        self.window = NodeConsole(self, tell, progress, first_tokens_s=self._gateway.take_first_tokens_s)
        self._say = self.window.announcements.say
        self.metering = metrics.NodeMetrics(self, self.window.announcements.progress)

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when told to stop; raises a `MeshError` when it cannot go on."""
        with self.home.lock():
            # Another mesh, another key: members of the old one would be members of this one, too.
            self._new_secret = secrets.token_bytes(32) if self.config.new_mesh else None
            self.identity = Identity.from_secret(self._new_secret or self.home.secret())
            self._compose()
            app = management_app(Management(self), self.window.feed)
            async with serve_on_socket(app, self.home.control_socket):
                serving = asyncio.create_task(self._serve(), name="serve")
                window = asyncio.create_task(self.window.run(), name="window")
                stopping = asyncio.create_task(self._stop.wait(), name="wait for stop")
                try:
                    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done():
                        await self._drain()
                finally:
                    await cancelled(serving)
                    await cancelled(stopping)
                    await self._gateway.stop()
                    await self.window.close()
                    await cancelled(window)
                if not serving.cancelled() and (error := serving.exception()) is not None:
                    raise error

    def stop(self, *, leave: bool = False) -> None:
        """Drain and end; with `leave` the home also forgets its mesh. Safe to call more than once."""
        self._leave = self._leave or leave
        self._stop.set()

    def _compose(self) -> None:
        """Wire the parts; nothing runs yet."""
        config = self.config
        self._failure: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()
        role = Role.CLIENT if config.client else Role.NODE
        facts = NodeFacts(
            name=self.name, role=role, version=__version__, hosting=config.hosting, plain_lan=config.plain_lan
        )
        incarnation = int(time.time() * 1000)
        self.mesh = Mesh(
            self.identity.id,
            facts,
            incarnation=incarnation,
            on_change=self._on_mesh,
            on_refused=self._on_refused,
        )
        self.entry = joining.Entry(self.home, config, self.identity, new_secret=self._new_secret)
        self.invites = Invites(self.entry, self.mesh, self.identity)
        self.model_supply = ModelSupply(
            config=config,
            model_files=self.model_files,
            entry=self.entry,
            mesh=self.mesh,
            busy=lambda: self._gateway.active > 0,
            tell=self.window.announcements.tell,
            doing=lambda what: self._change(State.STARTING, what),
            progress=self.metering.progress,
            on_model=self._tell_model,
        )
        self.lending = Lending(
            specify=self._worker_spec,
            weights=self.model_supply.weights,
            on_change=self._on_lending,
            tell=self._tell_lease,
            progress=self.metering.progress,
        )
        self.data_links = Passage(
            self.mesh,
            receive=self.lending.receive,
            answer=self._gateway.serve_guest,
            bind_ip=config.bind_ip,
        )
        self.remote = Remote(self.mesh, self.data_links)
        self.rest = ModelUnload(self)
        self.hosting = Hosting(mesh=self.mesh, make_run=self._make_run, model=self._known_model, watcher=self)

    async def _serve(self) -> None:
        given = await self._check()
        await self._gateway.start()
        await self.window.open()
        network = Network(self.entry.network_config(), self.entry.membership, self.mesh)
        self.mesh.attach(network, incoming_streams.services(self))
        async with task_group() as group, open_door(link_door(self.identity.id)) as self.data_links.door:
            try:
                await network.start()
                group.create_task(self._fail_when_told(), name="failure")
                group.create_task(self.mesh.run(), name="mesh")
                await self._enter(network, given)
                group.create_task(self.remote.run(self._reflect), name="remote")
                if not self.config.client:
                    await self._take_part(given)
                    group.create_task(self.model_supply.follow(self._on_other_model), name="model")
                    group.create_task(self.model_supply.publish_digest(), name="digest")
                    await self.hosting.run()
                else:
                    self._reflect()
                    await asyncio.Event().wait()
            finally:
                self.mesh.leave()
                await self.rest.close()
                await self.lending.close()
                await self.data_links.close()
                await network.close("the node is stopping")

    async def _fail_when_told(self) -> None:
        raise await self._failure

    async def _check(self) -> ModelFacts | None:
        """Everything that can be refused without touching anything; the model's facts if it is here."""
        self.entry.read()
        if self.config.client:
            return None
        find_wheel()
        if self.config.bin_dir is not None:
            await external.check_version(self.config.bin_dir)
        return await self.model_supply.given()

    async def _enter(self, network: Network, given: ModelFacts | None) -> None:
        """Become, or be again, a member. Settings are known afterwards, or made by `_take_part`."""
        self.entry.opened(network)
        if self.entry.invite is not None:
            self._change(State.STARTING, "joining the mesh")
            inviter = await self.entry.join(self.mesh)
            self._say("joined", f"Joined the mesh of {inviter}")
        else:
            await self.entry.return_to(self.mesh)
        self.mesh.publish(address=network.address, role=self.entry.membership.role(self.identity.id))

    async def _take_part(self, given: ModelFacts | None) -> None:
        """Find the model, equip this machine, and tell the mesh."""
        model = await self.model_supply.bring_first(given)
        await self.model_supply.settle(model)
        self.mesh.claim()
        self._change(State.STARTING, "native libraries are being built")
        self.hardware = await equip(
            self.config,
            say=lambda text: self._say("build", text),
            progress=self.metering.progress,
            held_bytes=held_bytes(self.config, model),
        )
        hardware = self.hardware
        self.data_links.splicer = load_native(hardware.splice)
        self.mesh.publish(
            splits=self.config.bin_dir is None,
            **self.model_supply.told(),
            state=State.WAITING,
            **hardware.facts(),
        )
        if self.config.bin_dir is None and (text := unlent(hardware)):
            self._say("device", text)
        self._say(
            "invite",
            f"Invite token: {self.invites.make(Role.NODE, INVITE_DEFAULT_S, reuse=True)['token']}",
            secret=True,
        )
        self._progressing = (State.WAITING, "the plan is being made")
        self._reflect()

    def _tell_model(self, facts: ModelFacts | None) -> None:
        missing = f"There is no {self.model_name} here, and --no-fetch: nothing is lent"
        self._say("model", missing if facts is None else described(self.config, facts))

    def _on_other_model(self) -> None:
        """An owner of the mesh has chosen another one, or it has come at last."""
        self.mesh.publish(**self.model_supply.told())
        self.hosting.wake()
        self._reflect()

    async def _drain(self) -> None:
        self._change(State.DRAINING, "the node is stopping")
        await drain(self, self._gateway)
        if self._leave:
            self.entry.forget()

    # -- what others ask -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.config.name or socket.gethostname()

    @property
    def model_name(self) -> str:
        if (settings := self.entry.settings) is not None:
            return settings.alias
        return self.config.alias or self.config.model or DEFAULT_MODEL

    @property
    def url(self) -> str | None:
        return self._gateway.url if self._gateway.port else None

    def upstream(self) -> Upstream | None:
        run = self.hosting.serving
        if run is not None and run.port is not None and run.broken is None:
            return self._upstream_of(run)
        return self.remote.upstream() or self._replaced()

    def _replaced(self) -> Upstream | None:
        """The engine here that was replaced by one elsewhere, until that one's host has answered."""
        useful = self.state is State.DRAINING or self.mesh.serving() is not None
        run = self.hosting.last() if useful else None
        return self._upstream_of(run) if run is not None else None

    def engine(self, epoch: int) -> Upstream | None:
        run = self.hosting.find(epoch)
        return self._upstream_of(run) if run is not None else None

    def _upstream_of(self, run: Run) -> Upstream:
        url, key = run.engine_address()
        return Upstream(url=url, key=key, served_by=self.name)

    def last_first_token(self) -> FirstToken | None:
        """What the last client here waited for one, of the engine that serves now."""
        seen, upstream = self._gateway.last_first_token(), self.upstream()
        return seen if upstream is not None and seen is not None and seen.engine == upstream.url else None

    def health(self) -> Health:
        return Health(state=self.state, reason=self._reason, model=self.model_name)

    def remark(self, kind: str, text: str) -> None:
        self.window.announcements.remark(kind, text)

    def metrics(self, engine: bytes) -> bytes:
        return self.metering.text(engine)

    async def engine_failure(self, upstream: Upstream) -> str:
        if upstream.connect is not None:
            return await self.remote.why(upstream)
        return await self.hosting.why(int(upstream.url.rsplit(":", 1)[1]))

    async def status(self) -> dict[str, Any]:
        """What `mesh-llm status --json` prints."""
        return await status.document(self)

    # -- what happens --------------------------------------------------------------------------

    def _known_model(self) -> tuple[ModelFacts, MeshSettings] | None:
        settings = self.mesh.settings()
        facts = self.model_files.facts(settings.fingerprint) if settings is not None else None
        return (facts, settings) if facts is not None and settings is not None else None

    def _make_run(self, epoch: int, plan: Plan) -> Run:
        known = self._known_model()
        assert known is not None
        launch = self._launch()
        self._say(
            "elected",
            f"Elected as host ({plan.have_bytes / 1e9:.1f} GB available for the "
            f"{known[0].weight_bytes / 1e9:.1f} GB model)",
            once=True,
        )

        def specify(plan: Plan, links: tuple[LinkSpec, ...]) -> EngineSpec:
            return launch.engine(plan, links, nodes_here=self.mesh.nodes_here())

        return Run(
            epoch=epoch,
            plan=plan,
            fingerprint=known[0].fingerprint,
            settings=known[1],
            mesh=self.mesh,
            data_links=self.data_links,
            specify=specify,
            on_report=self._on_engine,
            log_file=self.home.log_folder / "engine.log",
        )

    def _launch(self) -> Launch:
        known = self._known_model()
        assert known is not None and self.hardware is not None
        return Launch(
            me=self.identity.id,
            config=self.config,
            hardware=self.hardware,
            model=known[0],
            settings=known[1],
            draft=self.model_supply.drafts.file(known[1]),
        )

    def _worker_spec(self) -> WorkerSpec:
        return self._launch().worker(self.home.worker_socket, nodes_here=self.mesh.nodes_here())

    def _on_mesh(self) -> None:
        if self.mesh.failure is not None:
            self._give_up(self.mesh.failure)
            return
        self.entry.remember(self.mesh)
        self.hosting.wake()
        self.remote.wake()
        self.model_supply.wake()
        self.window.note_news(self.mesh)
        self._reflect()

    def _give_up(self, error: MeshError) -> None:
        if not self._failure.done():
            self.entry.remember(self.mesh)
            self._failure.set_result(error)

    def _on_lending(self) -> None:
        self.mesh.publish(lent_bytes=self.lending.lent_bytes)

    def _tell_lease(self, lease: Lease) -> None:
        facts = self.model_files.facts(lease.terms.fingerprint)
        layers = len(facts.layers) if facts is not None else lease.terms.last
        self._say("worker", f"Worker for {self.mesh.name_of(lease.host)}: {lease.terms.text(layers)}")

    def _on_refused(self, node: NodeId, reason: str) -> None:
        self.remark("refused", f"A node that wanted to join ({node[:8]}) was refused: {reason}")

    def on_hosting(self, state: State, reason: str) -> None:
        """What hosting is about, while nothing serves."""
        if self.state is State.DRAINING:
            return
        rests = state is State.WAITING and self.rest.on
        self._progressing = (state, UNLOADED if rests else reason)
        self._reflect()
        if state is State.WAITING and not rests:
            self._say("waiting", f"Waiting for more peers: {reason}", once=True)
            self._advise()

    def _advise(self) -> None:
        """Alone, a person may rather change an option than fetch another machine."""
        if not self.mesh.has_company():
            text = self._launch().advice(self.mesh.own_memory_bytes())
            self._say("advice", f"On this machine alone: {text}", once=True)

    def on_standing_by(self) -> None:
        self._progressing = None
        self._reflect()

    def on_serving(self, run: Run) -> None:
        assert run.supervisor is not None
        self.slot_queue.resize(run.settings.slots)
        self._progressing = None
        self._say("ready", f"Engine ready in {run.supervisor.report.ready_s:.1f} s")
        self._reflect()

    def on_failed(self, reason: str) -> None:
        self.window.announcements.note(Event(kind="failed", text=f"The plan failed: {reason}"))

    def leans_on(self, run: Run) -> bool:
        upstream = None if self.state is State.DRAINING else self.upstream()
        return upstream is not None and upstream.url == run.engine_address()[0]

    def on_drained(self) -> None:
        self._reflect()

    def _on_engine(self, run: Run, report: EngineReport) -> None:
        """One without links restarts by itself; others end with their plan."""
        self.metering.on_engine(report)
        if run is not self.hosting.serving or run.broken is not None:
            return
        match report.state:
            case EngineState.READY:
                self._progressing = None
                self._say("ready", f"Engine ready in {report.ready_s:.1f} s")
            case EngineState.LOADING:
                self._progressing = (State.LOADING, report.reason)
            case EngineState.FAILED:
                self._progressing = (State.LOADING, f"{report.reason}; it is being restarted")
                self._say("engine", f"Engine lost: {report.reason}. Restarting it")
        self._reflect()

    def _reflect(self) -> None:
        """Derive this node's state, here and nowhere else, from what it hosts and what the mesh does."""
        if self.upstream() is not None:
            self._change(State.SERVING, "")
            self._announce()
        elif self.hardware is None and not self.config.client:
            return  # still busy with itself, and says so
        elif self._progressing is not None:
            self._change(*self._progressing)
        elif (published := self.mesh.serving()) is not None:
            self._change(State.LOADING, f"{self.mesh.name_of(published[0])} is about to serve")
        else:
            self._change(State.WAITING, self.mesh.others_reason() or "no node of the mesh serves yet")

    def _announce(self) -> None:
        key_needed = self.config.api_key is not None
        for kind, text in words.of_api(self.model_name, self._gateway.url, key_needed=key_needed).items():
            self._say(kind, text, once=True)

    def _change(self, state: State, reason: str) -> None:
        # One that is still starting may serve what others compute.
        if self.state is State.DRAINING or (state is State.STARTING and self.state is State.SERVING):
            return
        self.state, self._reason = state, peer_documents.line(reason)
        if self.hardware is not None or self.config.client:
            self.mesh.publish(state=state, reason=reason[:200])
