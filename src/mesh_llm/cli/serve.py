"""`mesh-llm` and `mesh-llm serve`: run a node in the foreground."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import click

from mesh_llm.cli import signals, tables
from mesh_llm.cli.browser import open_page
from mesh_llm.cli.config_file import Configured
from mesh_llm.cli.control import answers
from mesh_llm.cli.live import Live
from mesh_llm.cli.options import home_path, node_config, node_options
from mesh_llm.cli.output import Output, is_terminal, set_up_logging
from mesh_llm.cli.terminal import Terminal, is_live
from mesh_llm.config import NodeConfig
from mesh_llm.home import Home
from mesh_llm.node import Node
from mesh_llm.status_schema import Status
from mesh_llm.tasks import cancelled
from mesh_llm.types import Event

log = logging.getLogger(__name__)

T = TypeVar("T")


@click.command(cls=Configured)
@node_options
def serve(**options: Any) -> None:
    """Run a node: load the model and answer until Ctrl-C."""
    run_with_options(node_config(options), options)


@click.command(cls=Configured)
@click.argument("chosen", metavar="MODEL")
@node_options
def run(chosen: str, **options: Any) -> None:
    """Run a node with MODEL: a name, a file, or whatever --model takes.

    Where a node runs already, this is mesh-llm chat --model MODEL: mesh-llm load
    serves one more model there.
    """
    where = Home(home_path(options["home"]))
    if answers(where):
        from mesh_llm.cli.chat import converse

        converse(where, model=chosen)
        return
    options["model"] = (chosen, *(options["model"] or ()))
    run_with_options(node_config(options), options)


def run_with_options(config: NodeConfig, options: dict[str, Any]) -> None:
    status = run_node(
        config, debug=options["debug"], log_format=options["log_format"], plain=options["plain"]
    )
    raise SystemExit(status)


def run_node(config: NodeConfig, *, debug: bool, log_format: str, plain: bool) -> int:
    home = Home(config.home)
    home.create()
    set_up_logging(home.log_folder / "node.log", debug=debug, log_format=log_format)
    # Log lines on the same terminal would be written across the picture.
    logs_there = debug and is_terminal(sys.stderr)
    watched = is_live() and log_format == "text" and not plain and not logs_there
    with Output(log_format=log_format) as output, Terminal() if watched else nullcontext() as terminal:
        live = output.live = None if terminal is None else Live(terminal)

        def tell(event: Event) -> None:
            output.event(event)
            if event.kind == "console":
                open_page(event.text.rpartition(" ")[2])

        return run_loop(until_stopped(Node(config, tell=tell, progress=output.progress), output, live))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on the loop for what runs long and relays much: half the CPU time for each token."""
    # Here: of all commands only those that run a node need it.
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def until_stopped(node: Node, output: Output, live: Live | None) -> int:
    """Run `node`. Ctrl-C and `q` drain and stop it; another Ctrl-C stops it at once."""
    running = asyncio.create_task(node.run(), name="node")
    caught: list[signal.Signals] = []
    stopping = failed = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            return
        stopping = True
        node.stop()
        # A terminal that is gone must not keep it from stopping.
        with suppress(OSError):
            output.note("Stopping after open answers; press Ctrl-C again to stop at once")

    def on_signal(number: signal.Signals) -> None:
        caught.append(number)
        if stopping:
            running.cancel()
        else:
            stop()

    loop = asyncio.get_running_loop()
    for number in signals.ending():
        loop.add_signal_handler(number, on_signal, number)
    watching = asyncio.create_task(_watch(node, live, stop), name="live view")
    try:
        await running
        # A terminal that is gone must not make it a failure.
        with suppress(OSError):
            output.note("Stopped")
    except asyncio.CancelledError:
        if not caught:
            raise
    except Exception as error:
        # What went wrong on the way down is said; Ctrl-C is still how it ended.
        if not stopping:
            raise
        failed = True
        log.exception("stopping failed")
        with suppress(OSError):
            output.note(f"Stopped, but not cleanly: {error}")
    finally:
        await cancelled(watching)
    return 130 if signal.SIGINT in caught else int(failed)


def quit_question(status: Status) -> str:
    """What to ask before this node is stopped by a key; empty where nobody else notices."""
    names = tables.members(status.mesh)
    others = [each for each in status.mesh.nodes if each.id != status.node.id and each.standing == "alive"]
    if status.node.role not in ("host", "worker"):
        # Of others only its own clients would miss it.
        others = [each for each in others if each.role == "client"]
    if not others:
        return ""
    who = names[others[0].id] if len(others) == 1 else f"{len(others)} others"
    return f"{who} may be using this node: q again stops it, any other key does not"


async def _watch(node: Node, live: Live | None, stop: Callable[[], None]) -> None:
    if live is None:
        return

    async def status() -> dict[str, Any] | None:
        # Before its parts are there, it has nothing to say.
        return await node.status() if hasattr(node, "view") else None

    live.on_quit = stop
    live.question = quit_question
    try:
        await live.run(status)
    except Exception:
        # The picture is not worth a node that others compute with.
        log.exception("the live view failed")
        live.close()
