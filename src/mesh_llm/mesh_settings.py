"""The settings of a mesh: every option that holds for all of it is declared here, once.

`MeshOptions` is what a person asks for (`NodeConfig` has them), `MeshSettings` what an owner signs. Those of
`EngineOptions` go to the engine of whoever hosts (`EngineSpec` has them). `membership.settings_documents`
writes and reads settings, `transport.owners_settings` verifies them, `local.own_settings` makes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields, replace
from typing import Any, TypeVar

from mesh_llm.defaults import CACHE_TYPES, CONTEXT_LIMIT, DEFAULT_SLOTS, DRAFT_MAX, REASONING_FORMATS
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.sanitise import NAME_CHARS
from mesh_llm.types import Fingerprint

SLOTS_LIMIT = 256
"""llama.cpp's own limit on sequences."""
LANES_LIMIT = 8
"""Engines of one plan: more would only wait for each other."""
SHARES_LIMIT = 256
"""Nodes that --tensor-split and --layers name."""

ADAPTERS_LIMIT = 16
"""LoRA adapters of one model."""
MODELS_LIMIT = 16
"""That a mesh serves at once."""
IDLE_DEFAULT_S = 600
"""Until a model that is loaded on demand goes, where its owner does not say."""
IDLE_LIMIT_S = 366 * 86400
PRIORITY_LIMIT = 100
"""Either way: more steps than a mesh has models."""
REPLICAS_LIMIT = 16
"""Of one model, each on nodes of its own."""
SCALE_LIMIT = 1000.0
"""Of an adapter: what is more is a mistake."""
SEED_LIMIT = (1 << 32) - 2
"""The engine's are 32 bits wide, and the last one stands for any."""
TEMPLATE_ARGUMENTS_CHARS = 1000
"""Of JSON. Templates know a handful of names, and the settings of all models are one signed text."""

_SPAN = re.compile(r"^(\d{1,5})(?:-(\d{1,5}))?$")

Read = Callable[[Any], Any]
"""Returns a value, checked and frozen; or raises `ValueError`, whose words complete "it is"."""


@frozen
class Option:
    """How an option is called, and what it may be."""

    flag: str
    """On the command line; llama-server's own, too, for one of `EngineOptions`."""
    read: Read
    """From settings that anybody may have written. These bounds belong to the protocol: a node that knows
    narrower ones than its neighbour would take its settings for forged."""
    check: Read
    """What a person may ask for."""
    parameter: str = ""
    """What the bundled engine calls it; `part.name` where it is in a part of the parameters."""
    parse: Read
    """From the command line."""

    @property
    def argument(self) -> str:
        """What click calls it."""
        return self.flag.removeprefix("--").replace("-", "_")


def _option(
    flag: str, read: Read, parameter: str = "", check: Read | None = None, parse: Read = lambda value: value
) -> Any:
    option = Option(flag=flag, read=read, check=check or read, parameter=parameter, parse=parse)
    return field(default=None, metadata={"option": option})


# -- what options may be ---------------------------------------------------------------------------


def _whole(least: int, most: int) -> Read:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"not between {least} and {most:,}")
        return value

    return read


def _number(least: float, most: float) -> Read:
    def read(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"not between {least:g} and {most:g}")
        return float(value)

    return read


def _cache_type(value: object) -> str:
    if value not in CACHE_TYPES:
        raise ValueError(f"not one of {', '.join(CACHE_TYPES)}")
    return str(value)


def _reasoning_format(value: object) -> str:
    if value not in REASONING_FORMATS:
        raise ValueError(f"not one of {', '.join(REASONING_FORMATS)}")
    return str(value)


def _template_arguments(value: object) -> str:
    """JSON that Python and the engine read alike: an object, printable, with numbers of an ordinary size."""
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise ValueError("not a JSON object in printable ASCII")
    if len(value) > TEMPLATE_ARGUMENTS_CHARS:
        raise ValueError(f"longer than {TEMPLATE_ARGUMENTS_CHARS:,} characters of JSON")
    try:
        arguments = json.loads(value, parse_int=float)
        # What is half of a character, not a number or beyond all of them ends the engine's reader.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError('not a JSON object, as in {"enable_thinking": false}')
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > NAME_CHARS or not value.isprintable():
        raise ValueError(f"not a printable text of at most {NAME_CHARS} characters")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not true or false")
    return value


