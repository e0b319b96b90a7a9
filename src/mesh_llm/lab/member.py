"""Program: a node of a local cluster, which lives no longer than whoever started it.

It loads its modules, then waits for its first line of input: its `MemberPart`, as
JSON. The line `stop` asks it to stop as Ctrl-C does. The end of its input
means that its owner is gone: then it ends at once. What a node tells goes to
stdout, one JSON document per line; a failure is the last of them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Self

from mesh_llm.cli.output import set_up_logging
from mesh_llm.cli.serve import run_loop
from mesh_llm.config import NodeConfig
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.lab.delay import joined
from mesh_llm.node import Node
from mesh_llm.types import Event, EventSink, HostingMode, NodeId, Progress, ProgressSink


@frozen
class MemberPart:
    """What one node of a cluster is to be."""

    home: str
    name: str
    model: str | None
    port: int
    threads: int
    hosts: bool
    split: bool = False
    """The creator's alone, as all plan options."""
    join: str | None = field(default=None, repr=False)
    delays_s: dict[str, float] = field(default_factory=dict)
    """One way, on data links to other nodes, by their ids."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        return cls(**json.loads(line))

    def config(self) -> NodeConfig:
        """Of a node whose packets stay on this machine."""
        return NodeConfig(
            home=Path(self.home),
            name=self.name,
            model=self.model,
            port=self.port,
            threads=self.threads,
            hosting=HostingMode.PREFER if self.hosts else HostingMode.AUTO,
            split=self.split,
            join=self.join,
            new_mesh=self.join is None,
            bind_ip="127.0.0.1",
            no_relay=True,
        )


class MemberNode(Node):
    """A node whose data links are as long as its part says."""

    def __init__(self, part: MemberPart, *, tell: EventSink, progress: ProgressSink) -> None:
        super().__init__(part.config(), tell=tell, progress=progress)
        self._delays_s = part.delays_s

    def _compose(self) -> None:
        super()._compose()
        self.mesh.paths.farther_s = lambda node: 2 * self._delays_s.get(node, 0.0)
        self.data_links.through = self._through

    def _through(self, node: NodeId, link: socket.socket) -> socket.socket:
        delay_s = self._delays_s.get(node, 0.0)
        return joined(link, delay_s=delay_s) if delay_s else link

    def obey(self, line: bytes) -> None:
        """Do what the owner says."""
        self.stop()


def main() -> None:
    run_member(lambda line: MemberNode(MemberPart.from_line(line), tell=tell, progress=progress))


def run_member(make: Callable[[bytes], MemberNode]) -> None:
    # Its owner ends it through its input, or by killing its session.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_loop(_live(make))


async def _live(make: Callable[[bytes], MemberNode]) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = await lines.readline()
    if not first:
        return
    node = make(first)
    node.home.create()
    set_up_logging(node.home.log_folder / "node.log", debug=False, log_format="text")
    running = asyncio.create_task(node.run(), name="node")
    told = asyncio.create_task(_obeyed(node, lines), name="owner")
    loop.add_signal_handler(signal.SIGTERM, node.stop)
    try:
        await asyncio.wait((running, told), return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()
        if not running.done():
            running.cancel()
        await asyncio.wait((running, told))
    if not running.cancelled() and isinstance(error := running.exception(), MeshError):
        say({"failed": error.message, "hint": error.hint})
    elif not running.cancelled():
        running.result()


async def _obeyed(node: MemberNode, lines: asyncio.StreamReader) -> None:
    """Returns when nobody is there to say anything any more."""
    while line := await lines.readline():
        node.obey(line)


def tell(event: Event) -> None:
    say({"event": event.kind, "text": event.text})


def progress(step: Progress) -> None:
    say({"progress": asdict(step)})


def say(document: dict[str, Any]) -> None:
    # Without an owner nobody listens; the end of the input says so, too.
    with suppress(BrokenPipeError):
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
