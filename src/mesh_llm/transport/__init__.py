"""Who is who, how a node gets in, and how bytes get across.

identity             the key that a node is known by
invite               the token that a person copies
admissions           the invites that this node gave out
failed_attempts      how many failed attempts are tolerated
handshake            what two nodes tell each other first
credential           proof of membership: grants, back to the mesh's creator
claims               verifies what members say: the one place
revocations          invites that were revoked, and whom that concerns
own_membership       which mesh this node belongs to, whom it let in, and what its owners have claimed
owners_settings      the mesh's settings as an owner has signed them
network              the endpoint: it dials, accepts, and keeps one connection per member
dialler              connections that this node opens
pending_connections  connections from strangers, until they are admitted or refused
connections          the one connection that counts for each member
close_codes          why a connection ends
peer                 a member that is connected
control_stream       the first stream of a connection
framing              control messages as bytes
stream               a stream to another node
stream_gate          streams that arrive before and after admission
direct_links         data links that need no QUIC: unix sockets and plain TCP, opened with tickets
link_meter           measures a link
splice               joins a child's socket to a QUIC stream
native_splice        the same in threads of a native library
endpoint             iroh's endpoint, bound as the user asked
iroh_library         loads iroh when it is first needed
"""
