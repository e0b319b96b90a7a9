"""The mesh's settings as this node's own options ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DRAFT_MAX
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.home import Home
from mesh_llm.local.model_files import file_stem
from mesh_llm.mesh_settings import (
    MESH_OPTIONS,
    Draft,
    MeshSettings,
    ModelExtras,
    ModelSettings,
    as_one,
    given_options,
    with_default,
    with_options,
)
from mesh_llm.models import catalog, names
from mesh_llm.planning.cuts import forbidden
from mesh_llm.planning.manual_layers import misfit
from mesh_llm.types import ModelFacts


def own_settings(
    config: NodeConfig, model: ModelFacts, draft: Draft | None, extras: ModelExtras | None = None
) -> MeshSettings:
    """Of a mesh that is this node's to set."""
    return MeshSettings(
        version=1,
        # A name and never a path: others look for it in their own folders.
        model=_common_name(model),
        fingerprint=model.fingerprint,
        alias=config.alias or file_stem(model),
        guess=not config.no_draft,
        draft=draft,
        # Without a draft there is nothing to limit, and nothing that travels.
        draft_max=(config.draft_max or DRAFT_MAX) if draft is not None else DRAFT_MAX,
        projector=extras.projector if extras is not None else None,
        adapters=extras.adapters if extras is not None else (),
        **given_options(config),
    )


def given_settings(config: NodeConfig) -> set[str]:
    """The settings that options name."""
    others = {
        "model": config.model,
        "alias": config.alias,
        "guess": config.no_draft or None,
        "draft": config.draft,
        "draft_max": config.draft_max,
        "projector": config.mmproj,
        "adapters": config.lora or None,
    }
    return {*given_options(config), *(name for name, value in others.items() if value is not None)}


def given_over(config: NodeConfig, old: MeshSettings, own: MeshSettings, *, mine: bool) -> MeshSettings:
    """Settings as they were signed, with what this owner was asked to change.

    `mine`: this owner signed them, and its files are the mesh's.
    """
    before: MeshSettings | ModelSettings | None = old
    if config.model is not None:
        before = old.of(own.fingerprint) or (old if old.model == own.model else None)
    if before is None:
        return replace(own, others=old.others)  # options of another model are not meant for this one
    kept = with_default(old, before)
    if config.model is not None or mine:
        kept = _with_files(kept, own)
    return with_options(kept, kept, asked_over(config, kept, own))


def asked_over(config: NodeConfig, kept: ModelSettings, own: ModelSettings) -> dict[str, Any]:
    """What changes of one model's settings where its options were given anew."""
    drafting = _drafting(config, kept, own)
    changes = {name: getattr(own, name) for name in given_settings(config) - {"model", *drafting}}
    return changes | {name: value for name, value in drafting.items() if value != getattr(kept, name)}


def _with_files(kept: MeshSettings, own: MeshSettings) -> MeshSettings:
    """The model's file may be another one by now; what goes with it and was found since is used."""
    if kept.fingerprint != own.fingerprint:
        kept = replace(kept, fingerprint=own.fingerprint, digest="", draft=None, projector=None)
    return replace(kept, draft=kept.draft or own.draft, projector=kept.projector or own.projector)


def _drafting(config: NodeConfig, kept: ModelSettings, own: ModelSettings) -> dict[str, Any]:
    """How tokens are guessed ahead: not at all, until an option asks for it, where that was signed."""
    asked = config.draft is not None or config.draft_max is not None
    if config.no_draft or not (kept.guess or asked):
        return {"guess": False, "draft": None, "draft_max": DRAFT_MAX}
    draft, found = kept.draft, own.draft
    same = draft is not None and found is not None and draft.fingerprint == found.fingerprint
    if config.draft is not None or (config.slots is not None and same):
        draft = found  # what a draft takes depends on the slots
    elif config.draft_max is not None:
        draft = draft or found
    most = config.draft_max or kept.draft_max
    return {"guess": True, "draft": draft, "draft_max": most if draft is not None else DRAFT_MAX}