def _list_of(read: Read) -> Read:
    def read_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) > SHARES_LIMIT:
            raise ValueError(f"not a list of at most {SHARES_LIMIT}")
        return tuple(map(read, value))

    return read_all


def _share(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9:
        raise ValueError("not a list of shares")
    return float(value)


def _span(value: object) -> tuple[str, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError("not a list of names, each with two numbers")
    first, last = map(_whole(0, 1 << 16), value[1:])
    if last < first:
        raise ValueError("not a list of layers that end after they begin")
    return _name(value[0]), first, last


def _replicas(value: object) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("not two numbers")
    least, most = map(_whole(1, REPLICAS_LIMIT), value)
    if most < least:
        raise ValueError("not a number, and one that is at least as large")
    return least, most


def parse_replicas(text: str) -> tuple[int, int]:
    """`N` or `MIN-MAX` of --replicas."""
    match = _SPAN.match(text)
    try:
        if match is None:
            raise ValueError("not a number, or two as in 1-2")
        return _replicas((int(match[1]), int(match[2] or match[1])))
    except ValueError as error:
        raise UsageError(f"--replicas {text} is {error}") from None


def parse_shares(text: str) -> tuple[float, ...]:
    """`R,R,…` of --tensor-split."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--tensor-split {text}: shares are numbers, as in 3,1 or 0.75,0.25") from None
    if any(not 0 <= share < 1e9 for share in shares) or sum(shares) <= 0:
        raise UsageError(f"--tensor-split {text}: shares must be at least 0, and one of them above 0")
    return shares


def parse_lanes(text: str) -> int:
    """`auto` or `N` of --lanes."""
    if text != "auto" and not text.isdecimal():
        raise UsageError(f"--lanes {text}: auto, or a number")
    return 0 if text == "auto" else int(text)


def parse_template_arguments(text: str) -> str:
    """The JSON of --chat-template-kwargs, as it is signed."""
    try:
        return json.dumps(json.loads(text), separators=(",", ":"))
    except (ValueError, RecursionError):
        return text  # it is refused with all other options


def parse_layers(text: str) -> tuple[tuple[str, int, int], ...]:
    """`NODE=A-B,…` of --layers; B is the last layer, and included."""
    parts = []
    for part in text.split(","):
        name, separator, span = part.rpartition("=")
        match = _SPAN.match(span)
        if not separator or not name or match is None or int(match[1]) > int(match[2] or match[1]):
            raise UsageError(
                f"--layers {part}: give layers by node name", hint="for example desk=0-14,laptop=15-29"
            )
        parts.append((name, int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(parts)


# -- the options -----------------------------------------------------------------------------------


@frozen
class EngineOptions:
    """Those that every host's engine is started with; None is the engine's own default."""

    cache_type_k: str | None = _option("--cache-type-k", _name, "cache_type_k", _cache_type)
    cache_type_v: str | None = _option("--cache-type-v", _name, "cache_type_v", _cache_type)
    predict: int | None = _option("--predict", _whole(1, CONTEXT_LIMIT), "n_predict")
    """Tokens of an answer, at most, where its request sets no limit."""
    temp: float | None = _option("--temp", _number(0, 100), "sampling.temp")
    """How tokens are chosen where a request does not say. None: as the model's file says."""
    top_k: int | None = _option("--top-k", _whole(0, 1 << 24), "sampling.top_k")
    top_p: float | None = _option("--top-p", _number(0, 1), "sampling.top_p")
    min_p: float | None = _option("--min-p", _number(0, 1), "sampling.min_p")
    seed: int | None = _option("--seed", _whole(0, SEED_LIMIT), "sampling.seed")
    """Of requests that bring none; None: each gets one of its own."""
    chat_template_kwargs: str | None = _option(
        "--chat-template-kwargs",
        _template_arguments,
        "default_template_kwargs",
        parse=parse_template_arguments,
    )
    """As JSON: arguments of the chat template, where a request does not bring its own."""
    reasoning_format: str | None = _option("--reasoning-format", _name, "reasoning_format", _reasoning_format)
    """What becomes of the thoughts that stand in an answer."""
    reasoning_budget: int | None = _option(
        "--reasoning-budget", _whole(-1, CONTEXT_LIMIT), "sampling.reasoning_budget_tokens"
    )
    """Tokens of thoughts, at most; -1: as many as the model likes."""


@frozen
class MeshOptions(EngineOptions):
    """All of them; None was not given."""

    context: int | None = _option("--ctx-size", _whole(0, 1 << 40), check=_whole(1, CONTEXT_LIMIT))
    """Tokens per slot; None takes the largest that fits, up to what the model was trained on."""
    slots: int | None = _option("--parallel", _whole(0, 1 << 16), check=_whole(1, SLOTS_LIMIT))
    lanes: int | None = _option("--lanes", _whole(0, 1 << 8), check=_whole(0, LANES_LIMIT), parse=parse_lanes)
    """Engines that run a split plan at the same time; 0 (`auto`): as many as requests ask for; None: one."""
    split: bool | None = _option("--split", _flag)
    tensor_split: tuple[float, ...] | None = _option("--tensor-split", _list_of(_share), parse=parse_shares)
    layers: tuple[tuple[str, int, int], ...] | None = _option("--layers", _list_of(_span), parse=parse_layers)
    """By node name: first layer, and the last, not included."""
    replicas: tuple[int, int] | None = _option("--replicas", _replicas, parse=parse_replicas)
    """How often it runs at least, and at most where requests wait; None: once."""
    priority: int | None = _option("--priority", _whole(-PRIORITY_LIMIT, PRIORITY_LIMIT))
    """Which of several models has memory, where they do not all fit: the highest; None counts as 0."""


ENGINE_OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(EngineOptions)}
MESH_OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(MeshOptions)}


