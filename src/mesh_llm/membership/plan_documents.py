"""Plans, and the mesh's settings, as JSON documents."""

from __future__ import annotations

from dataclasses import asdict

from mesh_llm.defaults import DRAFT_MAX, GUESS_TEXT_MAX
from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields, is_number
from mesh_llm.sanitise import clean
from mesh_llm.types import Draft, Exclusion, Fingerprint, MeshSettings, Mode, Plan, Prediction, Stage

Document = dict[str, object]

NAME_CHARS = 128
"""Of names of nodes, models and devices."""
_SENTENCE_CHARS = 400
_STAGE_LIMIT = 64
_EXCLUDED_LIMIT = 128
_LAYERS_MOST = 1 << 16
_TOKENS_MOST = 1 << 40
_SLOTS_MOST = 1 << 16
_RATE_MOST = 1e9
_SHARES_LIMIT = 256


def plan_to_document(plan: Plan) -> Document:
    predicted = plan.predicted
    if predicted is not None and not _is_readable(predicted):
        predicted = None
    return {
        "mode": plan.mode.value,
        "host": plan.host,
        "stages": [_stage_to_document(stage) for stage in plan.stages[:_STAGE_LIMIT]],
        "context": plan.context,
        "slots": plan.slots,
        "head_on_worker": plan.head_on_worker,
        "need_bytes": plan.need_bytes,
        "have_bytes": plan.have_bytes,
        "predicted": predicted and asdict(predicted),
        "excluded": [
            {"node": one.node, "reason": clean(one.reason, _SENTENCE_CHARS)}
            for one in plan.excluded[:_EXCLUDED_LIMIT]
        ],
        "reason": clean(plan.reason, _SENTENCE_CHARS),
    }


def _is_readable(predicted: Prediction) -> bool:
    return all(is_number(each, _RATE_MOST) for each in asdict(predicted).values())


def plan_from_document(document: object) -> Plan:
    fields = Fields(document, "plan")
    plan = Plan(
        mode=fields.word("mode", Mode),
        host=fields.node("host") if fields.has("host") else None,
        stages=fields.items("stages", _STAGE_LIMIT, _stage_from_document),
        context=fields.whole("context", most=_TOKENS_MOST),
        slots=fields.whole("slots", most=_SLOTS_MOST),
        head_on_worker=fields.flag("head_on_worker"),
        need_bytes=fields.whole("need_bytes"),
        have_bytes=fields.whole("have_bytes"),
        predicted=_prediction(fields.get("predicted")) if fields.has("predicted") else None,
        excluded=fields.items("excluded", _EXCLUDED_LIMIT, _exclusion_from_document),
        reason=fields.text("reason", _SENTENCE_CHARS),
    )
    if len({stage.node for stage in plan.stages}) != len(plan.stages):
        raise MalformedMessage("plan.stages: a node has two of them")
    return plan


def _prediction(document: object) -> Prediction:
    fields = Fields(document, "predicted")
    return Prediction(
        tok_s=fields.number("tok_s", most=_RATE_MOST),
        first_token_s=fields.number("first_token_s", most=_RATE_MOST),
        prompt_tok_s=fields.number("prompt_tok_s", most=_RATE_MOST),
    )


def _exclusion_from_document(document: object) -> Exclusion:
    fields = Fields(document, "excluded")
    return Exclusion(node=fields.node("node"), reason=fields.text("reason", _SENTENCE_CHARS))


def _stage_to_document(stage: Stage) -> Document:
    return {
        "node": stage.node,
        "first": stage.first,
        "last": stage.last,
        "weight_bytes": stage.weight_bytes,
        "need_bytes": stage.need_bytes,
        "share": stage.share,
    }


def _stage_from_document(document: object) -> Stage:
    fields = Fields(document, "stage")
    first, last = fields.whole("first", most=_LAYERS_MOST), fields.whole("last", most=_LAYERS_MOST)
    if last < first:
        raise MalformedMessage("stage: it ends before it begins")
    return Stage(
        node=fields.node("node"),
        first=first,
        last=last,
        weight_bytes=fields.whole("weight_bytes"),
        need_bytes=fields.whole("need_bytes"),
        share=fields.number("share", most=1.0),
    )


