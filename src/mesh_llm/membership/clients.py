"""What a member that only uses the API may say: something about itself, nothing about others. Pure.

Records are not signed. A node is trusted to pass on what it heard, as it is trusted to compute; a client's
token is handed out more lightly. It must not call nodes dead, vouch for them, or pose as a host.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.membership.link import digest_of
from mesh_llm.membership.messages import Hears, Message, Ping, Update
from mesh_llm.membership.record import Record
from mesh_llm.types import NodeFacts, NodeId, Role

_HEARS_NOBODY = digest_of(())


def from_client(client: NodeId, message: Message) -> Message:
    """The message, without what is not the client's to say."""
    match message:
        case Update(records=records):
            return Update(records=tuple(_own(record) for record in records if record.node == client))
        case Hears():
            return Hears(nodes=())
        case Ping():
            return replace(message, hears=_HEARS_NOBODY)
        case _:
            return message


def _own(record: Record) -> Record:
    facts = record.facts
    return record if facts is None else replace(record, facts=_harmless(facts), size_bytes=0)


def _harmless(facts: NodeFacts) -> NodeFacts:
    """Lends nothing, hosts nothing, sets nothing."""
    return NodeFacts(
        name=facts.name,
        role=Role.CLIENT,
        version=facts.version,
        address=facts.address,
        links=facts.links,
        state=facts.state,
        reason=facts.reason,
    )