def check_layers(layers: tuple[tuple[str, int, int], ...] | None, model: ModelFacts) -> None:
    """Raise where those of --layers are not the model's."""
    if layers is not None and (wrong := misfit(len(model.layers), layers)):
        raise UsageError(wrong, hint=f"the model's layers are 0-{len(model.layers) - 1}")
    cuts = [first for _, first, _ in layers or ()]
    if len(cuts) > 1 and (wrong := forbidden(model, cuts)):
        raise UsageError(f"--layers: {wrong}")


def refuse_changes(config: NodeConfig, settings: MeshSettings, home: Home) -> None:
    """Settings belong to the mesh: whoever joins may repeat them, and not change them."""
    for flag, value, agreed in _compared(config, settings, home):
        if value is not None and value != agreed:
            shown = "not set" if agreed in (None, False) else str(agreed)
            raise MeshError(
                f"only owners of the mesh can set {flag}; it is {shown}", hint=f"leave {flag} out"
            )


def _compared(config: NodeConfig, settings: MeshSettings, home: Home) -> Iterator[tuple[str, Any, Any]]:
    """Each option's flag, what was given, and what the mesh has."""
    yield "--model", _named_model(config.model, settings, home), settings.model
    for name, value in given_options(config).items():
        yield MESH_OPTIONS[name].flag, value, getattr(settings, name)
    yield "--alias", config.alias, settings.alias
    yield "--draft", _named_draft(config.draft, settings.draft), settings.draft and settings.draft.name
    yield "--draft-max", config.draft_max, settings.draft_max
    yield "--lora", _named_adapters(config), _adapters(settings)
    yield "--no-draft", config.no_draft or None, not settings.guess


def _named_model(given: str | None, settings: MeshSettings, home: Home) -> str | None:
    """The catalog's name that was asked for, in the mesh's words; files are told by their contents."""
    known = catalog.load(*home.catalog_files).get(given) if given is not None else None
    if known is None:
        return None
    theirs = catalog.load().get(settings.model)
    same = names.same_model(known.stem, theirs.stem if theirs is not None else settings.model)
    return settings.model if same else given


def _named_adapters(config: NodeConfig) -> str | None:
    """In the words of `_adapters`: files are told by their contents, once they are read."""
    named = [f"{path.name.removesuffix('.gguf')}:{scale:g}" for path, scale in config.lora]
    return ", ".join(named) or None


def _adapters(settings: MeshSettings) -> str | None:
    return ", ".join(f"{each.file.name}:{each.scale:g}" for each in settings.adapters) or None


def _named_draft(given: str | None, draft: Draft | None) -> str | None:
    """The draft that was asked for, in the mesh's words."""
    if given is None or draft is None:
        return given
    return draft.name if names.same_model(catalog.stem_of(Path(given).name), draft.name) else given


def _common_name(model: ModelFacts) -> str:
    """By which every node of the mesh can look for it: never a path, nor one person's own word."""
    stem = file_stem(model)
    known = catalog.load().get(stem)
    if known is None:
        return stem
    # A file that is called as somebody else's model: others must not download that one for it.
    return known.name if catalog.key_of(known.stem) == catalog.key_of(stem) else f"{stem}.gguf"


def version_after(old: MeshSettings | None, settings: MeshSettings) -> MeshSettings:
    """With the version that they get when they follow `old`; `old` itself where nothing has changed."""
    if old is None:
        return replace(settings, version=1, refined=0, others=tuple(_changed(settings.others, (), 1)))
    version = old.version + 1
    default = next(_changed([settings], old.models, version))
    others = tuple(_changed(settings.others, old.models, version))
    new = replace(settings, version=version, refined=version - default.plan_version, others=others)
    same = replace(new, version=old.version, refined=old.refined)
    return old if same == old else new


def _changed(
    models: Iterable[ModelSettings], before: Iterable[ModelSettings], version: int
) -> Iterator[ModelSettings]:
    """Each with the version in which its plans had to be made anew: this one, where it was another before."""
    known = {_planned(model): model.plan_version for model in before}
    for model in models:
        yield replace(as_one(model), changed=known.get(_planned(model), version))


def _planned(model: ModelSettings) -> ModelSettings:
    """What plans are made by; how often it runs and which priority it has are no reason to make them anew."""
    same = as_one(model)
    return replace(same, digest="", replicas=None, priority=None, changed=0, on_demand=False, idle_s=0)
