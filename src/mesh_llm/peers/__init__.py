"""The other nodes of the mesh.

mesh             the members, the connections to them, what this node tells them
members          what this node knows of the members: who is here, what they offer
trust            what this node signs, and what it believes of others
claims_exchange  passes settings and revocations from node to node
own_machine      who else is on this node's machine
paths            the path to each member: kind, delay, traffic
data_links       data links for children, and HTTP to the host's engine
link_measuring   links that are only measured
forwarding       streams between two members that reach each other only through a third
model_plans      the plans of each model, and what others leave of the mesh
model_demand     who waits for a model that is loaded on demand, and when it goes
remote_engine    another node's engine, as this node's gateway uses it
"""
