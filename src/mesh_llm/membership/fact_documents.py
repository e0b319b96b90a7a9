"""Facts of a node as JSON documents.

The whole is kept below MEMBER_FACTS_BYTES, so that a node with a thousand model files is still a member.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mesh_llm.defaults import KERNELS_LIMIT
from mesh_llm.errors import MalformedMessage
from mesh_llm.membership.checked_fields import Fields, is_direct, is_number, node_id
from mesh_llm.membership.document_shapes import FLAG, Document, Shape, inner, items, number, text, whole, word
from mesh_llm.membership.plan_documents import plan_from_document, plan_to_document
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import MODELS_LIMIT, REPLICAS_LIMIT
from mesh_llm.sanitise import NAME_CHARS, clean
from mesh_llm.types import (
    Address,
    Demand,
    Device,
    DeviceKind,
    Fingerprint,
    HeldModel,
    HeldPart,
    HostingMode,
    Kernel,
    KernelSpeed,
    LentDevice,
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

_DIRECT_LIMIT = 16
_DIRECT_CHARS = 80
_RELAY_CHARS = 256
_VERSION_CHARS = 64
_REASON_CHARS = 400
_GPU_LIMIT = 16
_DEVICE_LIMIT = 16
_MODEL_LIMIT = 64
_LINK_LIMIT = 64
_SPAN_LIMIT = 64
_LAYER_MOST = 10_000
_RATE_MOST = 1e18
_KIND_CHARS = 16
_KERNEL_MOST = 1 << 24
_RTT_MOST_S = 3600.0


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


def _span(value: object) -> tuple[int, int]:
    match value:
        case [int(first), int(last)] if 0 <= first < last <= _LAYER_MOST:
            return int(first), int(last)
    raise MalformedMessage("part.spans: not layers")


def _epoch(value: object) -> int:
    return Fields({"epoch": value}, "crowded").whole("epoch")


def _fingerprint(value: object) -> Fingerprint:
    return Fingerprint(Fields({"fingerprint": value}, "failing").text("fingerprint", NAME_CHARS))


def _link_to_document(link: tuple[NodeId, LinkFacts]) -> Document:
    node, facts = link
    return {"node": node, "kind": facts.kind.value, "rtt_s": facts.rtt_s}


def _link_from_document(document: object) -> tuple[NodeId, LinkFacts]:
    fields = Fields(document, "link")
    return node_id(fields.get("node"), "link.node"), LinkFacts(
        kind=fields.word("kind", LinkKind),
        rtt_s=fields.number("rtt_s", most=_RTT_MOST_S),
    )


_NAME = text(NAME_CHARS)
_VERSION = text(_VERSION_CHARS)
_DEVICE = Shape(
    Device,
    "gpu",
    terse=True,
    name=_NAME,
    description=_NAME,
    kind=word(DeviceKind),
    free_bytes=whole(),
    total_bytes=whole(),
    mps=FLAG,
)
_MODEL = Shape(
    HeldModel, "model", terse=True, fingerprint=_NAME, name=_NAME, size_bytes=whole(), encodes=FLAG
)
_PART = Shape(HeldPart, "part", fingerprint=_NAME, spans=items(_SPAN_LIMIT, _span, list))
_RATE = number(_RATE_MOST)


def _kernel_to_document(speed: KernelSpeed) -> list[object]:
    kernel = speed.kernel
    sizes = (kernel.width, kernel.rows, kernel.experts, kernel.used)
    return [clean(kernel.kind, _KIND_CHARS), *sizes, speed.read_bytes_per_s, speed.flops_per_s]


def _kernel_from_document(value: object) -> KernelSpeed:
    match value:
        case [str(kind), int(width), int(rows), int(experts), int(used), float(read), float(flops)] if (
            kind.isprintable()
            and len(kind) <= _KIND_CHARS
            and all(0 < size <= _KERNEL_MOST for size in (width, rows, experts, used))
            and is_number(read, _RATE_MOST)
            and is_number(flops, _RATE_MOST)
        ):
            kernel = Kernel(kind=kind, width=width, rows=rows, experts=experts, used=used)
            return KernelSpeed(kernel=kernel, read_bytes_per_s=read, flops_per_s=flops)
    raise MalformedMessage("speed.kernels: not the speed of a kernel")


_SPEED = Shape(
    Speed,
    "speed",
    terse=True,
    read_bytes_per_s=_RATE.called("read"),
    flops_per_s=_RATE.called("flops"),
    attention_per_s=_RATE.called("attention"),
    kernels=items(KERNELS_LIMIT, _kernel_from_document, _kernel_to_document),
)
_LENT = Shape(
    LentDevice,
    "device",
    terse=True,
    name=_NAME,
    bytes=whole(),
    layers=whole(most=1 << 16),
    speed=inner(_SPEED.read, _SPEED.write),
    experts_bytes=whole(),
)
_SERVING = Shape(
    ServingPlan,
    "serving",
    terse=True,
    epoch=whole(),
    plan=inner(plan_from_document, plan_to_document),
    settings_version=whole(),
    fingerprint=_NAME,
    replica=whole(most=REPLICAS_LIMIT),
)


_DEMAND = Shape(
    Demand,
    "demand",
    terse=True,
    fingerprint=_NAME,
    wanted=FLAG,
    idle_since=whole(),
    goes_for=_NAME,
    reason=text(_REASON_CHARS),
    hopeless=FLAG,
)


def _short(serving: ServingPlan) -> Document:
    """Without the reasons of those who have no part: its host tells them to whoever asks."""
    return _SERVING.write(replace(serving, plan=replace(serving.plan, excluded=())))


_PLANS = items(MODELS_LIMIT, _SERVING.read, _short)
_FACTS = Shape(
    NodeFacts,
    "facts",
    terse=True,
    name=_NAME,
    role=word(Role),
    version=_VERSION,
    engine=_VERSION,
    splits=FLAG,
    plain_lan=FLAG,
    machine=_NAME,
    memory_bytes=whole(),
    machine_memory_bytes=whole(),
    max_memory_bytes=whole(),
    cores=whole(most=1 << 16),
    cpu_library=_NAME,
    builds=FLAG,
    threads=whole(most=1 << 16),
    machine_threads=whole(most=1 << 16),
    gpu_layers=whole(most=1 << 16),
    cpu_moe=whole(most=1 << 16),
    hosting=word(HostingMode),
    state=word(State),
    reason=text(_REASON_CHARS),
    lent_bytes=whole(),
    resting=FLAG,
    paused=text(_REASON_CHARS),
    address=inner(address_from_document, address_to_document),
    gpus=items(_GPU_LIMIT, _DEVICE.read, _DEVICE.write),
    devices=items(_DEVICE_LIMIT, _LENT.read, _LENT.write),
    models=items(_MODEL_LIMIT, _MODEL.read, _MODEL.write),
    part=inner(_PART.read, _PART.write),
    also_parts=items(MODELS_LIMIT, _PART.read, _PART.write),
    links=items(_LINK_LIMIT, _link_from_document, _link_to_document),
    speed=inner(_SPEED.read, _SPEED.write),
    serving=inner(_SERVING.read, _SERVING.write),
    also_serving=_PLANS,
    replicas=_PLANS,
    crowded=items(MODELS_LIMIT, _epoch, int),
    starting=_PLANS,
    failing=items(MODELS_LIMIT, _fingerprint, str),
    demand=items(MODELS_LIMIT, _DEMAND.read, _DEMAND.write),
)


def facts_to_document(facts: NodeFacts) -> Document:
    return _shortened(_FACTS.write(facts))


def facts_from_document(document: object) -> NodeFacts:
    return _FACTS.read(document)


def _shortened(document: Document) -> Document:
    """Halve the longest list until all of it may be told."""
    while len(json.dumps(document, separators=(",", ":"))) > MEMBER_FACTS_BYTES:
        names = ("gpus", "models", "links", "demand", "starting", "also_serving", "replicas")
        lists = [(document, name) for name in names]
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
