"""`mesh-llm` and `mesh-llm serve`: run a node in the foreground."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import click

from mesh_llm.cli.browser import open_page
from mesh_llm.cli.options import node_options, run_with_options
from mesh_llm.cli.output import Output, set_up_logging
from mesh_llm.config import NodeConfig
from mesh_llm.home import Home
from mesh_llm.node import Node
from mesh_llm.types import Event

T = TypeVar("T")


@click.command()
@node_options
def serve(**options: Any) -> None:
    """Run a node: load the model and answer until Ctrl-C."""
    run_with_options(options)


def run_node(config: NodeConfig, *, debug: bool, log_format: str) -> int:
    home = Home(config.home)
    home.create()
    set_up_logging(home.log_folder / "node.log", debug=debug, log_format=log_format)
    with Output(log_format=log_format) as output:

        def tell(event: Event) -> None:
            output.event(event)
            if event.kind == "console":
                open_page(event.text.rpartition(" ")[2])

        return run_loop(until_stopped(Node(config, tell=tell, progress=output.progress), output))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on the loop for what runs long and relays much: half the CPU time for each token."""
    # Here: of all commands only those that run a node need it.
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def until_stopped(node: Node, output: Output) -> int:
    """Run `node`. The first Ctrl-C drains and stops it, the second stops it at once."""
    running = asyncio.create_task(node.run(), name="node")
    caught: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        caught.append(number)
        if len(caught) == 1:
            node.stop()
            # A terminal that is gone must not keep it from stopping.
            with suppress(OSError):
                output.note("Stopping; Ctrl-C again does not wait for answers under way")
        else:
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await running
    except asyncio.CancelledError:
        if not caught:
            raise
    return 130 if signal.SIGINT in caught else 0
