"""`mesh-llm demo`: a mesh on this machine, one question, the figures."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import click

from mesh_llm.cli import signals, tables
from mesh_llm.cli.control import call, wait_until_gone
from mesh_llm.cli.options import debug_option, json_option
from mesh_llm.cli.output import Output, print_json, print_table, set_up_logging
from mesh_llm.cli.serve import run_loop
from mesh_llm.defaults import API_PORT, DEFAULT_MODEL, DEMO_ANSWER_TOKENS, DEMO_QUESTION
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home, demo_home
from mesh_llm.lab.cluster import Cluster, ClusterSpec, cluster
from mesh_llm.status_schema import MemberStatus, PlanStageStatus, Status, from_document
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event

_TOLD = ("model", "build", "engine", "elected", "ready", "api")
"""Events that belong into the picture: nobody has to carry a token in a demo."""


@frozen
class DemoAnswer:
    text: str
    prompt_tok_s: float
    decode_tok_s: float
    first_token_s: float
    """Since the demo began."""


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option(
    "--nodes", type=click.IntRange(1, 9), default=3, show_default=True, help="nodes on this machine"
)
@click.option(
    "--latency",
    metavar="MS[,MS…]",
    help="one-way delay of the links: one value for all, or one for each node after the first",
)
@click.option("--once", is_flag=True, help="end after the answer instead of serving further requests")
@click.option(
    "--port", type=int, default=API_PORT, show_default=True, help="API port; any free one if it is taken"
)
@json_option
@debug_option
def demo(
    model: str, nodes: int, latency: str | None, once: bool, port: int, as_json: bool, debug: bool
) -> None:
    """Split MODEL over several nodes on this machine, ask it one question and show the figures.

    In a terminal it keeps serving until Ctrl-C. `mesh-llm demo stop` ends a demo
    that runs elsewhere. Each node is a process with a home of its own; nothing
    listens beyond this machine.
    """
    home = Home(demo_home())
    if model == "stop":
        _stop(home)
        return
    spec = ClusterSpec(
        home=home.path, model=model, nodes=nodes, port=_free(port), latency_s=parse_latency(latency)
    )
    home.create()
    set_up_logging(home.log_folder / "demo.log", debug=debug, log_format="text")
    stay = sys.stdin.isatty() and sys.stdout.isatty() and not once
    with Output() as output:
        status = run_loop(_demo(spec, output, stay=stay, as_json=as_json))
    raise SystemExit(status)


def parse_latency(text: str | None) -> tuple[float, ...]:
    """`10` or `5,20`, milliseconds; in seconds."""
    if not text:
        return ()
    try:
        values = tuple(float(part) / 1e3 for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if any(not 0 <= value <= 10 for value in values):
        raise UsageError(
            f"--latency {text} is not a delay: give milliseconds between 0 and 10,000",
            hint="for example 10 or 5,20",
        )
    return values


def _free(port: int) -> int:
    """A demo has no reason to insist on its port, least of all beside a node that is running already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def _stop(home: Home) -> None:
    """Its first node ends, the demo notices, and ends the others: gone is all when the demo is."""
    stopping = asyncio.run(call(home, "POST", "/api/stop"))
    pid, parent = int(stopping["pid"]), int(stopping["parent_pid"])
    wait_until_gone(pid, home)
    wait_until_gone(parent, home)
    click.echo(f"Stopped the demo with pid {parent}")


