"""The status document: every field of `mesh-llm status --json`, and the one parser for it.

`report.status` fills it in. What a host tells of its model, plan and engine (`ServingStatus`) reaches other
nodes as JSON. It may be anybody's: `from_document` makes nothing of what is missing or makes no sense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from mesh_llm.frozen import frozen
from mesh_llm.membership.checked_fields import WHOLE_LIMIT, is_number
from mesh_llm.mesh_settings import ADAPTERS_LIMIT, LANES_LIMIT, MODELS_LIMIT, PRIORITY_LIMIT, REPLICAS_LIMIT
from mesh_llm.sanitise import NAME_CHARS, SENTENCE_CHARS, clean

T = TypeVar("T")

_FIGURE_MOST = 1e18
_STAGES = 64
_BUFFERS = 16
_KEYS = 256

# The number is the most that is taken from another node: characters, entries, or a value; or its range.
Name = Annotated[str, NAME_CHARS]
Sentence = Annotated[str, SENTENCE_CHARS]
Layer = Annotated[int, 10_000]
Rank = Annotated[int, range(-PRIORITY_LIMIT, PRIORITY_LIMIT + 1)]


@frozen
class Traffic:
    sent_bytes: int = 0
    received_bytes: int = 0
    bytes_per_s: int = 0
    peak_bytes_per_s: int = 0


# -- what a host tells of its plan ----------------------------------------------------------------


@frozen
class DraftStatus:
    name: Name | None
    """The draft model, or the model's own MTP head; None where only the text before guesses."""
    depth: float
    drafted: int
    accepted: int
    text_drafted: int
    text_accepted: int
    gain: float | None
    off: Sentence | None
    """Why the draft model is not used with this plan."""


@frozen
class ModelStatus:
    name: Name
    fingerprint: Name
    size_bytes: int
    layers: Layer
    quantisation: Name
    context: int | None
    slots: int | None
    draft: DraftStatus | None
    adapters: Annotated[tuple[Name, ...], ADAPTERS_LIMIT] = ()
    """Names of LoRA adapters, in the order of their ids."""


@frozen
class ReplicaStatus:
    """One of the plans by which a model runs."""

    host: Name
    mode: Name
    nodes: Annotated[tuple[Name, ...], _STAGES]
    crowded: bool
    """Requests wait there, or did a while ago."""
    lanes: int = 1
    """Engines that run the plan at the same time."""


@frozen
class ServedModelStatus:
    """One of the models that the mesh serves."""

    name: Name
    fingerprint: Name
    default: bool
    state: Name
    reason: Sentence
    host: Name | None
    """Who serves it, by id."""
    mode: Name | None
    context: int | None
    slots: int | None
    nodes: Annotated[tuple[Name, ...], _STAGES] = ()
    """That compute it, by id."""
    replicas: Annotated[tuple[ReplicaStatus, ...], REPLICAS_LIMIT] = ()
    """All plans by which it runs; host, mode and nodes above are of the first."""
    replicas_wanted: int = 1
    replicas_least: int = 1
    replicas_most: int = 1
    """As owners have set them."""
    on_demand: bool = False
    """It is loaded when somebody asks for it."""
    priority: Rank = 0
    """The highest has memory where the models do not all fit."""
    draft: DraftStatus | None = None
    adapters: Annotated[tuple[Name, ...], ADAPTERS_LIMIT] = ()
    """Names of LoRA adapters, in the order of their ids."""


@frozen
class PlanStageStatus:
    node: Name
    first: Layer
    last: Layer
    weight_bytes: int
    need_bytes: int
    share: float
    device: Name | None = None
    """Where a worker lends several; else it is the one that it lends, or all that the host has."""


@frozen
class ExcludedStatus:
    node: Name
    reason: Sentence


