"""`mesh-llm demo`: a node on this machine, one question, the figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click

from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_path, json_option
from mesh_llm.cli.output import Output, print_json, print_table, set_up_logging
from mesh_llm.cli.run import run_loop
from mesh_llm.config import NodeConfig
from mesh_llm.defaults import API_PORT, DEFAULT_MODEL, DEMO_ANSWER_TOKENS, DEMO_QUESTION, DEMO_READY_S
from mesh_llm.errors import MeshError, PortInUse
from mesh_llm.home import Home
from mesh_llm.node import Node
from mesh_llm.types import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    prompt_tok_s: float
    decode_tok_s: float


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--once", is_flag=True, help="end after the answer instead of serving on")
@click.option("--port", type=int, default=API_PORT, show_default=True, help="API port; any free one if taken")
@json_option
@debug_option
def demo(model: str, once: bool, port: int, as_json: bool, debug: bool) -> None:
    """Run MODEL on this machine, ask it one question and show the figures.

    In a terminal it serves on until Ctrl-C. `mesh-llm demo stop` ends a demo
    that runs elsewhere.
    """
    home = Home(home_path(None) / "demo")
    if model == "stop":
        asyncio.run(call(home, "POST", "/api/stop"))
        return
    home.create()
    set_up_logging(home.log_folder / "node.log", debug=debug, log_format="text")
    stay = sys.stdin.isatty() and sys.stdout.isatty() and not once
    with Output() as output:
        status = run_loop(_demo(home.path, model, port, output, stay=stay, as_json=as_json))
    raise SystemExit(status)


async def _demo(home: Path, model: str, port: int, output: Output, *, stay: bool, as_json: bool) -> int:
    """Every signal ends the demo; only Ctrl-C before the answer counts as interrupted."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupted.set)
    try:
        return await _ask_and_stay(home, model, port, output, interrupted, stay=stay, as_json=as_json)
    except PortInUse:
        # A demo has no reason to insist on its port, least of all beside a node that is running already.
        return await _ask_and_stay(home, model, 0, output, interrupted, stay=stay, as_json=as_json)


async def _ask_and_stay(
    home: Path,
    model: str,
    port: int,
    output: Output,
    interrupted: asyncio.Event,
    *,
    stay: bool,
    as_json: bool,
) -> int:
    tell = output.note_event if as_json else output.event
    node = Node(NodeConfig(home=home, model=model, port=port), tell=tell, progress=output.progress)
    running = asyncio.create_task(node.run(), name="node")
    stopped = asyncio.create_task(interrupted.wait(), name="interrupt")
    asking = asyncio.create_task(_ask(node, running, echo=not as_json), name="question")
    try:
        await asyncio.wait((asking, running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            return 0
        if not asking.done():
            return 130
        document = await node.status()
        _show(document, asking.result(), as_json=as_json)
        if stay:
            output.note("Serving on; Ctrl-C ends it")
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        asking.cancel()
        stopped.cancel()
        node.stop()
        await asyncio.wait((asking, stopped, running))
        if not running.cancelled():
            with contextlib.suppress(MeshError):
                running.result()


async def _ask(node: Node, running: asyncio.Task[None], *, echo: bool) -> Answer:
    async with asyncio.timeout(DEMO_READY_S):
        while node.health().state is not State.SERVING and not running.done():
            await asyncio.sleep(0.02)
    if echo:
        click.echo(f"\nQuestion: {DEMO_QUESTION}\nAnswer:   ", nl=False)
    body = {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": DEMO_QUESTION},
        ],
        "temperature": 0,
        "max_tokens": DEMO_ANSWER_TOKENS,
        "stream": True,
        "timings_per_token": True,
    }
    text = ""
    timings: dict[str, float] = {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{node.url}/v1/chat/completions", json=body) as response,
    ):
        async for line in response.content:
            chunk = _chunk(line)
            if "error" in chunk:
                raise MeshError(f"the answer broke off: {chunk['error']['message']}")
            piece = _piece(chunk)
            text += piece
            timings = chunk.get("timings", timings)
            if echo:
                click.echo(piece, nl=False)
    if echo:
        click.echo("\n")
    return Answer(
        text=text,
        prompt_tok_s=timings.get("prompt_per_second", 0.0),
        decode_tok_s=timings.get("predicted_per_second", 0.0),
    )


def _chunk(line: bytes) -> dict[str, Any]:
    data = line.decode().removeprefix("data:").strip()
    if not line.startswith(b"data:") or data == "[DONE]":
        return {}
    document: dict[str, Any] = json.loads(data)
    return document


def _piece(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def _show(status: dict[str, Any], answer: Answer, *, as_json: bool) -> None:
    member = status["mesh"]["nodes"][0]
    if as_json:
        figures = {
            "model": status["model"]["name"],
            "devices": member["devices"],
            "load_s": status["engine"]["ready_s"],
            "prompt_tok_s": round(answer.prompt_tok_s, 1),
            "decode_tok_s": round(answer.decode_tok_s, 1),
            "weights_sent_bytes": status["engine"]["weights_sent_bytes"],
            "answer": answer.text,
            "api": status["api"]["url"],
        }
        print_json(figures)
        return
    print_table(
        [
            ("model", f"{status['model']['name']} ({status['model']['quantisation']})"),
            ("devices", ", ".join(member["devices"])),
            ("load time", f"{status['engine']['ready_s']:.1f} s"),
            ("prompt", f"{answer.prompt_tok_s:.1f} tok/s"),
            ("decode", f"{answer.decode_tok_s:.1f} tok/s"),
            ("api", status["api"]["url"]),
        ]
    )
