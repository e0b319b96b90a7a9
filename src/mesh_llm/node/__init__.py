"""One machine's part in a mesh: wires the other packages together.

node              the life of a node, from its home to its last child
node_state        what it is doing, derived in one place
engines           which engine answers its API: its own, or another node's
joining           how it gets into its mesh, and what its home remembers of it
home_upgrade      homes that an earlier version wrote
invites           invites that it makes and revokes, members that it makes owners
model_supply      where the mesh's model comes from
side_file_supply  where files come from that go with it
incoming_streams  the streams that other members open, by kind
node_console      feeds the console, and opens its port
announcements     what it says to terminal, log and console
cpu_library       compiles what the processor is quicker with, while the node answers
unload            takes the model out of memory when the user asks
drain             how it ends: others take over, answers finish
"""

from mesh_llm.node.node import Node

__all__ = ["Node"]