def given_options(options: EngineOptions, among: Mapping[str, Option] = MESH_OPTIONS) -> dict[str, Any]:
    """Their values by name; a flag that is off was not given."""
    values = {name: getattr(options, name) for name in among}
    return {name: value for name, value in values.items() if value is not None and value is not False}


# -- the settings ----------------------------------------------------------------------------------


@frozen
class Draft:
    """A small model that guesses ahead for the mesh's, on the host's own device; and what it takes there."""

    name: str
    """A file's, without its ending: every host looks for it among its own models."""
    fingerprint: Fingerprint
    weight_bytes: int
    cache_bytes: int
    """For each token of the context."""
    compute_bytes: int
    layers: tuple[int, ...] = ()
    """Of an EAGLE3 head: those of the model whose inputs it reads."""


@frozen
class SideFile:
    """A file that goes with the model."""

    name: str
    """Without its ending."""
    size_bytes: int
    digest: str
    """Of all its bytes (peer_fetch.manifest): nodes that lack it fetch exactly this one."""


@frozen
class Adapter:
    """A LoRA adapter: whoever computes with the model reads its own copy."""

    file: SideFile
    scale: float


@frozen
class ModelExtras:
    """What goes with the model."""

    projector: SideFile | None = None
    """Lets the model see; on the host."""
    adapters: tuple[Adapter, ...] = ()


