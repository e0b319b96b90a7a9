"""One machine's part in a mesh: wires the other packages together.

node              the life of a node, from its home to its last child
node_state        what it is doing, derived in one place
served_models     the models of the mesh, and the service for each
model_service     all that it does for one model
model_control     which models are served, as owners say while it runs
model_state       what it is doing for one model
engines           which engines answer its API: its own, or other nodes'
joining           how it gets into its mesh, and what its home remembers of it
home_upgrade      homes that an earlier version wrote
invites           invites that it makes and revokes, members that it makes owners
pairing           lets a machine of the local network in by a code
api_keys          keys of its API, as its page and command line ask for them
sharing           guests on the local network: a port, and a key for each
model_supply      where a model comes from
layer_supply      the layers that a worker has of a model, without the rest
peer_sources      members that a file can be fetched from
side_file_supply  where files come from that go with it
file_watch        notices model files that are replaced while it runs
model_offers      which models members are told of, and given
incoming_streams  the streams that other members open, by kind
node_console      feeds the console, and opens its port
announcements     what it says to terminal, log and console
cpu_library       compiles what the processor is quicker with, while the node answers
unload            takes the model out of memory when the user asks
polite_lending    pauses while its user needs the machine, or says so
drain             how it ends: others take over, answers finish
"""

from mesh_llm.node.node import Node

__all__ = ["Node"]
