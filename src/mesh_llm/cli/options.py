"""The options of a node: declared once, for `mesh-llm` and `mesh-llm serve`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mesh_llm.defaults import API_LISTEN, API_PORT, DEFAULT_MODEL, DEFAULT_SLOTS
from mesh_llm.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

_PATH = click.Path(path_type=Path)

home_option = click.option(
    "--home", type=_PATH, metavar="DIR", help="the node's state (MESH_LLM_HOME, else ~/.mesh-llm)"
)
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON")
debug_option = click.option("--debug", is_flag=True, help="log everything to stderr, show tracebacks")

_OPTIONS = [
    click.option(
        "--model",
        metavar="NAME|PATH",
        default=DEFAULT_MODEL,
        show_default=True,
        help="GGUF file (any shard of a multi-file one) or a name from mesh-llm download",
    ),
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
        help="API address; beyond loopback it needs --api-key",
    ),
    click.option("--api-key", metavar="KEY", help="asked of API clients; better set MESH_LLM_API_KEY"),
    click.option("--tls-cert", type=_PATH, metavar="FILE", help="serve HTTPS with this certificate"),
    click.option("--tls-key", type=_PATH, metavar="FILE", help="and this key"),
    click.option(
        "--ctx-size", type=int, metavar="N", help="context per slot (default: the largest that fits)"
    ),
    click.option("--parallel", type=int, metavar="N", default=DEFAULT_SLOTS, show_default=True, help="slots"),
    click.option("--max-memory", metavar="SIZE", help="use at most this much main memory (8GB, 500MB)"),
    click.option("--device", metavar="DEV", help="CPU, none, or GPUs by name, as in CUDA0,CUDA1"),
    click.option("--gpu-layers", type=int, metavar="N", help="layers on the GPU (default: all that fit)"),
    click.option("--threads", type=int, metavar="N", help="CPU threads (default: physical cores)"),
    click.option(
        "--mmproj", type=_PATH, metavar="FILE", help="multimodal projector, for models that see images"
    ),
    click.option("--embeddings", is_flag=True, help="serve embeddings"),
    click.option("--rerank", is_flag=True, help="serve reranking"),
    click.option("--cache-type-k", type=click.Choice(_CACHE_TYPES), default="f16", show_default=True),
    click.option("--cache-type-v", type=click.Choice(_CACHE_TYPES), default="f16", show_default=True),
    click.option("--engine-set", multiple=True, metavar="KEY=VALUE", help="a setting of llama.cpp's own"),
    click.option(
        "--bin-dir", type=_PATH, metavar="DIR", help="a llama-server and ggml backends that you built"
    ),
    click.option("--name", metavar="NAME", default="", help="this node's name (default: the machine's)"),
    home_option,
    click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True),
    debug_option,
    click.option(
        "--trace", type=_PATH, metavar="FILE", help="log the link protocol there, command by command"
    ),
]


def node_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def home_path(given: Path | None) -> Path:
    from mesh_llm.home import default_home

    return given or default_home()


def run_with_options(options: dict[str, Any]) -> None:
    """Turn options into a node's configuration, check them, and run it."""
    from mesh_llm.cli.run import run_node
    from mesh_llm.config import NodeConfig, parse_size
    from mesh_llm.engine.spec import parse_setting

    if not options["model"]:
        raise UsageError("--model is empty")
    bin_dir = options["bin_dir"]
    config = NodeConfig(
        home=home_path(options["home"]),
        model=options["model"],
        alias=options["alias"],
        name=options["name"],
        listen=options["listen"],
        port=options["port"],
        api_key=options["api_key"] or os.environ.get("MESH_LLM_API_KEY") or None,
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        context=options["ctx_size"],
        slots=options["parallel"],
        max_memory_bytes=parse_size(options["max_memory"]) if options["max_memory"] else None,
        devices=tuple(options["device"].split(",")) if options["device"] else None,
        gpu_layers=options["gpu_layers"],
        threads=options["threads"],
        cache_type_k=options["cache_type_k"],
        cache_type_v=options["cache_type_v"],
        embeddings=options["embeddings"],
        rerank=options["rerank"],
        mmproj=options["mmproj"],
        settings=dict(parse_setting(text) for text in options["engine_set"]),
        bin_dir=bin_dir.expanduser().resolve() if bin_dir else None,
        trace=options["trace"].expanduser().absolute() if options["trace"] else None,
    )
    raise SystemExit(run_node(config, debug=options["debug"], log_format=options["log_format"]))
