"""The options of a node: declared once, for `mesh-llm` and `mesh-llm serve`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from mesh_llm.cli import secret
from mesh_llm.defaults import (
    API_LISTEN,
    API_PORT,
    CACHE_TYPES,
    DEFAULT_MODEL,
    DEFAULT_SLOTS,
    DRAFT_MAX,
    REASONING_FORMATS,
)
from mesh_llm.errors import UsageError

if TYPE_CHECKING:
    from mesh_llm.config import NodeConfig

CONSOLE_PORT = 3131
"""The number that the documents name."""


_AS_THEY_ARE = (
    *("alias", "new_mesh", "client", "bind_port", "relay", "plain_lan", "no_fetch", "name", "listen", "port"),
    *("tls_cert", "tls_key", "embeddings", "rerank", "mmproj", "console"),
)
"""Options that `NodeConfig` takes as they were typed, by the same name."""

VARIABLES = {
    **{"bind-ip": "MESH_LLM_BIND_IP", "no-relay": "MESH_LLM_NO_RELAY"},
    **{flag.removeprefix("--"): variable for flag, variable in secret.VARIABLES.items()},
}
"""Of the environment: each stands for an option."""

F = TypeVar("F", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)

home_option = click.option(
    "--home", type=_PATH, metavar="DIR", help="folder for the node's state (MESH_LLM_HOME, else ~/.mesh-llm)"
)
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON")
debug_option = click.option("--debug", is_flag=True, help="log everything to stderr and show tracebacks")

_OPTIONS = [
    click.option(
        "--model",
        multiple=True,
        metavar="NAME|PATH",
        help="a name from mesh-llm models or mesh-llm download, a GGUF file (any shard of a multi-file one), "
        "hf:OWNER/REPO[:FILE|QUANT], ollama:NAME or a URL "
        f"(default: the mesh's model when joining one, {DEFAULT_MODEL} otherwise); "
        "can be repeated: the first answers requests that name none, and other options hold for all of them",
    ),
    click.option(
        "--join",
        metavar="TOKEN|@FILE|-",
        help="join the mesh of this invite token; @FILE reads it from a file, - from standard input "
        "(also MESH_LLM_JOIN)",
    ),
    click.option("--new-mesh", is_flag=True, help="start a new mesh (default: return to the last one)"),
    click.option("--client", is_flag=True, help="lite client: the API only; no model, no engine"),
    click.option(
        "--alias", metavar="NAME", help="name under which the model is served (default: its file name)"
    ),
    click.option(
        "--port", type=int, default=API_PORT, show_default=True, help="API port; 0 takes any free one"
    ),
    click.option(
        "--listen",
        metavar="ADDR",
        default=API_LISTEN,
        show_default=True,
        help="API address; any but loopback needs --api-key",
    ),
    click.option(
        "--api-key", metavar="KEY|@FILE|-", help="key that API clients must send (also MESH_LLM_API_KEY)"
    ),
    click.option("--tls-cert", type=_PATH, metavar="FILE", help="serve HTTPS with this certificate"),
    click.option("--tls-key", type=_PATH, metavar="FILE", help="private key for --tls-cert"),
    click.option("--bind-port", type=int, default=0, metavar="PORT", help="fixed UDP port for QUIC"),
    click.option("--bind-ip", metavar="IP", help="address for QUIC (MESH_LLM_BIND_IP; default: all)"),
    click.option(
        "--relay",
        metavar="URL",
        help="your own relay, remembered with the mesh (token: MESH_LLM_RELAY_TOKEN); public: iroh's relays",
    ),
    click.option(
        "--no-relay", is_flag=True, help="direct paths only, no public lookups (also MESH_LLM_NO_RELAY=1)"
    ),
    click.option(
        "--plain-lan", is_flag=True, help="use unencrypted data links; only for networks that are private"
    ),
    click.option(
        "--split", is_flag=True, help="spread the model over every capable node, even if it fits on one"
    ),
    click.option(
        "--lanes",
        metavar="auto|N",
        help="engines that run a split model at the same time, each with slots of its own "
        "(default: 1; auto: more while several requests are answered and memory allows)",
    ),
    click.option(
        "--tensor-split",
        metavar="R,R,...",
        help="share of each node, in the order of status, host first; 0: no part",
    ),
    click.option(
        "--layers",
        metavar="NODE=A-B,...",
        help="exact layers for each node, by name; a worker's devices are filled one after the other",
    ),
    click.option(
        "--replicas",
        metavar="N|MIN-MAX",
        help="how often the model runs, each time on other nodes; up to MAX while requests wait (default: 1)",
    ),
    click.option(
        "--priority",
        type=int,
        metavar="N",
        help="which of several models has memory where they do not all fit: the highest, -100 to 100 "
        "(default: 0)",
    ),
    click.option(
        "--hosting",
        type=click.Choice(("auto", "prefer", "never")),
        default="auto",
        show_default=True,
        help="whether this node may or should be the host",
    ),
    click.option(
        "--lend",
        metavar="always|idle|HH:MM-HH:MM",
        default="always",
        show_default=True,
        help="when to compute for others: idle is while nobody uses this machine, it is not on battery, not "
        "hot, and no game runs; hours and idle can be joined by commas",
    ),
    click.option("--no-fetch", is_flag=True, help="never copy a missing model from a peer"),
    click.option(
        "--ctx-size", type=int, metavar="N", help="context per slot (default: the largest that fits)"
    ),
    click.option(
        "--parallel", type=int, metavar="N", help=f"requests at once, called slots (default: {DEFAULT_SLOTS})"
    ),
    click.option(
        "--predict",
        type=int,
        metavar="N",
        help="most tokens of an answer whose request sets no limit (default: until the context is full)",
    ),
    click.option(
        "--temp",
        type=float,
        metavar="N",
        help="temperature where a request sets none (default: as the model's file says)",
    ),
    click.option("--top-k", type=int, metavar="N", help="likewise: so many of the likeliest tokens"),
    click.option("--top-p", type=float, metavar="N", help="likewise: their share of probability"),
    click.option("--min-p", type=float, metavar="N", help="likewise: least share of the likeliest's"),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        help="seed where a request brings none: the same request has the same answer (default: any)",
    ),
    click.option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="arguments of the chat template, where a request brings none of that name, as in "
        "'{\"enable_thinking\": false}'",
    ),
    click.option(
        "--reasoning-format",
        type=click.Choice(REASONING_FORMATS),
        help="what becomes of thoughts in an answer: none leaves them in the text (default: deepseek, which "
        "has them in reasoning_content)",
    ),
    click.option(
        "--reasoning-budget",
        type=int,
        metavar="N",
        help="most tokens of thoughts where a request sets no limit; 0: none (default: -1, any number)",
    ),
    click.option(
        "--draft",
        metavar="NAME|PATH",
        help="draft model for speculative decoding (default: the model's own, if it is on this disk)",
    ),
    click.option(
        "--draft-max",
        type=int,
        metavar="N",
        help=f"most tokens to draft at once (default: {DRAFT_MAX})",
    ),
    click.option("--no-draft", is_flag=True, help="disable speculative decoding (draft model and n-gram)"),
    click.option(
        "--max-memory",
        metavar="SIZE",
        help="use and lend at most this much, main memory and GPUs together (8GB, 500MB)",
    ),
    click.option(
        "--device",
        metavar="DEV",
        help="what to use and lend: none or CPU for main memory alone, or GPUs by name, as in CUDA0,CUDA1, "
        "with CPU behind them to lend main memory, too (default: all GPUs and main memory)",
    ),
    click.option(
        "--gpu-layers",
        type=int,
        metavar="N",
        help="layers on the GPUs, a worker's on its first (default: all that fit); "
        "the rest lies in main memory; 0: use the CPU",
    ),
    click.option(
        "--cpu-moe",
        is_flag=True,
        help="keep a mixture's experts in main memory and the rest on this node's GPUs",
    ),
    click.option(
        "--n-cpu-moe", type=int, metavar="N", help="the same for the first N of the layers on a GPU"
    ),
    click.option(
        "--override-tensor",
        "-ot",
        multiple=True,
        metavar="PATTERN=CPU,...",
        help="keep weights whose names match in main memory beside the GPUs; can be repeated",
    ),
    click.option("--threads", type=int, metavar="N", help="CPU threads (default: physical cores)"),
    click.option(
        "--mmproj",
        type=_PATH,
        metavar="FILE",
        help="projector, for models that take images (default: the one beside the model; none: no images)",
    ),
    click.option(
        "--lora",
        type=_PATH,
        multiple=True,
        metavar="FILE",
        help="LoRA adapter for the model; can be repeated; every node that computes fetches it",
    ),
    click.option(
        "--lora-scaled",
        multiple=True,
        metavar="FILE:SCALE",
        help="the same with a scale other than 1, as in style.gguf:0.5",
    ),
    click.option("--embeddings", is_flag=True, help="serve embeddings"),
    click.option("--rerank", is_flag=True, help="serve reranking"),
    click.option("--cache-type-k", type=click.Choice(CACHE_TYPES), help="type of cached keys (default: f16)"),
    click.option(
        "--cache-type-v", type=click.Choice(CACHE_TYPES), help="type of cached values (default: f16)"
    ),
    click.option(
        "--engine-set",
        multiple=True,
        metavar="KEY=VALUE",
        help="set a parameter of llama.cpp; can be repeated",
    ),
    click.option("--bin-dir", type=_PATH, metavar="DIR", help="folder of a llama-server that you built"),
    click.option(
        "--console",
        type=int,
        is_flag=False,
        flag_value=CONSOLE_PORT,
        metavar="[PORT]",
        help=f"start the web console on loopback (port {CONSOLE_PORT}; 0: any free port) and open it in a "
        "browser if there is one (not with MESH_LLM_NO_BROWSER=1)",
    ),
    click.option("--name", metavar="NAME", default="", help="this node's name (default: the machine's)"),
    home_option,
    click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True),
    click.option(
        "--plain", is_flag=True, help="plain lines, no live view (the default in a pipe, or if TERM=dumb)"
    ),
    debug_option,
    click.option(
        "--trace", type=_PATH, metavar="FILE", help="write every command of the link protocol to this file"
    ),
]


def node_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def options_named(*names: str) -> Callable[[F], F]:
    """Some of a node's options, for another verb that takes them."""

    def add(function: F) -> F:
        for option in reversed(_OPTIONS):
            if _parameter(option).name in names:
                function = option(function)
        return function

    return add


