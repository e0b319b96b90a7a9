"""The streams that other members open to this node, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_llm.errors import LinkRefused, MeshError
from mesh_llm.peers.mesh import Service
from mesh_llm.peers.trust import Origin
from mesh_llm.report import status
from mesh_llm.transport.network import Stream
from mesh_llm.types import NodeId

if TYPE_CHECKING:
    from mesh_llm.node.node import Node


def services(node: Node) -> dict[str, Service]:
    lending, data_links, model_supply = node.lending, node.data_links, node.model_supply
    return {
        "http": lambda origin, header, stream: _http(node, origin, header, stream),
        "serving": lambda origin, header, stream: _serving(node, header, stream),
        "introduce": lambda origin, header, stream: _introduce(node, origin.id, header, stream),
        "lease": lambda origin, header, stream: lending.serve_lease(origin.id, header, stream),
        "link": lambda origin, header, stream: data_links.serve_link(origin.id, header, stream),
        "file": lambda origin, header, stream: model_supply.serve_file(origin.id, header, stream),
    }


async def _http(node: Node, origin: Origin, header: dict[str, Any], stream: Stream) -> None:
    """A connection to the engine, for the gateway of another node."""
    epoch = header.get("epoch")
    if not isinstance(epoch, int) or node.engine(epoch) is None:
        stream.reset()
        return
    await node.data_links.serve_http(origin.account, header, stream)


async def _serving(node: Node, header: dict[str, Any], stream: Stream) -> None:
    """What is served here."""
    run = node.hosting.serving
    if run is None or run.port is None or header.get("epoch") != run.epoch:
        await stream.write_document({})
    elif "samples_since" in header:
        await stream.write_document({"samples": node.window.history.since(header["samples_since"])})
    else:
        document = await status.serving(node)
        await stream.write_document({**document, "epoch": run.epoch})
    await stream.finish()


async def _introduce(node: Node, host: NodeId, header: dict[str, Any], stream: Stream) -> None:
    """Link this node's worker to the next one of a plan, on its host's word."""
    try:
        match header:
            case {"epoch": int(epoch), "number": int(number), "next": str(following)}:
                lease = node.lending.lease_of(host, epoch)
            case _:
                raise LinkRefused("this is no introduction")
        purpose = {"kind": "neighbour", "host": host, "epoch": epoch, "number": number}
        link = await node.data_links.link(NodeId(following), purpose)
        await node.lending.add_neighbour(lease, number, link.socket)
        await stream.write_document({"linked": True, "kind": link.kind.value})
    except MeshError as error:
        await stream.write_document({"refused": error.message})
    await stream.finish()
