"""`mesh-llm relay`: a relay server in the foreground."""

from __future__ import annotations

import asyncio
import re
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli import secret, signals
from mesh_llm.cli.options import debug_option
from mesh_llm.cli.output import Output, set_up_logging
from mesh_llm.cli.serve import run_loop
from mesh_llm.config import parse_size
from mesh_llm.defaults import RELAY_CLIENT_BYTES_S, RELAY_CLIENTS, RELAY_CLIENTS_SPARE, RELAY_PER_ADDRESS
from mesh_llm.errors import PortInUse, UsageError
from mesh_llm.gateway import ports
from mesh_llm.relay.limits import RelayLimits
from mesh_llm.relay.server import RelayConfig, RelayServer
from mesh_llm.transport.identity import is_node_id
from mesh_llm.types import Event

RELAY_LISTEN = "127.0.0.1:3340"
"""Loopback, as for the API: what is open to the network has to be asked for. The port is nobody else's."""


TOKEN_VARIABLE = secret.VARIABLES["--token"]

_PATH = click.Path(path_type=Path)
_LISTEN = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>\d{1,5}))?")
_FILES_SPARE = 64
"""Descriptors of the process itself: logs, libraries, the event loop."""


@click.command()
@click.option(
    "--listen", "where", metavar="ADDR:PORT", default=RELAY_LISTEN, show_default=True, help="address"
)
@click.option("--tls-cert", type=_PATH, metavar="FILE", help="serve HTTPS with this certificate")
@click.option("--tls-key", type=_PATH, metavar="FILE", help="private key for --tls-cert")
@click.option(
    "--token", metavar="TOKEN|@FILE|-", help=f"token that every node must send (also {TOKEN_VARIABLE})"
)
@click.option("--allow", multiple=True, metavar="NODE_ID", help="admit only this node; can be repeated")
@click.option(
    "--metrics", is_flag=True, help="serve Prometheus metrics at /metrics, to this machine or with the token"
)
@click.option(
    "--max-clients",
    type=click.IntRange(1),
    default=RELAY_CLIENTS,
    show_default=True,
    help="most nodes at once",
)
@click.option(
    "--per-address",
    type=click.IntRange(0),
    default=RELAY_PER_ADDRESS,
    show_default=True,
    help="most connections from one IP address; 0: no limit, for a proxy",
)
@click.option(
    "--rate",
    metavar="SIZE",
    default=f"{RELAY_CLIENT_BYTES_S / 1e6:g}MB",
    show_default=True,
    help="most that one node may send in a second",
)
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True)
@debug_option
def relay(log_format: str, debug: bool, **options: Any) -> None:
    """Run a relay for nodes that cannot reach each other, until Ctrl-C.

    The nodes encrypt what it passes on. On any address but loopback it needs a token
    or a list of nodes.
    """
    set_up_logging(None, debug=debug, log_format=log_format)
    with Output(log_format=log_format) as output:
        raise SystemExit(run_loop(_run(options, output)))


async def _run(options: dict[str, Any], output: Output) -> int:
    host, port = parse_listen(options["where"])
    config = _config(options)
    config.check(host)
    if options["tls_key"] is not None and options["tls_cert"] is None:
        raise UsageError("--tls-key needs --tls-cert")
    tls = None if options["tls_cert"] is None else ports.tls(options["tls_cert"], options["tls_key"])
    _allow_files(config.limits.clients + RELAY_CLIENTS_SPARE + _FILES_SPARE)
    try:
        listener = ports.bind(host, port)
    except PortInUse as error:
        raise PortInUse(error.message, hint="--listen ADDR:0 takes any free port") from None
    server = RelayServer(config)
    stopped = _on_signals(output)
    await server.start(listener, tls)
    try:
        _introduce(_url(host, server.port, tls is not None), config, output)
        number = await stopped
    finally:
        await server.stop()
    return 130 if number is signal.SIGINT else 0


def parse_listen(text: str) -> tuple[str, int]:
    """`ADDR:PORT`, with an IPv6 address in brackets; the port may be left out."""
    match = _LISTEN.fullmatch(text)
    port = int(match["port"] or RELAY_LISTEN.rpartition(":")[2]) if match else 1 << 16
    if match is None or port >= 1 << 16:
        raise UsageError(f"--listen {text} is not ADDR:PORT", hint="as in 0.0.0.0:3340 or [::]:3340")
    return match["host"].strip("[]"), port


def _config(options: dict[str, Any]) -> RelayConfig:
    limits = RelayLimits(
        clients=options["max_clients"],
        per_address=options["per_address"],
        client_bytes_s=parse_size(options["rate"]),
    )
    return RelayConfig(
        token=secret.read("--token", options["token"] or None),
        allowed=frozenset(map(_node_id, options["allow"])) if options["allow"] else None,
        metrics=options["metrics"],
        limits=limits,
    )


def _node_id(text: str) -> bytes:
    if not is_node_id(text):
        raise UsageError(f"--allow {text} is not a node's id", hint="mesh-llm status shows it")
    return bytes.fromhex(text)


def _on_signals(output: Output) -> asyncio.Future[signal.Signals]:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if not stopped.done():
            output.note("Stopping")
            stopped.set_result(number)

    for number in signals.ending():
        loop.add_signal_handler(number, on_signal, number)
    return stopped


def _introduce(url: str, config: RelayConfig, output: Output) -> None:
    output.event(Event(kind="relay", text=f"Relay: {url}"))
    variable = f"{TOKEN_VARIABLE}=… " if config.token is not None else ""
    output.event(Event(kind="use", text=f"Nodes use it with: {variable}mesh-llm --relay {url}"))
    if config.allowed is not None:
        output.note(f"It admits {len(config.allowed)} nodes, by their ids")
    if config.metrics:
        output.note(f"Figures: {url}/metrics")


def _url(host: str, port: int, secure: bool) -> str:
    # On all addresses: the machine's name is the best guess at how others reach it.
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return f"http{'s' if secure else ''}://{name}:{port}"


def _allow_files(count: int) -> None:
    """A descriptor for every connection; systems grant 1,024 unless they are asked for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
