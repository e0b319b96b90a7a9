"""Plans as JSON documents."""

from __future__ import annotations

from dataclasses import asdict

from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import is_number
from mesh_llm.membership.document_shapes import (
    FLAG,
    NODE,
    Document,
    Shape,
    inner,
    items,
    maybe,
    number,
    text,
    whole,
    word,
)
from mesh_llm.sanitise import SENTENCE_CHARS
from mesh_llm.types import Exclusion, Mode, Plan, Prediction, Stage

_STAGE_LIMIT = 64
_EXCLUDED_LIMIT = 128
_LAYERS_MOST = 1 << 16
_TOKENS_MOST = 1 << 40
_SLOTS_MOST = 1 << 16
_RATE_MOST = 1e9


def plan_to_document(plan: Plan) -> Document:
    return _PLAN.write(plan)


def plan_from_document(document: object) -> Plan:
    plan = _PLAN.read(document)
    if len({stage.node for stage in plan.stages}) != len(plan.stages):
        raise MalformedMessage("plan.stages: a node has two of them")
    return plan


def _stage_from_document(document: object) -> Stage:
    stage = _STAGE.read(document)
    if stage.last < stage.first:
        raise MalformedMessage("stage: it ends before it begins")
    return stage


def _predicted(predicted: Prediction) -> Document | None:
    """Nothing where it could not be read."""
    readable = all(is_number(each, _RATE_MOST) for each in asdict(predicted).values())
    return _PREDICTION.write(predicted) if readable else None


_RATE = number(_RATE_MOST)
_SENTENCE = text(SENTENCE_CHARS)
_LAYER = whole(_LAYERS_MOST)
_PREDICTION = Shape(Prediction, "predicted", tok_s=_RATE, first_token_s=_RATE, prompt_tok_s=_RATE)
_EXCLUSION = Shape(Exclusion, "excluded", node=NODE, reason=_SENTENCE)
_STAGE = Shape(
    Stage,
    "stage",
    node=NODE,
    first=_LAYER,
    last=_LAYER,
    weight_bytes=whole(),
    need_bytes=whole(),
    share=number(1.0),
)
_PLAN = Shape(
    Plan,
    "plan",
    mode=word(Mode),
    host=maybe(NODE),
    stages=items(_STAGE_LIMIT, _stage_from_document, _STAGE.write),
    context=whole(_TOKENS_MOST),
    slots=whole(_SLOTS_MOST),
    head_on_worker=FLAG,
    need_bytes=whole(),
    have_bytes=whole(),
    predicted=maybe(inner(_PREDICTION.read, _predicted)),
    excluded=items(_EXCLUDED_LIMIT, _EXCLUSION.read, _EXCLUSION.write),
    reason=_SENTENCE,
)
