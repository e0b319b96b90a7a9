"""The streams that other members open to this node, by kind."""

from __future__ import annotations

from typing import Any

from mesh_llm.errors import LinkRefused, MeshError
from mesh_llm.gateway.warm_prefixes import WarmPrefixes, checked_digests
from mesh_llm.host.hosting import Hosting
from mesh_llm.node.model_offers import ModelOffers
from mesh_llm.peers.data_links import DataLinks
from mesh_llm.peers.trust import Origin, Service
from mesh_llm.report import status
from mesh_llm.report.history import History
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import LoadStatus, to_document
from mesh_llm.transport.network import Stream
from mesh_llm.types import LinkKind, NodeId
from mesh_llm.worker.lending import device_of


class IncomingStreams:
    def __init__(
        self,
        view: NodeView,
        data_links: DataLinks,
        offers: ModelOffers,
        history: History,
        warm: WarmPrefixes,
    ) -> None:
        """`warm`: what engines here have read."""
        self._view = view
        self._warm = warm
        self._data_links = data_links
        self._history = history
        lending = view.lending
        self.services: dict[str, Service] = {
            "http": self._http,
            "serving": self._serving,
            "introduce": self._introduce,
            "lease": lambda origin, header, stream: lending.serve_lease(origin.id, header, stream),
            "link": lambda origin, header, stream: data_links.serve_link(origin.id, header, stream),
            "file": lambda origin, header, stream: offers.serve_file(origin.id, header, stream),
        }

    async def _http(self, origin: Origin, header: dict[str, Any], stream: Stream) -> None:
        """A connection to the engine, for the gateway of another node."""
        epoch = header.get("epoch")
        if not isinstance(epoch, int) or all(each.find(epoch) is None for each in self._hosting()):
            stream.reset()
            return
        await self._data_links.serve_http(origin.account, header, stream)

    async def _serving(self, origin: Origin, header: dict[str, Any], stream: Stream) -> None:
        """What is served here."""
        epoch = header.get("epoch")
        served = ((view, view.hosting.serving) for view in self._view.models())
        found = next(((view, run) for view, run in served if run is not None and run.epoch == epoch), None)
        if found is None or found[1].port is None:
            await stream.write_document({})
        elif "beginnings" in header:
            read = self._warm.longest(found[1].engine_address()[0], checked_digests(header["beginnings"]))
            turns = found[0].slot_queue
            load = LoadStatus(taken=turns.taken, waiting=turns.waiting, turn_s=turns.turn_s, read=read)
            await stream.write_document({"epoch": epoch, "load": to_document(load)})
        elif "samples_since" in header:
            await stream.write_document({"samples": self._history.since(header["samples_since"])})
        else:
            document = to_document(await status.serving(self._view, found[0]))
            await stream.write_document({**document, "epoch": epoch})
        await stream.finish()

    def _hosting(self) -> list[Hosting]:
        return [view.hosting for view in self._view.models()]

    async def _introduce(self, origin: Origin, header: dict[str, Any], stream: Stream) -> None:
        """Link this node's worker to the next one of a plan, on its host's word."""
        lending, host = self._view.lending, origin.id
        try:
            match header:
                case {"epoch": int(epoch), "number": int(number), "next": str(following)}:
                    lease = lending.lease_of(host, epoch, device_of(header))
                case _:
                    raise LinkRefused("this is not an introduction")
            device = device_of(header, "next_device")
            if following == self._view.id:
                await lending.join(lease, lending.lease_of(host, epoch, device), number)
                kind = LinkKind.LOCAL
            else:
                purpose = {"kind": "neighbour", "host": host, "epoch": epoch, "number": number}
                link = await self._data_links.link(NodeId(following), {**purpose, "device": device})
                await lending.add_next(lease, number, link.socket)
                kind = link.kind
            await stream.write_document({"linked": True, "kind": kind.value})
        except MeshError as error:
            await stream.write_document({"refused": error.message})
        await stream.finish()
