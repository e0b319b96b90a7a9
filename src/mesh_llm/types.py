"""Nouns that more than one package speaks: models, memory, devices, engines.

Everything here is frozen and free of behaviour beyond arithmetic on its own
fields, so that it can cross threads, processes and pure functions alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NewType

from mesh_llm.frozen import frozen

NodeId = NewType("NodeId", str)
"""A node's public key, 64 hexadecimal digits."""
MeshId = NewType("MeshId", str)
"""The public key of the node that created the mesh: all its credentials go back to it."""
Fingerprint = NewType("Fingerprint", str)
Setting = bool | int | float | str
"""A value of one of the engine's own settings."""


@frozen
class LayerCache:
    """What one layer keeps per sequence, as llama.cpp allocates it.

    Attention layers store `k_width` and `v_width` elements per cell of context;
    a `window` above zero bounds the cells. Recurrent layers store
    `state_bytes` per sequence whatever its length.
    """

    k_width: int = 0
    v_width: int = 0
    window: int = 0
    state_bytes: int = 0


@frozen
class Kernel:
    """What a device computes for a model: products with weights of a type, attention, small operations."""

    kind: str
    """The name of a ggml type, `attention` or `op`."""
    width: int
    """Of a weight's rows, of an attention's heads, of what an operation works on."""
    rows: int = 1
    """Of a weight; heads that an attention caches."""
    experts: int = 1
    """That a weight is of."""
    used: int = 1
    """Of these, by each token; heads of an attention."""


@frozen
class Matrices:
    """All of one kind and size in a layer: what a token reads of them."""

    kernel: Kernel
    bytes: float
    elements: float


@frozen
class Layer:
    weight_bytes: int
    cache: LayerCache
    expert_bytes: int = 0
    """Of the weights: a mixture's experts."""
    weights: tuple[Matrices, ...] = ()
    """Its matrices; none where only the header's sums are known."""
    operations: int = 0
    """Small ones beside the products, about."""


@frozen
class ModelFacts:
    """What a GGUF says about itself; enough to plan memory without loading it."""

    files: tuple[Path, ...]
    fingerprint: Fingerprint
    size_bytes: int
    name: str
    architecture: str
    quantisation: str
    layers: tuple[Layer, ...]
    embedding_bytes: int
    head_bytes: int
    """Bytes of the output head; 0 when it is tied to the embedding."""
    other_bytes: int
    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int
    context_trained: int
    experts: int
    experts_used: int
    expert_feed_forward: int
    """Inner width of one expert; 0 without experts."""
    query_elements: int
    """Elements per token that attention holds at once for all its queries."""
    widest: int
    """Elements per token of the widest product of a layer's matrices, over all chosen experts."""
    causal: bool
    """False for encoders and rerankers, which keep no cache."""
    pooled: bool
    """True where the file asks for pooling: an embedding or reranking model."""
    encodes: bool = False
    """True where it makes no text: inputs go through it whole, into embeddings or ranks."""
    ranks: bool = False
    """True where it tells how well a document fits a question."""
    mtp_cache: LayerCache | None = None
    """What the last layer keeps, where it guesses the token after the next (MTP) and can draft; None else."""
    keeps_snapshots: bool = False
    """True where the engine can keep the states of a recurrent model's last tokens, to go back to one."""
    read_layers: tuple[int, ...] = ()
    """Of an EAGLE3 head: the layers of its model whose inputs it reads."""
    read_width: int = 0
    """How wide these are."""
    head: Matrices | None = None
    """What makes logits; None where only the header's sums are known."""
    joined_layers: int = 0
    """So many of the last layers share caches, and stay on one node; all of them: it is never split."""
    chat_template: str | None

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.weight_bytes for layer in self.layers)
        return layers + self.embedding_bytes + self.head_bytes + self.other_bytes


@frozen
class MemoryNeed:
    weight_bytes: int
    cache_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.compute_bytes


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    INTEGRATED = "integrated"
    ACCELERATOR = "accelerator"


@frozen
class Device:
    """A ggml device of this machine."""

    name: str
    description: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int
    mps: bool = False
    """Whether CUDA's multi-process service lets processes compute on it at the same time."""


class State(StrEnum):
    """What a node is doing; the words of `status` and `/health`."""

    STARTING = "starting"
    WAITING = "waiting"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@frozen