def node_parameters() -> dict[str, click.Option]:
    """By their flags, without the dashes."""
    return {found.opts[0].removeprefix("--"): found for found in map(_parameter, _OPTIONS)}


def _parameter(option: Callable[[Any], Any]) -> click.Option:
    def bare() -> None:
        """Gets the option, to be asked for it."""

    found: click.Option = option(bare).__click_params__[0]
    return found


def only_beside(choice: str, *names: str) -> None:
    """Refuse whatever else was typed: beside `choice`, these parameters alone do something."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name is not None and parameter.name not in names and _is_typed(parameter.name):
            raise UsageError(
                f"{choice} and {parameter.opts[0]} cannot be used together", hint="leave one of them out"
            )


def _is_typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def home_path(given: Path | None) -> Path:
    from mesh_llm.home import default_home

    return given or default_home()


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0", "false", "no")


def node_config(options: dict[str, Any]) -> NodeConfig:
    """What the options ask for, checked."""
    from mesh_llm.config import NodeConfig, parse_lend
    from mesh_llm.engine.spec import parse_setting
    from mesh_llm.types import HostingMode

    if options["join"] == "":
        raise UsageError("--join is empty")
    if options["join"] == options["api_key"] == "-":
        raise UsageError("--join - and --api-key - cannot both read standard input")
    bin_dir = options["bin_dir"]
    return NodeConfig(
        **{name: options[name] for name in _AS_THEY_ARE},
        **planned(options),
        join=secret.read("--join", options["join"]),
        bind_ip=options["bind_ip"] or os.environ.get(VARIABLES["bind-ip"]) or None,
        relay_token=secret.read("--token", None),
        no_relay=options["no_relay"] or _is_set(VARIABLES["no-relay"]),
        hosting=HostingMode(options["hosting"]),
        lend=parse_lend(options["lend"]),
        api_key=secret.read("--api-key", options["api_key"] or None),
        lora=adapters(options),
        settings=dict(parse_setting(text) for text in options["engine_set"]),
        bin_dir=bin_dir.expanduser().resolve() if bin_dir else None,
        trace=options["trace"].expanduser().absolute() if options["trace"] else None,
    )


def adapters(options: dict[str, Any]) -> tuple[tuple[Path, float], ...]:
    """Those of --lora and --lora-scaled."""
    from mesh_llm.config import parse_scaled

    plain = ((path.expanduser().resolve(), 1.0) for path in options["lora"])
    return (*plain, *map(parse_scaled, options["lora_scaled"]))


def planned(options: dict[str, Any]) -> dict[str, Any]:
    """Those that `mesh-llm plan` takes, too, as `NodeConfig` calls them."""
    from mesh_llm.config import parse_memory, parse_override
    from mesh_llm.mesh_settings import MESH_OPTIONS

    models = tuple(options["model"] or ())
    if "" in models:
        raise UsageError("--model is empty")
    same = ("draft", "draft_max", "no_draft", "gpu_layers", "cpu_moe", "n_cpu_moe", "threads")
    known = {
        "home": home_path(options["home"]),
        "model": models[0] if models else None,
        "more_models": models[1:],
        "max_memory_bytes": parse_memory(options["max_memory"])
        if options["max_memory"] is not None
        else None,
        "devices": tuple(options["device"].split(",")) if options["device"] is not None else None,
        "override_tensor": tuple(
            each for text in options["override_tensor"] or () for each in parse_override(text)
        ),
        **{name: options[name] for name in same},
    }
    for name, option in MESH_OPTIONS.items():
        if (value := options[option.argument]) not in (None, ""):
            known[name] = option.parse(value)
    return known
