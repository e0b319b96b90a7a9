"""Nodes among themselves: who is who, how one gets in, and how bytes get across.

identity     the key that a node is known by
invite       the token that a person copies; admissions: those that this node gave out
credential   what makes a node a member after it came in: grants, back to the mesh's creator
framing      control messages as bytes
handshake    what two nodes tell each other before anything else
peer, stream a member that is connected; a stream to it
network      the endpoint: it dials, accepts, and keeps one connection per member
quic         the only place that touches iroh's generated code
relay_…      `mesh-llm relay`: protocol, limits, who may connect, the server
"""
