"""Facts of a node as JSON documents.

Whatever is written can be read: texts are cut and cleaned, lists are shortened and the whole is
kept below MEMBER_FACTS_BYTES, so that a node with a thousand model files is still a member. What is
read is checked in full. Fields with their default value are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields, is_direct, node_id
from mesh_llm.membership.plan_documents import Document, plan_from_document, plan_to_document
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.sanitise import NAME_CHARS, clean
from mesh_llm.types import (
    Address,
    Device,
    DeviceKind,
    Fingerprint,
    HeldModel,
    HeldPart,
    HostingMode,
    LinkFacts,
    LinkKind,
    NodeFacts,
    NodeId,
    Role,
    ServingPlan,
    Speed,
    State,
)

MEMBER_FACTS_BYTES = 40 << 10
"""Of one node's facts as JSON: a plan over a hundred nodes fits, and the rest of a message, too."""


__all__ = [
    "address_from_document",
    "address_to_document",
    "facts_from_document",
    "facts_to_document",
    "plan_from_document",
    "plan_to_document",
    "settings_from_document",
    "settings_to_document",
]

T = TypeVar("T")

_DIRECT_LIMIT = 16
_DIRECT_CHARS = 80
_RELAY_CHARS = 256
_VERSION_CHARS = 64
_REASON_CHARS = 400
_GPU_LIMIT = 16
_MODEL_LIMIT = 64
_LINK_LIMIT = 64
_SPAN_LIMIT = 64
_LAYER_MOST = 10_000
_RATE_MOST = 1e18
_RTT_MOST_S = 3600.0


def facts_to_document(facts: NodeFacts) -> Document:
    document: Document = {
        "name": clean(facts.name, NAME_CHARS),
        "role": facts.role.value,
        "version": clean(facts.version, _VERSION_CHARS),
        **_plain(facts),
        **_things(facts),
    }
    return _shortened(document)


def _plain(facts: NodeFacts) -> Document:
    """What differs from the default, of the fields that are their own document."""
    values: Document = {
        "engine": clean(facts.engine, _VERSION_CHARS),
        "splits": facts.splits,
        "plain_lan": facts.plain_lan,
        "machine": clean(facts.machine, NAME_CHARS),
        "memory_bytes": facts.memory_bytes,
        "machine_memory_bytes": facts.machine_memory_bytes,
        "max_memory_bytes": facts.max_memory_bytes,
        "cores": facts.cores,
        "gpu_layers": facts.gpu_layers,
        "hosting": facts.hosting.value,
        "state": facts.state.value,
        "reason": clean(facts.reason, _REASON_CHARS),
        "lent_bytes": facts.lent_bytes,
        "resting": facts.resting,
    }
    usual = {**dict.fromkeys(values, 0), "engine": "", "splits": True, "machine": "", "reason": ""}
    usual |= {"hosting": HostingMode.AUTO, "state": State.STARTING, "max_memory_bytes": None}
    usual |= {"gpu_layers": None}
    return {name: value for name, value in values.items() if value != usual[name]}


def _things(facts: NodeFacts) -> Document:
    speed, serving = facts.speed, facts.serving
    things: Document = {
        "address": address_to_document(facts.address),
        "gpus": [_device_to_document(gpu) for gpu in facts.gpus[:_GPU_LIMIT]],
        "models": [_model_to_document(model) for model in facts.models[:_MODEL_LIMIT]],
        "part": facts.part and _part_to_document(facts.part),
        "links": [_link_to_document(link) for link in facts.links[:_LINK_LIMIT]],
        "speed": speed
        and {
            "read": speed.read_bytes_per_s,
            "flops": speed.flops_per_s,
            "attention": speed.attention_per_s,
        },
        "serving": serving
        and {
            "epoch": serving.epoch,
            "plan": plan_to_document(serving.plan),
            "settings_version": serving.settings_version,
        },
    }
    return {name: thing for name, thing in things.items() if thing}


