"""Plans as JSON documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields, is_number
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
from mesh_llm.sanitise import NAME_CHARS, SENTENCE_CHARS
from mesh_llm.types import Exclusion, Mode, NodeId, Plan, Prediction, Stage

_STAGE_LIMIT = 64
_EXCLUDED_LIMIT = 128
_LAYERS_MOST = 1 << 16
_TOKENS_MOST = 1 << 40
_SLOTS_MOST = 1 << 16
_LANES_MOST = 1 << 8
_RATE_MOST = 1e9


def plan_to_document(plan: Plan) -> Document:
    """Nodes of older versions know one stage of each node: what lies on several devices is told twice."""
    document = _PLAN.write(plan)
    if plan.lanes == 1:
        del document["lanes"]
    if not plan.moved:
        del document["moved"]
    joined = _joined(plan.stages)
    if len(joined) == len(plan.stages):
        return document
    whole = [_STAGE.write(stage) for stage in joined]
    return {**document, "stages": whole[:_STAGE_LIMIT], "devices": document["stages"]}


def plan_from_document(document: object) -> Plan:
    plan = _PLAN.read(document)
    if len({stage.node for stage in plan.stages}) != len(plan.stages):
        raise MalformedMessage("plan.stages: a node has two of them")
    fields = Fields(document, "plan")
    if not fields.has("devices"):
        return plan
    stages = fields.items("devices", _STAGE_LIMIT, _stage_from_document)
    if len({stage.place for stage in stages}) != len(stages):
        raise MalformedMessage("plan.devices: a device has two stages")
    return replace(plan, stages=stages)


def _joined(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """One for each node."""
    found: dict[NodeId, Stage] = {}
    for stage in stages:
        if (before := found.get(stage.node)) is not None:
            stage = replace(
                stage,
                first=before.first,
                weight_bytes=before.weight_bytes + stage.weight_bytes,
                need_bytes=before.need_bytes + stage.need_bytes,
                share=min(1.0, before.share + stage.share),
                device="",
                main_bytes=None,
            )
        found[stage.node] = stage
    return tuple(found.values())


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
_SHARE = number(1.0)
_PREDICTION = Shape(
    Prediction,
    "predicted",
    tok_s=_RATE,
    first_token_s=_RATE,
    prompt_tok_s=_RATE,
    tok_s_within=_SHARE,
    first_token_within=_SHARE,
)
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
    device=text(NAME_CHARS),
    main_bytes=maybe(whole()),
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
    lanes=whole(_LANES_MOST),
    moved=_SENTENCE,
)