async def _demo(spec: ClusterSpec, output: Output, *, stay: bool, as_json: bool) -> int:
    """Every signal ends the demo; only Ctrl-C before the answer, or a second one, counts as interrupted."""
    began = time.monotonic()
    interrupted, hurry, answered, ending = (asyncio.Event() for _ in range(4))

    def on_signal() -> None:
        # Also where it is ending by itself.
        (hurry if interrupted.is_set() or ending.is_set() else interrupted).set()

    loop = asyncio.get_running_loop()
    for number in signals.ending():
        loop.add_signal_handler(number, on_signal)

    def tell(event: Event) -> None:
        if event.kind in _TOLD:
            (output.note_event if as_json else output.event)(event)

    async def answer_and_stay() -> None:
        async with cluster(spec, tell=tell, progress=output.progress, hurry=hurry) as mesh:
            await mesh.until_serving()
            answer = await _ask(mesh, began, echo=not as_json)
            _show(await mesh.status(), answer, as_json=as_json)
            answered.set()
            output.note(_next_words(stay=stay))
            if stay:
                await mesh.ended()
            ending.set()

    demo = asyncio.create_task(answer_and_stay(), name="demo")
    stopped = asyncio.create_task(interrupted.wait(), name="interrupt")
    await asyncio.wait((demo, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not demo.done():
        with suppress(OSError):  # a terminal that is gone
            output.note("Stopping; press Ctrl-C again to stop at once")
        await cancelled(demo)
    # What went wrong on the way down is not what the person asked for.
    if not demo.cancelled() and (error := demo.exception()) is not None and not interrupted.is_set():
        raise error
    return 0 if answered.is_set() and not hurry.is_set() else 130


def _next_words(*, stay: bool) -> str:
    """What to type now."""
    command = _command()
    if stay:
        return (
            "Still serving; Ctrl-C ends it. In another terminal:\n"
            f"  {command} chat        talk to it\n"
            f"  {command} status      see which node has what"
        )
    return (
        "That was the demo. Next:\n"
        f"  {command} run {DEFAULT_MODEL}    serve it, and print the token for your other machines\n"
        f"  {command} chat           talk to it, in another terminal\n"
        f"  {command} download       larger models, and which of them fit here"
    )


def _command() -> str:
    """As it can be typed: in a clone it is not on the PATH."""
    typed = sys.argv[0]
    return typed if shutil.which("mesh-llm") is None and Path(typed).name == "mesh-llm" else "mesh-llm"


async def _ask(mesh: Cluster, began: float, *, echo: bool) -> DemoAnswer:
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
    text, first_token_s, is_cut = "", 0.0, False
    timings: dict[str, float] = {}
    url = (await mesh.status())["api"]["url"]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        async for line in response.content:
            chunk = _chunk(line)
            if "error" in chunk:
                raise MeshError(f"the answer was cut off: {chunk['error']['message']}")
            piece = _piece(chunk)
            if piece and not text:
                first_token_s = time.monotonic() - began
            text += piece
            timings = chunk.get("timings", timings)
            is_cut = is_cut or _is_cut(chunk)
            if echo:
                click.echo(piece, nl=False)
    if echo:
        click.echo(" …\n" if is_cut else "\n")
    return DemoAnswer(
        text=text,
        prompt_tok_s=timings.get("prompt_per_second", 0.0),
        decode_tok_s=timings.get("predicted_per_second", 0.0),
        first_token_s=first_token_s,
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


def _is_cut(chunk: dict[str, Any]) -> bool:
    """The answer ends because it may have no more tokens."""
    return any(choice.get("finish_reason") == "length" for choice in chunk.get("choices") or ())


def _show(document: dict[str, Any], answer: DemoAnswer, *, as_json: bool) -> None:
    if as_json:
        print_json(_figures(document, answer))
        return
    status = from_document(Status, document)
    assert status.plan is not None and status.model is not None
    names = tables.members(status.mesh)
    members = {node.id: node for node in status.mesh.nodes}
    print_table(
        [_row(stage, members[stage.node], names) for stage in status.plan.stages],
        headers=("node", "layers", "share", "link", "rtt", "memory"),
    )
    print()
    print_table(
        [
            ("model", f"{status.model.name} ({status.model.quantisation})"),
            (
                "weights",
                f"{_sent(status)} sent, {tables.size(status.engine.weights_resident_bytes)} in memory",
            ),
            ("start", f"{answer.first_token_s:.1f} s until the first token"),
            ("first token", tables.first_token(status.api.first_token)),
            ("prompt", f"{answer.prompt_tok_s:.1f} tok/s"),
            ("predicted", tables.predicted_rate(status.plan)),
            ("decode", f"{answer.decode_tok_s:.1f} tok/s"),
            ("api", status.api.url or ""),
        ]
    )


def _sent(status: Status) -> str:
    sent = status.engine.weights_sent_bytes
    return "0 bytes" if not sent else tables.size(sent)


def _row(stage: PlanStageStatus, node: MemberStatus, names: tables.Names) -> tuple[str, ...]:
    link = node.link
    return (
        tables.place(stage, names),
        tables.layers(stage),
        tables.share(stage),
        link.kind,
        tables.milliseconds(link.rtt_ms) if link.kind != "self" else "-",
        tables.size(stage.need_bytes),
    )


def _figures(status: dict[str, Any], answer: DemoAnswer) -> dict[str, Any]:
    members = {node["id"]: node for node in status["mesh"]["nodes"]}
    return {
        "model": status["model"]["name"],
        "nodes": [
            {
                "name": members[stage["node"]]["name"],
                "devices": members[stage["node"]]["devices"],
                "first": stage["first"],
                "last": stage["last"],
                "share": stage["share"],
                "need_bytes": stage["need_bytes"],
                "link": members[stage["node"]]["link"],
            }
            for stage in status["plan"]["stages"]
        ],
        "load_s": status["engine"]["ready_s"],
        "first_token_s": round(answer.first_token_s, 2),
        "first_token": status["api"]["first_token"],
        "prompt_tok_s": round(answer.prompt_tok_s, 1),
        "predicted_tok_s": status["plan"]["predicted_tok_s"],
        "predicted_tok_s_low": status["plan"]["predicted_tok_s_low"],
        "predicted_tok_s_high": status["plan"]["predicted_tok_s_high"],
        "decode_tok_s": round(answer.decode_tok_s, 1),
        "weights_sent_bytes": status["engine"]["weights_sent_bytes"],
        "answer": answer.text,
        "api": status["api"]["url"],
    }