def _shortened(document: Document) -> Document:
    """Halve the longest list until all of it may be told."""
    while len(json.dumps(document, separators=(",", ":"))) > MEMBER_FACTS_BYTES:
        lists = [(document, name) for name in ("gpus", "models", "links")]
        serving: Any = document.get("serving")
        lists += [(serving["plan"], "excluded")] if serving else []
        found = [(owner, name) for owner, name in lists if owner.get(name)]
        if not found:
            document.pop("serving", None)
            break
        owner, name = max(found, key=lambda place: len(json.dumps(place[0][place[1]])))
        items: Any = owner[name]
        owner[name] = items[: len(items) // 2]
    return document


def facts_from_document(document: object) -> NodeFacts:
    fields = Fields(document, "facts")
    facts = NodeFacts(
        name=fields.text("name", NAME_CHARS),
        role=fields.word("role", Role),
        version=fields.text("version", _VERSION_CHARS),
        engine=fields.text("engine", _VERSION_CHARS, ""),
        splits=fields.flag("splits", True),
        plain_lan=fields.flag("plain_lan", False),
        address=_maybe(fields, "address", address_from_document) or Address(),
        machine=fields.text("machine", NAME_CHARS, ""),
        memory_bytes=fields.whole("memory_bytes", default=0),
        machine_memory_bytes=fields.whole("machine_memory_bytes", default=0),
        max_memory_bytes=fields.whole("max_memory_bytes") if fields.has("max_memory_bytes") else None,
        gpus=fields.items("gpus", _GPU_LIMIT, _device_from_document),
        gpu_layers=fields.whole("gpu_layers", most=1 << 16) if fields.has("gpu_layers") else None,
        hosting=fields.word("hosting", HostingMode, HostingMode.AUTO),
        speed=_maybe(fields, "speed", _speed_from_document),
        cores=fields.whole("cores", default=0, most=1 << 16),
        models=fields.items("models", _MODEL_LIMIT, _model_from_document),
        part=_maybe(fields, "part", _part_from_document),
        links=fields.items("links", _LINK_LIMIT, _link_from_document),
        state=fields.word("state", State, State.STARTING),
        reason=fields.text("reason", _REASON_CHARS, ""),
        lent_bytes=fields.whole("lent_bytes", default=0),
        resting=fields.flag("resting", False),
        serving=_maybe(fields, "serving", _serving_from_document),
    )
    return facts


def _maybe(fields: Fields, name: str, read: Callable[[object], T]) -> T | None:
    return read(fields.get(name)) if fields.has(name) else None


def address_to_document(address: Address) -> Document:
    direct = [place for place in address.direct if is_direct(place) and len(place) <= _DIRECT_CHARS]
    document: Document = {"direct": direct[:_DIRECT_LIMIT]} if direct else {}
    return document if address.relay is None else {**document, "relay": address.relay}


def address_from_document(document: object) -> Address:
    fields = Fields(document, "address")
    relay = fields.text("relay", _RELAY_CHARS) if fields.has("relay") else None
    if relay is not None and not relay.startswith(("http://", "https://")):
        raise MalformedMessage("address.relay: not the address of a relay")
    return Address(direct=fields.items("direct", _DIRECT_LIMIT, _direct), relay=relay)


def _direct(value: object) -> str:
    if not isinstance(value, str) or len(value) > _DIRECT_CHARS or not is_direct(value):
        raise MalformedMessage("address.direct: not IP:PORT")
    return value


def _device_to_document(device: Device) -> Document:
    return {
        "name": clean(device.name, NAME_CHARS),
        "description": clean(device.description, NAME_CHARS),
        "kind": device.kind.value,
        "free_bytes": device.free_bytes,
        "total_bytes": device.total_bytes,
    }


def _device_from_document(document: object) -> Device:
    fields = Fields(document, "gpu")
    return Device(
        name=fields.text("name", NAME_CHARS),
        description=fields.text("description", NAME_CHARS),
        kind=fields.word("kind", DeviceKind),
        free_bytes=fields.whole("free_bytes"),
        total_bytes=fields.whole("total_bytes"),
    )


def _model_to_document(model: HeldModel) -> Document:
    return {
        "fingerprint": clean(model.fingerprint, NAME_CHARS),
        "name": clean(model.name, NAME_CHARS),
        "size_bytes": model.size_bytes,
    }


def _model_from_document(document: object) -> HeldModel:
    fields = Fields(document, "model")
    return HeldModel(
        fingerprint=Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        name=fields.text("name", NAME_CHARS),
        size_bytes=fields.whole("size_bytes"),
    )


def _part_to_document(part: HeldPart) -> Document:
    return {
        "fingerprint": clean(part.fingerprint, NAME_CHARS),
        "spans": [list(span) for span in part.spans[:_SPAN_LIMIT]],
    }


def _part_from_document(document: object) -> HeldPart:
    fields = Fields(document, "part")
    return HeldPart(
        fingerprint=Fingerprint(fields.text("fingerprint", NAME_CHARS)),
        spans=fields.items("spans", _SPAN_LIMIT, _span),
    )


def _span(value: object) -> tuple[int, int]:
    match value:
        case [int(first), int(last)] if 0 <= first < last <= _LAYER_MOST:
            return int(first), int(last)
    raise MalformedMessage("part.spans: not layers")


def _link_to_document(link: tuple[NodeId, LinkFacts]) -> Document:
    node, facts = link
    return {"node": node, "kind": facts.kind.value, "rtt_s": facts.rtt_s}


def _link_from_document(document: object) -> tuple[NodeId, LinkFacts]:
    fields = Fields(document, "link")
    return node_id(fields.get("node"), "link.node"), LinkFacts(
        kind=fields.word("kind", LinkKind),
        rtt_s=fields.number("rtt_s", most=_RTT_MOST_S),
    )


def _speed_from_document(document: object) -> Speed:
    fields = Fields(document, "speed")
    return Speed(
        read_bytes_per_s=fields.number("read", most=_RATE_MOST),
        flops_per_s=fields.number("flops", most=_RATE_MOST),
        attention_per_s=fields.number("attention", most=_RATE_MOST),
    )


def _serving_from_document(document: object) -> ServingPlan:
    fields = Fields(document, "serving")
    return ServingPlan(
        epoch=fields.whole("epoch"),
        plan=plan_from_document(fields.get("plan")),
        settings_version=fields.whole("settings_version"),
    )
