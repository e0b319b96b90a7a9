"""One machine's part in a mesh: the composition root and what it is composed of.

node        the life of a node, from its home to its last child
equipment   what this machine brings: libraries, devices, memory, speed
catalogue   which model the mesh serves, and where its files lie here
mesh        the members, the connections to them, what this node tells them
forwarding  streams of others that pass through this node
hosting     drives the plans that this node hosts: prepare, engine, publish
lending     this machine's device, lent to the host of a plan
passage     links and HTTP to other nodes, over whatever way there is
status      what `mesh-llm status` shows
forecast    what `mesh-llm plan` shows
"""

from mesh_llm.node.node import Node

__all__ = ["Node"]
