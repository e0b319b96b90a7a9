"""What a node was asked to do: options, checked against each other before anything starts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from mesh_llm.defaults import API_LISTEN, API_PORT, EXPERTS, GUESS_TEXT_MAX, THREADS_LIMIT
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.mesh_settings import ADAPTERS_LIMIT, MESH_OPTIONS, SCALE_LIMIT, MeshOptions, given_options
from mesh_llm.types import HostingMode, Setting

ALL_LAYERS = 10_000
"""More than any model has."""
LEAST_MEMORY_BYTES = 10**6
"""No model is smaller, and nobody types so few bytes on purpose."""
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)B?$", re.IGNORECASE)
_HOURS = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?-([0-9]{1,2})(?::([0-5][0-9]))?")
_DAY = 24 * 60
PUBLIC_RELAYS = "public"
"""In place of a relay's URL: iroh's public ones, whatever the home remembers."""
CLIENTS_OPTIONS = {
    *("home", "join", "client", "name", "console", "listen", "port", "api_key", "tls_cert", "tls_key"),
    *("bind_ip", "bind_port", "relay", "relay_token", "no_relay"),
}
_MODELS_OWN = (
    *("model", "more_models", "alias", "draft", "draft_max"),
    *("embeddings", "rerank", "mmproj", "lora"),
)
"""What is asked for one model: the first of the command line, or that of `mesh-llm load`."""
_FLAGS = {
    **{name: option.flag for name, option in MESH_OPTIONS.items()},
    **{"max_memory_bytes": "--max-memory", "devices": "--device", "settings": "--engine-set"},
}
"""Where they are not called as their field."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@frozen
class LendTerms:
    """When a node computes for others. By default always; else while all of this holds."""

    idle: bool = False
    """While nobody uses the machine, it is on mains power, cool, and no game runs."""
    hours: tuple[tuple[int, int], ...] = ()
    """In minutes since midnight: from, and until, which may be on the next day."""

    @property
    def text(self) -> str:
        """As it is typed."""
        return ",".join([*(["idle"] if self.idle else []), *map(_span_text, self.hours)]) or "always"