def settings_to_document(settings: MeshSettings) -> Document:
    document: Document = {
        "version": settings.version,
        "model": clean(settings.model, NAME_CHARS),
        "fingerprint": clean(settings.fingerprint, NAME_CHARS),
        "alias": clean(settings.alias, NAME_CHARS),
        "context": settings.context,
        "slots": settings.slots,
        "cache_type_k": clean(settings.cache_type_k, NAME_CHARS),
        "cache_type_v": clean(settings.cache_type_v, NAME_CHARS),
        "split": settings.split,
    }
    if settings.tensor_split is not None:
        document["tensor_split"] = list(settings.tensor_split[:_SHARES_LIMIT])
    if settings.layers is not None:
        document["layers"] = [
            [clean(name, NAME_CHARS), first, last] for name, first, last in settings.layers[:_SHARES_LIMIT]
        ]
    if settings.digest:
        document["digest"] = settings.digest
    if settings.refined:
        document["refined"] = settings.refined
    if not settings.guess:
        document["guess"] = False
    if settings.draft is not None:
        document["draft"] = _draft_to_document(settings.draft)
        document["draft_max"] = settings.draft_max
    return document


def settings_from_document(document: object) -> MeshSettings:
    fields = Fields(document, "settings")
    return MeshSettings(
        version=fields.whole("version"),
        model=fields.text("model", NAME_CHARS),
        fingerprint=Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        alias=fields.text("alias", NAME_CHARS),
        digest=fields.digest("digest") if fields.has("digest") else "",
        refined=fields.whole("refined", default=0),
        context=fields.whole("context", most=_TOKENS_MOST) if fields.has("context") else None,
        slots=fields.whole("slots", most=_SLOTS_MOST),
        cache_type_k=fields.text("cache_type_k", NAME_CHARS),
        cache_type_v=fields.text("cache_type_v", NAME_CHARS),
        split=fields.flag("split"),
        tensor_split=_shares(fields),
        layers=fields.items("layers", _SHARES_LIMIT, _layers) if fields.has("layers") else None,
        guess=fields.flag("guess") if fields.has("guess") else True,
        draft=_draft_from_document(fields.get("draft")) if fields.has("draft") else None,
        draft_max=fields.whole("draft_max", most=GUESS_TEXT_MAX) if fields.has("draft_max") else DRAFT_MAX,
    )


def _draft_to_document(draft: Draft) -> Document:
    return {
        "name": clean(draft.name, NAME_CHARS),
        "fingerprint": clean(draft.fingerprint, NAME_CHARS),
        "weight_bytes": draft.weight_bytes,
        "cache_bytes": draft.cache_bytes,
        "compute_bytes": draft.compute_bytes,
    }


def _draft_from_document(document: object) -> Draft:
    fields = Fields(document, "draft")
    return Draft(
        name=fields.text("name", NAME_CHARS),
        fingerprint=Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        weight_bytes=fields.whole("weight_bytes"),
        cache_bytes=fields.whole("cache_bytes"),
        compute_bytes=fields.whole("compute_bytes"),
    )


def _shares(fields: Fields) -> tuple[float, ...] | None:
    return fields.items("tensor_split", _SHARES_LIMIT, _share) if fields.has("tensor_split") else None


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not is_number(value, _RATE_MOST):
        raise MalformedMessage("settings.tensor_split: not a share")
    return float(value)


def _layers(value: object) -> tuple[str, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise MalformedMessage("settings.layers: not a name and two numbers")
    fields = Fields(dict(zip(("name", "first", "last"), value, strict=True)), "settings.layers")
    first, last = fields.whole("first", most=_LAYERS_MOST), fields.whole("last", most=_LAYERS_MOST)
    if last < first:
        raise MalformedMessage("settings.layers: they end before they begin")
    return fields.text("name", NAME_CHARS), first, last