class Progress:
    """One step of something that takes a while, for people to look at."""

    what: str
    done: int
    total: int
    unit: str = ""


ProgressSink = Callable[[Progress], None]


@frozen
class Event:
    """Something that a person who watches a node wants to read."""

    kind: str
    text: str


EventSink = Callable[[Event], None]


@frozen
class StageCounters:
    """What one worker has done for an engine since they were linked: sums, for their differences."""

    runs: int
    compute_ns: int
    wait_ns: int
    """That the worker waited for something to do."""
    sent_bytes: int
    """From the host to the worker."""
    received_bytes: int
    worker_in_bytes: int
    """All that reached the worker, also from its neighbours."""
    worker_out_bytes: int
    weight_bytes: int
    """Of the bytes sent: weights, for want of the model's file over there."""
    queued: int
    """Commands that waited behind the last run."""
    in_flight: int

    def plus(self, other: StageCounters) -> StageCounters:
        """Of two engines together."""
        return StageCounters(**_sums(self, other))


@frozen
class DeclinedOp:
    """An op that a worker does not compute, although its layers need it: the host does so in its place."""

    link: str
    op: str
    node: str
    """The first of them, or the weight that stays on the host for it."""
    layers: int


@frozen
class SpeculationCounters:
    """What drafts have done for an engine since it started: sums, but for the depth of the last draft."""

    steps: int = 0
    tokens: int = 0
    """That these steps gave, drafted or not."""
    drafted: int = 0
    accepted: int = 0
    text_drafted: int = 0
    """Of these, by the text itself and not by a model."""
    text_accepted: int = 0
    seconds: float = 0.0
    """That the steps took."""
    plain_seconds: float = 0.0
    """And would have taken without drafts, by what steps without them cost."""
    depth: int = 0

    def plus(self, other: SpeculationCounters) -> SpeculationCounters:
        """Of two engines together."""
        return SpeculationCounters(**{**_sums(self, other), "depth": max(self.depth, other.depth)})


def _sums(one: Any, other: Any) -> dict[str, Any]:
    return {each.name: getattr(one, each.name) + getattr(other, each.name) for each in fields(one)}


# -- the mesh -----------------------------------------------------------------------------------


class Role(StrEnum):
    """What a member may do; stands in its invite."""

    OWNER = "owner"
    """A node that also sets the mesh's settings, revokes any invite and makes other owners."""
    NODE = "node"
    CLIENT = "client"
    """Uses the API, lends nothing, invites nobody."""


@frozen
class Signed:
    """Something that a member said, exactly as it was signed, so that others can pass it on."""

    text: str
    signature: str
    """64 bytes, as base64url."""
    credential: str
    """The signer's, back to the mesh's creator (transport.credential)."""

    @property
    def size_bytes(self) -> int:
        """As part of a JSON document, in which it is a text with JSON of its own."""
        escaped = self.text.count('"') + self.text.count("\\")
        return len(self.text.encode()) + escaped + len(self.signature) + len(self.credential)


class HostingMode(StrEnum):
    """Whether a node may run the engine."""

    AUTO = "auto"
    PREFER = "prefer"
    NEVER = "never"


class LinkKind(StrEnum):
    """How bytes get from one node to another."""

    SELF = "self"
    LOCAL = "local"
    """The same machine: a unix socket."""
    QUIC = "quic"
    TCP = "tcp"
    """As it is, without encryption: only where both sides said --plain-lan."""
    RELAY = "relay"
    """Through a relay server, or through a member that reaches both."""


@frozen
class Address:
    """Where a node can be reached."""

    direct: tuple[str, ...] = ()
    """`IP:PORT` of QUIC, the likeliest first."""
    relay: str | None = None


@frozen
class LinkFacts:
    """What one node has measured of its way to another."""

    kind: LinkKind
    rtt_s: float


@frozen
class KernelSpeed:
    """What a device has shown with one kernel of a model."""

    kernel: Kernel
    read_bytes_per_s: float
    """For one token: of weights, of what attention caches, of what an operation works on."""
    flops_per_s: float
    """For the many tokens of a prompt; of small operations: elements."""


@frozen
class Speed:
    """What a node's device has shown that it can do."""

    read_bytes_per_s: float
    """Of weights, in products with one column: what decoding is made of."""
    flops_per_s: float
    """In products with many columns: what prompts are made of."""
    attention_per_s: float
    """Operations likewise, in attention over what came before: what long prompts are made of, too."""
    kernels: tuple[KernelSpeed, ...] = ()
    """With what the mesh's model is made of; the figures above are of a usual model."""