@frozen
class NodeConfig(MeshOptions):
    """Where an option of the mesh was not given, a joiner takes the mesh's, and its creator the default."""

    home: Path
    model: str | None = None
    """None: the mesh's, or the default one."""
    more_models: tuple[str, ...] = ()
    """That are served beside it."""
    alias: str | None = None
    join: str | None = field(default=None, repr=False)
    """An invite token."""
    new_mesh: bool = False
    client: bool = False
    bind_ip: str | None = None
    bind_port: int = 0
    relay: str | None = None
    relay_token: str | None = field(default=None, repr=False)
    no_relay: bool = False
    plain_lan: bool = False
    hosting: HostingMode = HostingMode.AUTO
    lend: LendTerms = LendTerms()
    no_fetch: bool = False
    name: str = ""
    listen: str = API_LISTEN
    port: int = API_PORT
    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_memory_bytes: int | None = None
    """Of main memory and GPUs together."""
    devices: tuple[str, ...] | None = None
    """None: every GPU that the engine has, else the CPU. ("none",) and ("CPU",): the CPU."""
    draft: str | None = None
    """None: the one that belongs to the model, if it is here."""
    draft_max: int | None = None
    no_draft: bool = False
    gpu_layers: int | None = None
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    override_tensor: tuple[str, ...] = ()
    """Patterns of names: such weights of layers on GPUs lie in main memory."""
    threads: int | None = None
    embeddings: bool = False
    rerank: bool = False
    mmproj: Path | None = None
    lora: tuple[tuple[Path, float], ...] = ()
    """LoRA adapters, and how much of each is added."""
    settings: dict[str, Setting] = field(default_factory=dict)
    bin_dir: Path | None = None
    trace: Path | None = None
    """Gets a line for each frame on links to other machines."""
    console: int | None = None
    """The port of the web console; 0 takes any free one, None opens none."""

    def __post_init__(self) -> None:
        self._check_options()
        _check_range("--threads", self.threads, 1, THREADS_LIMIT)
        _check_range("--port", self.port, 0, 65535)
        _check_range("--console", self.console, 0, 65535)
        _check_range("--gpu-layers", self.gpu_layers, 0, ALL_LAYERS)
        _check_range("--n-cpu-moe", self.n_cpu_moe, 0, ALL_LAYERS)
        if self.max_memory_bytes is not None and self.max_memory_bytes < 1:
            raise UsageError(
                "--max-memory 0 leaves no memory for a model",
                hint="give a size above 0, such as 8GB; --client takes part without a model",
            )
        _check_range("--draft-max", self.draft_max, 1, GUESS_TEXT_MAX)
        _check_range("--bind-port", self.bind_port, 0, 65535)
        self._check_mesh()
        self._check_engine()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("--api-key is empty")
        if not _is_loopback(self.listen) and self.api_key is None:
            raise UsageError(
                f"--listen {self.listen} opens the API to the network, but there is no --api-key",
                hint="set MESH_LLM_API_KEY, or listen on 127.0.0.1",
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise UsageError(f"--trace {self.trace}: there is no folder {self.trace.absolute().parent}")
        if self.mmproj is not None and not self.without_mmproj and not self.mmproj.is_file():
            raise UsageError(f"--mmproj {self.mmproj}: there is no such file")
        self._check_lora()

    def for_another_model(self) -> NodeConfig:
        """Without what was asked for the first one alone."""
        own: dict[str, Any] = {
            each.name: each.default for each in fields(self) if each.name in {*MESH_OPTIONS, *_MODELS_OWN}
        }
        return replace(self, **own)

    @property
    def expert_layers(self) -> int:
        """So many layers on a GPU have their experts in main memory."""
        return ALL_LAYERS if self.cpu_moe else self.n_cpu_moe or 0

    @property
    def in_main_memory(self) -> str:
        """What the names of weights match that are to lie there; empty: none are."""
        patterns = [EXPERTS] if self.expert_layers else []
        return "|".join(f"(?:{pattern})" for pattern in (*patterns, *self.override_tensor))

    @property
    def without_mmproj(self) -> bool:
        """Whether a projector that lies beside the model is to be left there."""
        return self.mmproj == Path("none")

    def _check_lora(self) -> None:
        for path, scale in self.lora:
            if not path.is_file():
                hint = "give --lora once for each file" if "," in path.name else "check the path"
                raise UsageError(f"--lora {path}: there is no such file", hint=hint)
            if not abs(scale) <= SCALE_LIMIT:
                wrong = f"{scale:g} is not between -{SCALE_LIMIT:g} and {SCALE_LIMIT:g}"
                raise UsageError(f"--lora-scaled {path}: {wrong}", hint="1 is usual")
        if len(self.lora) > ADAPTERS_LIMIT:
            raise UsageError(f"--lora: at most {ADAPTERS_LIMIT} adapters, and these are {len(self.lora)}")

    def _check_options(self) -> None:
        for name, value in given_options(self).items():
            try:
                MESH_OPTIONS[name].check(value)
            except ValueError as error:
                shown = f" {value}" if isinstance(value, int | float | str) else ""
                raise UsageError(f"{MESH_OPTIONS[name].flag}{shown} is {error}") from None

    def _check_engine(self) -> None:
        if self.draft == "":
            raise UsageError("--draft is empty")
        if self.no_draft and (self.draft is not None or self.draft_max is not None):
            raise UsageError(
                "--no-draft disables speculative decoding", hint="leave it or the other option out"
            )
        for options, given in (
            ("--draft and --draft-max are", self.draft is not None or self.draft_max is not None),
            ("--engine-set is", bool(self.settings)),
            ("--trace is", self.trace is not None),
        ):
            if given and self.bin_dir is not None:
                raise UsageError(
                    f"{options} for the bundled engine and cannot be used with --bin-dir",
                    hint="leave one of them out",
                )

    def _check_mesh(self) -> None:
        """Options about the mesh that exclude each other."""
        for options, both in (
            ("--join and --new-mesh", self.join is not None and self.new_mesh),
            ("--relay and --no-relay", self.relay is not None and self.no_relay),
            ("--n-cpu-moe and --override-tensor", bool(self.n_cpu_moe and self.override_tensor)),
            ("--tensor-split and --layers", self.tensor_split is not None and self.layers is not None),
        ):
            if both:
                raise UsageError(f"{options} cannot be used together", hint="leave one of them out")
        if self.bin_dir is not None and (self.split or self.tensor_split or self.layers):
            raise UsageError("a llama-server from --bin-dir cannot be split", hint="leave --bin-dir out")
        if self.bind_ip is not None:
            try:
                ipaddress.ip_address(self.bind_ip)
            except ValueError:
                raise UsageError(f"--bind-ip {self.bind_ip} is not an IP address") from None
        if self.client:
            self._check_client()

    def _check_client(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in CLIENTS_OPTIONS and value is not False and value not in (each.default, {}):
                flag = _FLAGS.get(each.name) or "--" + each.name.replace("_", "-")
                raise UsageError(
                    f"{flag} cannot be used with --client, which does not compute",
                    hint="leave one of them out",
                )


def _check_range(option: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{option} {value} is not between {least} and {most:,}")


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_scaled(text: str) -> tuple[Path, float]:
    """`FILE:SCALE` of --lora-scaled."""
    path, _, scale = text.rpartition(":")
    try:
        return Path(path).expanduser().resolve(), float(scale)
    except ValueError:
        raise UsageError(
            f"--lora-scaled {text}: the scale is missing, or not a number", hint="for example style.gguf:0.5"
        ) from None


def parse_override(text: str) -> Iterator[str]:
    """The patterns of `PATTERN=CPU,...`."""
    for part in text.split(","):
        pattern, separator, buffer = part.rpartition("=")
        if not separator or not pattern:
            raise UsageError(f"--override-tensor {part} is not PATTERN=CPU")
        if buffer != "CPU":
            raise UsageError(
                f"--override-tensor {part}: weights can be kept in CPU, which is main memory, not in {buffer}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"--override-tensor {part}: the pattern is wrong: {error}") from None
        yield pattern


def parse_lend(text: str) -> LendTerms:
    """`always`, `idle`, `22:00-07:00`, or several of them with commas between."""
    words = [word.strip() for word in text.split(",")]
    if words == ["always"]:
        return LendTerms()
    hours = tuple(_span(word) for word in words if word != "idle")
    if not words or "always" in words or any(span is None for span in hours):
        raise UsageError(
            f"--lend {text} is neither always, idle nor hours",
            hint="for example --lend idle, --lend 22:00-07:00, or both: --lend idle,22:00-07:00",
        )
    return LendTerms(idle="idle" in words, hours=tuple(span for span in hours if span is not None))


def _span(text: str) -> tuple[int, int] | None:
    match = _HOURS.fullmatch(text)
    if match is None:
        return None
    first, last = 60 * int(match[1]) + int(match[2] or 0), 60 * int(match[3]) + int(match[4] or 0)
    return (first, last) if first <= _DAY and last <= _DAY and first != last else None


def _span_text(span: tuple[int, int]) -> str:
    return "-".join(f"{minutes // 60:02}:{minutes % 60:02}" for minutes in span)


def parse_size(text: str) -> int:
    """`8GB`, `500MB`, `1.5g` or plain bytes."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size", hint="for example 8GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_memory(text: str, *, given: str = "") -> int:
    """The same of memory: a bare number is rarely meant in bytes. `given`: all that was typed."""
    size = parse_size(text)
    if text.strip().strip("0.") and text.strip()[-1].isdigit() and size < LEAST_MEMORY_BYTES:
        given = given or f"--max-memory {text}"
        raise UsageError(f"{given} would be {text} bytes", hint=f"did you mean {text.strip()}GB?")
    return size