@frozen
class PlanStatus:
    epoch: int | None
    mode: Name
    host: Name | None
    need_bytes: int
    have_bytes: int
    predicted_tok_s: float
    predicted_first_token_s: float | None
    predicted_prompt_tok_s: float | None
    head_on_worker: bool
    stages: Annotated[tuple[PlanStageStatus, ...], _STAGES]
    excluded: Annotated[tuple[ExcludedStatus, ...], 2 * _STAGES]
    reason: Sentence
    predicted_tok_s_low: float | None = None
    predicted_tok_s_high: float | None = None
    """Between these it is most likely; None where nobody has said."""
    predicted_first_token_low_s: float | None = None
    predicted_first_token_high_s: float | None = None
    predicted_from: Name | None = None
    """`this plan`, where it has run here before; `the model's types`, or those of `a usual model`."""
    lanes: int = 1
    """Engines that run it at the same time."""
    lanes_reason: Sentence = ""
    """Why there are no more of them, where more were wanted."""


@frozen
class EngineStageStatus:
    """Per token, as long as one question at a time is answered."""

    node: Name
    link: Name | None
    pushes: bool
    compute_ms: float
    wait_ms: float
    bytes_per_token: int
    traffic: Traffic
    pushed: Traffic
    device: Name | None = None


@frozen
class TokenPartStatus:
    kind: Name
    node: Name | None
    ms: float


@frozen
class TokenStatus:
    """Where the time of a token goes."""

    total_ms: float
    parts: Annotated[tuple[TokenPartStatus, ...], 3 * _STAGES]
    sentence: Sentence


@frozen
class LaneStatus:
    """One engine of the plan."""

    number: int
    state: Name
    pid: int | None
    requests: int
    """That it answers now."""
    ends: bool
    """It takes no more of them."""


@frozen
class EngineStatus:
    state: Name
    reason: Sentence
    pid: int | None
    restarts: int
    ready_s: float
    buffers: dict[Name, int]
    weights_sent_bytes: int
    weights_resident_bytes: int
    decode_tok_s: float
    prompt_tok_s: float
    stages: Annotated[tuple[EngineStageStatus, ...], _STAGES]
    token: TokenStatus | None
    warnings: Annotated[tuple[Sentence, ...], _STAGES] = ()
    """What works, and costs more than it should."""
    lanes: Annotated[tuple[LaneStatus, ...], 2 * LANES_LIMIT] = ()
    """All engines of the plan; the figures above are of the first, or of all together."""


@frozen
class ServingStatus:
    model: ModelStatus | None
    plan: PlanStatus | None
    engine: EngineStatus


@frozen
class LoadStatus:
    """What gateways elsewhere choose by."""

    taken: int = 0
    waiting: int = 0
    turn_s: float = 0.0
    read: Name = ""
    """Of the beginnings of a prompt that were asked about, the longest that the engine has read."""


# -- what every node tells of itself and its mesh -------------------------------------------------


@frozen
class NodeStatus:
    id: str
    name: str
    role: str
    state: str
    reason: Sentence
    resting: bool
    paused: Sentence = ""
    """Why it lends nothing for now; empty: it lends, or its model was unloaded."""
    lend: str = "always"
    """When it lends, as --lend says."""


@frozen
class SpeedStatus:
    read_gb_s: float
    gflops: float
    attention_gflops: float


@frozen
class LinkStatus:
    kind: str
    rtt_ms: float | None
    via: tuple[str, ...]
    remote: str | None
    sent_bytes: int
    received_bytes: int
    bytes_per_s: int
    peak_bytes_per_s: int


@frozen
class MemberStatus:
    id: str
    name: str
    role: str
    owner: bool
    state: str
    reason: Sentence
    resting: bool
    version: str
    standing: str
    memory_bytes: int
    lent_bytes: int
    devices: tuple[str, ...]
    models: tuple[str, ...]
    lacks: tuple[str, ...]
    """Files that go with the model and are not there: without the projector it would host without images,
    without an adapter it has no part."""
    speed: SpeedStatus | None
    link: LinkStatus
    paused: Sentence = ""


@frozen
class MeshStatus:
    id: str
    nodes: tuple[MemberStatus, ...]


