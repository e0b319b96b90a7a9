"""One machine's part in a mesh: the composition root and what it is composed of.

node        the life of a node, from its home to its last child
entry       how it gets into its mesh, and what its home remembers of it
supply      where the mesh's model comes from; shelf: the models that were read
equipment   what this machine brings: libraries, devices, memory, speed
mesh        the members, the connections to them, what this node tells them
ways        of what kind the ways to others are, how long, and what crosses them
hosting     drives the plans that this node hosts; run: one plan, brought up
abilities   what a model does beside text
launch      from a plan to what the children are told
lending     this machine's device, lent to the hosts of plans
passage     links and HTTP to other nodes, over whatever way there is
remote      the engine of another node, as this one's gateway uses it; hearsay: what others say
desk        the streams that other members open; forwarding: those that only pass through
words       what a run says of itself; herald: to whom it says what
management  what it can be told to do; rest: the model out of its memory, at its user's word
window      what those see who watch a node; farewell: how it goes
status      what `mesh-llm status` shows; forecast: what `mesh-llm plan` does
tokens      where a token's time goes; history: the last minutes; news: what changed in the mesh
metrics     the node's series in `/metrics`; families: how they are written; processes: what its children use
"""

from mesh_llm.node.node import Node

__all__ = ["Node"]