@frozen
class LentDevice:
    """What a node lends of one of its devices."""

    name: str
    bytes: int
    layers: int | None = None
    """At most so many; None: all that fit."""
    speed: Speed | None = None
    experts_bytes: int = 0
    """Of main memory, for the experts of its layers."""


class Place(NamedTuple):
    """Where a stage lies."""

    node: NodeId
    device: str = ""
    """Named where a worker lends several; else it is the one that it lends, or all that a host has."""


@frozen
class HeldModel:
    """A model whose files lie on a node's disk."""

    fingerprint: Fingerprint
    name: str
    size_bytes: int
    encodes: bool = False
    """It makes embeddings and no text: whoever lacks the file cannot look."""


@frozen
class HeldPart:
    """Some layers of a model that a node cannot host: it fetches those that a plan gives it."""

    fingerprint: Fingerprint
    spans: tuple[tuple[int, int], ...] = ()
    """Layers on its disk: the first, and the last, not included."""


@frozen
class Stage:
    """Layers [first, last) of a model, on one node, and there on one device if it is a worker."""

    node: NodeId
    first: int
    last: int
    weight_bytes: int
    need_bytes: int
    """With cache and scratch memory; the host's also with embedding and head."""
    share: float
    """Of the model's layers."""
    device: str = ""
    """See `Place`."""
    main_bytes: int | None = None
    """Of what it needs, in main memory; older nodes do not say."""

    @property
    def place(self) -> Place:
        return Place(self.node, self.device)


class Mode(StrEnum):
    SOLO = "solo"
    SPLIT = "split"
    WAITING = "waiting"


@frozen
class Prediction:
    tok_s: float
    """Decoding, one request at a time."""
    first_token_s: float
    """For a prompt of 512 tokens."""
    prompt_tok_s: float
    """At which a prompt of 4,096 tokens is read."""
    tok_s_within: float = 0.0
    """How far it may be off, as a share of it; 0: nobody has said."""
    first_token_within: float = 0.0

    @property
    def tok_s_range(self) -> tuple[float, float]:
        return self.tok_s * (1 - self.tok_s_within), self.tok_s * (1 + self.tok_s_within)

    @property
    def first_token_range(self) -> tuple[float, float]:
        within = self.first_token_within
        return self.first_token_s * (1 - within), self.first_token_s * (1 + within)


@frozen
class Exclusion:
    """A node that has no part in a plan, and why."""

    node: NodeId
    reason: str


@frozen
class Plan:
    """Who computes what. Two plans with equal `key` run the same engine over the same links."""

    mode: Mode
    """Solo or split; for WAITING there are no stages, and nobody hosts."""
    host: NodeId | None
    stages: tuple[Stage, ...]
    """In the order of their layers; the host's own first, if it has any."""
    context: int
    """Tokens per slot."""
    slots: int
    head_on_worker: bool
    need_bytes: int
    have_bytes: int
    predicted: Prediction | None
    """None where a speed has not been measured."""
    excluded: tuple[Exclusion, ...]
    reason: str
    """A sentence: why this plan and no other."""
    lanes: int = 1
    """Engines that run it at the same time, over the same stages; they come and go while it serves."""
    lanes_reason: str = ""
    """Why there are no more of them, where more were wanted; known to the host alone."""
    moved: str = ""
    """In whose place it runs, and what had to be read for that; empty where nothing ran before."""

    @property
    def key(self) -> tuple[object, ...]:
        layers = tuple((stage.place, stage.first, stage.last) for stage in self.stages)
        return (self.mode, self.host, layers, self.context, self.slots, self.head_on_worker)

    @property
    def nodes(self) -> set[NodeId]:
        """All that have a part in it."""
        return {stage.node for stage in self.stages} | ({self.host} if self.host is not None else set())

    @property
    def workers(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.node != self.host)


@frozen
class ServingPlan:
    """A plan that its host has published: it passed its readiness check."""

    epoch: int
    plan: Plan
    settings_version: int = 0
    """Of the settings that it was made by; 0 where nobody knows."""
    fingerprint: Fingerprint = Fingerprint("")
    """Of its model; empty where a node of an older version, which has one model alone, hosts it."""
    replica: int = 0
    """Which of the plans of its model, where that runs more than once."""


