"""The mesh's settings as JSON documents, which owners sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from mesh_llm.defaults import DRAFT_MAX, GUESS_TEXT_MAX
from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields
from mesh_llm.membership.document_shapes import Document
from mesh_llm.mesh_settings import (
    ADAPTERS_LIMIT,
    IDLE_DEFAULT_S,
    IDLE_LIMIT_S,
    MESH_OPTIONS,
    MODELS_LIMIT,
    SCALE_LIMIT,
    Adapter,
    Draft,
    MeshSettings,
    ModelSettings,
    SideFile,
)
from mesh_llm.sanitise import NAME_CHARS, clean
from mesh_llm.types import Fingerprint

_ALWAYS = {each.name for each in fields(ModelSettings) if each.default is not None} & set(MESH_OPTIONS)
"""Options that every document has had from the beginning; others are left out where nobody set them."""

_DRAFT_LAYERS = 8
"""That a draft reads; an EAGLE3 head reads three."""
_LAYER_LIMIT = 10_000


def settings_to_document(settings: MeshSettings) -> Document:
    document: Document = {"version": settings.version, **_model_to_document(settings)}
    if settings.others:
        document["others"] = [
            {**_model_to_document(each), "changed": each.changed} for each in settings.others
        ]
    return document


def _model_to_document(settings: ModelSettings) -> Document:
    options = {name: getattr(settings, name) for name in MESH_OPTIONS}
    document: Document = {
        "model": clean(settings.model, NAME_CHARS),
        "fingerprint": clean(settings.fingerprint, NAME_CHARS),
        "alias": clean(settings.alias, NAME_CHARS),
        "context": settings.context,
        "slots": settings.slots,
        **{name: value for name, value in options.items() if value is not None},
    }
    if settings.digest:
        document["digest"] = settings.digest
    if isinstance(settings, MeshSettings) and settings.refined:
        document["refined"] = settings.refined
    if not settings.guess:
        document["guess"] = False
    if settings.on_demand:
        # Nodes of older versions keep it loaded.
        document |= {"on_demand": True, "idle_s": settings.idle_s}
    if settings.draft is not None:
        draft = asdict(settings.draft)
        # Left out where there are none, as settings are signed.
        draft |= {"layers": list(layers)} if (layers := draft.pop("layers")) else {}
        document["draft"] = draft | {name: clean(draft[name], NAME_CHARS) for name in ("name", "fingerprint")}
        document["draft_max"] = settings.draft_max
    if settings.projector is not None:
        document["projector"] = _side_file_to_document(settings.projector)
    if settings.adapters:
        document["adapters"] = [
            {**_side_file_to_document(each.file), "scale": each.scale} for each in settings.adapters
        ]
    return document


def settings_from_document(document: object) -> MeshSettings:
    fields = Fields(document, "settings")
    settings = MeshSettings(
        version=fields.whole("version"),
        refined=fields.whole("refined", default=0),
        others=fields.items("others", MODELS_LIMIT - 1, _other) if fields.has("others") else (),
        **_model_from_document(fields),
    )
    if len({model.fingerprint for model in settings.models}) < len(settings.models):
        raise MalformedMessage("settings.others: a model is there twice")
    return settings


def _other(document: object) -> ModelSettings:
    fields = Fields(document, "settings.others")
    return ModelSettings(changed=fields.whole("changed"), **_model_from_document(fields))


def _model_from_document(fields: Fields) -> dict[str, Any]:
    for name in _ALWAYS:
        if not fields.has(name):
            raise MalformedMessage(f"settings.{name}: missing")
    return {
        "model": fields.text("model", NAME_CHARS),
        "fingerprint": Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        "alias": fields.text("alias", NAME_CHARS),
        "digest": fields.digest("digest") if fields.has("digest") else "",
        "guess": fields.flag("guess") if fields.has("guess") else True,
        "on_demand": fields.flag("on_demand") if fields.has("on_demand") else False,
        "idle_s": fields.whole("idle_s", most=IDLE_LIMIT_S) if fields.has("idle_s") else IDLE_DEFAULT_S,
        "draft": _draft_from_document(fields.get("draft")) if fields.has("draft") else None,
        "draft_max": fields.whole("draft_max", most=GUESS_TEXT_MAX) if fields.has("draft_max") else DRAFT_MAX,
        "projector": _side_file(fields.get("projector")) if fields.has("projector") else None,
        "adapters": fields.items("adapters", ADAPTERS_LIMIT, _adapter) if fields.has("adapters") else (),
        **options_from_document({name: fields.get(name) for name in MESH_OPTIONS}),
    }


def options_from_document(document: Mapping[str, object]) -> dict[str, Any]:
    """Those that somebody has set, checked; `MalformedMessage` where one makes no sense."""
    found = {}
    for name, option in MESH_OPTIONS.items():
        if (value := document.get(name)) is not None:
            try:
                found[name] = option.read(value)
            except ValueError as error:
                raise MalformedMessage(f"settings.{name}: {error}") from None
    return found


def _side_file_to_document(file: SideFile) -> Document:
    return asdict(file) | {"name": clean(file.name, NAME_CHARS)}


def _side_file(document: object) -> SideFile:
    fields = Fields(document, "file")
    return SideFile(
        name=fields.text("name", NAME_CHARS),
        size_bytes=fields.whole("size_bytes"),
        digest=fields.digest("digest"),
    )


def _adapter(document: object) -> Adapter:
    scale = Fields(document, "adapter").get("scale")
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not abs(scale) <= SCALE_LIMIT:
        raise MalformedMessage("adapter.scale: not a scale")
    return Adapter(file=_side_file(document), scale=float(scale))


def _draft_from_document(document: object) -> Draft:
    fields = Fields(document, "draft")
    return Draft(
        name=fields.text("name", NAME_CHARS),
        fingerprint=Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        weight_bytes=fields.whole("weight_bytes"),
        cache_bytes=fields.whole("cache_bytes"),
        compute_bytes=fields.whole("compute_bytes"),
        layers=fields.items("layers", _DRAFT_LAYERS, _layer),
    )


def _layer(value: object) -> int:
    return Fields({"layer": value}, "draft").whole("layer", most=_LAYER_LIMIT)