@frozen
class ModelSettings(MeshOptions):
    """How one of the mesh's models is served."""

    model: str
    """As people call it: a catalog's name or a file's."""
    fingerprint: Fingerprint
    alias: str
    """The name under which it is served."""
    digest: str = ""
    """Of all bytes of its files (models.manifest); empty until an owner has read them."""
    # These options are never None here. A new one has to be, where nobody set it: settings are signed.
    slots: int = DEFAULT_SLOTS
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    split: bool = False
    guess: bool = True
    """Whether tokens are guessed ahead, by what stood in the text before or by a draft model."""
    draft: Draft | None = None
    draft_max: int = DRAFT_MAX
    """Tokens that the draft model guesses at once, at most."""
    projector: SideFile | None = None
    """Lets the model see; on the host."""
    adapters: tuple[Adapter, ...] = ()
    on_demand: bool = False
    """It is loaded when somebody asks for it, and goes when nobody does; never so for the default model."""
    idle_s: int = IDLE_DEFAULT_S
    """Without a request, until a model on demand goes."""
    changed: int = 0
    """The last version of the settings in which something changed that plans for it are made by; of the
    default model, `version` and `refined` tell it."""

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        projector = () if self.projector is None else (self.projector,)
        return (*projector, *(adapter.file for adapter in self.adapters))

    @property
    def least_replicas(self) -> int:
        return self.replicas[0] if self.replicas is not None else 1

    @property
    def most_replicas(self) -> int:
        return self.replicas[1] if self.replicas is not None else 1

    @property
    def rank(self) -> int:
        return self.priority or 0

    @property
    def plan_version(self) -> int:
        return self.changed

    @property
    def engine_key(self) -> tuple[object, ...]:
        """What an engine is started with and its plan does not say."""
        options = (getattr(self, name) for name in ENGINE_OPTIONS)
        return (
            self.fingerprint,
            self.alias,
            *options,
            self.guess,
            self.draft,
            self.draft_max,
            self.projector,
            self.adapters,
        )


@frozen
class MeshSettings(ModelSettings):
    """They belong to the mesh, and its owners set them: for its default model, and for the others."""

    version: int
    """Counts the owners' changes; the highest one seen is in force."""
    refined: int = 0
    """So many of the last versions changed nothing that plans for the default model are made by."""
    others: tuple[ModelSettings, ...] = ()
    """Models that are served beside the default one."""

    @property
    def plan_version(self) -> int:
        """Told by these two, which nodes of older versions know."""
        return self.version - self.refined

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """All of them, the default one first."""
        return (self, *self.others)

    @property
    def by_priority(self) -> tuple[ModelSettings, ...]:
        """All of them, in the order in which they are planned: of equals, the first comes first."""
        return tuple(sorted(self.models, key=lambda model: -model.rank))

    def is_on_demand(self, model: ModelSettings) -> bool:
        """The default one never is."""
        return model.on_demand and model.fingerprint != self.fingerprint

    def gives_way(self, model: ModelSettings, to: ModelSettings) -> bool:
        """Whether a model that is always loaded ends where that makes another one fit: `to` is as well."""
        pinned = not self.is_on_demand(model) and not self.is_on_demand(to)
        return pinned and model.rank < to.rank

    def of(self, fingerprint: Fingerprint) -> ModelSettings | None:
        return next((model for model in self.models if model.fingerprint == fingerprint), None)


def as_one(settings: ModelSettings) -> ModelSettings:
    """Of one model alone, were it the default or not."""
    names = (each.name for each in fields(ModelSettings))
    model = ModelSettings(**{name: getattr(settings, name) for name in names})
    return replace(model, changed=settings.plan_version)


M = TypeVar("M", bound=ModelSettings)

_EXCLUSIVE = {"tensor_split": "layers", "layers": "tensor_split"}
"""Each takes the other's place."""


def with_changes(model: M, changes: Mapping[str, Any]) -> M:
    gone = {_EXCLUSIVE[name]: None for name in changes if name in _EXCLUSIVE}
    return replace(model, **{**gone, **changes})


def with_options(settings: MeshSettings, model: ModelSettings, changes: Mapping[str, Any]) -> MeshSettings:
    """The same, with changes of one model."""
    if model.fingerprint == settings.fingerprint:
        return with_changes(settings, changes)
    others = (
        with_changes(each, changes) if each.fingerprint == model.fingerprint else each
        for each in settings.others
    )
    return replace(settings, others=tuple(others))


def with_default(settings: MeshSettings, model: ModelSettings) -> MeshSettings:
    """The same models, that one first; the others keep their order."""
    if model.fingerprint == settings.fingerprint:
        return settings
    # The default model is always loaded.
    chosen = replace(as_one(model), on_demand=False, idle_s=IDLE_DEFAULT_S, changed=0)
    others = tuple(as_one(each) for each in settings.models if each.fingerprint != model.fingerprint)
    own = {each.name: getattr(chosen, each.name) for each in fields(ModelSettings)}
    return replace(settings, **own, others=others)