@frozen
class Demand:
    """What a node tells of a model that is loaded on demand."""

    fingerprint: Fingerprint
    wanted: bool = False
    """Its clients wait for the model, or lite clients that are connected to it."""
    idle_since: int = 0
    """It hosts the model, which nobody has used since then (Unix time) and which may go; 0 otherwise."""
    goes_for: Fingerprint = Fingerprint("")
    """It asks the host to unload the model: for the one of this fingerprint, which lacks the memory, or,
    where this is the model's own, because an owner wants so."""
    reason: str = ""
    """Why it does not serve yet."""
    hopeless: bool = False
    """That it will not serve as things are: for want of memory, or as it has failed again and again."""


@frozen
class NodeFacts:
    """What a node tells the mesh about itself."""

    name: str
    role: Role
    version: str
    """Of mesh-llm."""
    engine: str = ""
    """The engine's version; nodes with different ones do not compute together."""
    splits: bool = True
    """Whether its engine can be part of a split; one that its user built cannot."""
    address: Address = Address()
    plain_lan: bool = False
    """Whether its network is private: data links to others that say so need no encryption."""
    machine: str = ""
    """Equal for nodes that share a machine, and with it its memory."""
    memory_bytes: int = 0
    """Main memory that it may use, within --max-memory; before any model was loaded."""
    max_memory_bytes: int | None = None
    """What it uses and lends at most, main memory and GPUs together; None: all that there is."""
    machine_memory_bytes: int = 0
    """Main memory of the whole machine that was free then."""
    gpus: tuple[Device, ...] = ()
    """Those that it may use."""
    devices: tuple[LentDevice, ...] = ()
    """Those that it lends, where they are several; else it lends its first GPU, or main memory."""
    gpu_layers: int | None = None
    """Of its layers, at most so many lie on GPUs; None: all that fit there."""
    cpu_moe: int = 0
    """Experts of the first so many layers on a GPU lie in main memory."""
    hosting: HostingMode = HostingMode.AUTO
    speed: Speed | None = None
    """With all threads that it may use."""
    cores: int = 0
    """So many threads, where nodes of its machine share them; 0: it has a number of its own, or a GPU."""
    cpu_library: str = ""
    """Names the code that its CPU computes with; a plan whose nodes have changed it is brought up anew."""
    builds: bool = False
    """Whether a quicker one is being compiled."""
    threads: int = 0
    """That it computes with, where it has a number of its own; 0: see `cores`, or nobody knows."""
    machine_threads: int = 0
    """That its machine has, for all nodes; 0: nobody knows."""
    models: tuple[HeldModel, ...] = ()
    part: HeldPart | None = None
    """Of the default model."""
    also_parts: tuple[HeldPart, ...] = ()
    links: tuple[tuple[NodeId, LinkFacts], ...] = ()
    state: State = State.STARTING
    reason: str = ""
    lent_bytes: int = 0
    resting: bool = False
    """Its user wants its memory back: it takes no part in plans."""
    paused: str = ""
    """Why it rests, where it lends again by itself or at its user's word."""
    serving: ServingPlan | None = None
    """The plan that it hosts for the default model, or for the one that was the default until now."""
    also_serving: tuple[ServingPlan, ...] = ()
    """The plans that it hosts for others."""
    replicas: tuple[ServingPlan, ...] = ()
    """Those that it hosts beside the first one of their model, which older versions must not take for it."""
    crowded: tuple[int, ...] = ()
    """Epochs of its plans at which requests wait, or did a while ago: their models may run once more."""
    starting: tuple[ServingPlan, ...] = ()
    """Plans of all models that it is bringing up: their memory is taken."""
    failing: tuple[Fingerprint, ...] = ()
    """Models that failed here again and again, and leave the memory to those of a lower priority for now."""
    demand: tuple[Demand, ...] = ()

    def part_of(self, fingerprint: Fingerprint) -> HeldPart | None:
        parts = (*((self.part,) if self.part is not None else ()), *self.also_parts)
        return next((part for part in parts if part.fingerprint == fingerprint), None)

    @property
    def served(self) -> tuple[ServingPlan, ...]:
        first = (self.serving,) if self.serving is not None else ()
        return (*first, *self.also_serving, *self.replicas)
