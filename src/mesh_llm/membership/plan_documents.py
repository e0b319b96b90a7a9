"""Plans as JSON documents."""

from __future__ import annotations

from dataclasses import asdict

from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields, is_number
from mesh_llm.sanitise import SENTENCE_CHARS, clean
from mesh_llm.types import Exclusion, Mode, Plan, Prediction, Stage

Document = dict[str, object]

_STAGE_LIMIT = 64
_EXCLUDED_LIMIT = 128
_LAYERS_MOST = 1 << 16
_TOKENS_MOST = 1 << 40
_SLOTS_MOST = 1 << 16
_RATE_MOST = 1e9


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
            {"node": one.node, "reason": clean(one.reason, SENTENCE_CHARS)}
            for one in plan.excluded[:_EXCLUDED_LIMIT]
        ],
        "reason": clean(plan.reason, SENTENCE_CHARS),
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
        reason=fields.text("reason", SENTENCE_CHARS),
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
    return Exclusion(node=fields.node("node"), reason=fields.text("reason", SENTENCE_CHARS))


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