@frozen
class FirstTokenStatus:
    measured_s: float | None
    prompt_tokens: int | None
    predicted_s: float | None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None


@frozen
class KeyStatus:
    """An API key by its name, and what was asked with it. A day is one of UTC."""

    name: Name
    manage: bool
    guest: bool
    """Made by `mesh-llm share`."""
    expires: float | None
    expired: bool
    requests_per_day: int | None
    tokens_per_day: int | None
    requests_today: int
    prompt_tokens_today: int
    completion_tokens_today: int
    requests: int
    prompt_tokens: int
    completion_tokens: int


@frozen
class ApiStatus:
    url: str | None
    key_needed: bool
    first_token: FirstTokenStatus
    keys: Annotated[tuple[KeyStatus, ...], _KEYS] = ()
    shared_url: str | None = None
    """Where guests on the local network find it."""


@frozen
class ConsoleStatus:
    url: str | None


@frozen
class Status:
    version: str
    node: NodeStatus
    mesh: MeshStatus
    model: ModelStatus | None
    """The default one; plan and engine are its, too."""
    plan: PlanStatus | None
    engine: EngineStatus
    api: ApiStatus
    console: ConsoleStatus
    models: Annotated[tuple[ServedModelStatus, ...], MODELS_LIMIT] = ()
    """All that are served, the default one first."""


# -- as JSON --------------------------------------------------------------------------------------


def to_document(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: to_document(getattr(value, field.name)) for field in fields(value)}
    return [to_document(each) for each in value] if isinstance(value, tuple) else value


def from_document(kind: type[T], document: object) -> T:
    """Checked, whoever wrote it."""
    read: Callable[[object], T] = _reader(kind)  # type: ignore[arg-type]
    return read(document)


@cache
def _reader(kind: Any) -> Callable[[object], Any]:
    limit = None
    if get_origin(kind) is Annotated:
        kind, limit = get_args(kind)
    if is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, UnionType) or NoneType in get_args(kind):
        (known,) = (each for each in get_args(kind) if each is not NoneType)
        return lambda value: None if value is None else _reader(known)(value)
    if get_origin(kind) is tuple:
        return _list(_reader(get_args(kind)[0]), limit)
    if get_origin(kind) is dict:
        return _table(*map(_reader, get_args(kind)))
    return _PLAIN[kind](limit)


def _record(kind: Any) -> Callable[[object], Any]:
    readers = {name: _reader(each) for name, each in get_type_hints(kind, include_extras=True).items()}

    def read(value: object) -> Any:
        known = value if isinstance(value, Mapping) else {}
        return kind(**{name: each(known.get(name)) for name, each in readers.items()})

    return read


def _list(read: Callable[[object], Any], limit: int | None) -> Callable[[object], Any]:
    return lambda value: tuple(map(read, value[:limit])) if isinstance(value, list) else ()


def _table(key: Callable[[object], Any], read: Callable[[object], Any]) -> Callable[[object], Any]:
    def table(value: object) -> dict[Any, Any]:
        known = list(value.items())[:_BUFFERS] if isinstance(value, Mapping) else []
        return {key(name): read(each) for name, each in known}

    return table


def _text(limit: int | None) -> Callable[[object], str]:
    return lambda value: clean(value, limit or NAME_CHARS) if isinstance(value, str) else ""


def _whole(limit: int | range | None) -> Callable[[object], int]:
    if isinstance(limit, range):
        return lambda value: value if type(value) is int and value in limit else 0
    return lambda value: value if isinstance(value, int) and is_number(value, limit or WHOLE_LIMIT) else 0


def _figure(_: None) -> Callable[[object], Any]:
    return lambda value: value if is_number(value, _FIGURE_MOST) else 0


def _flag(_: None) -> Callable[[object], bool]:
    return lambda value: value is True


_PLAIN: dict[type, Callable[[Any], Callable[[object], Any]]] = {
    str: _text,
    int: _whole,
    float: _figure,
    bool: _flag,
}
