"""What a node tells about itself and its mesh.

view                 what reports may read of a node
status               what `mesh-llm status` shows
key_status           API keys, and what was asked with each
what_if              what `mesh-llm plan` shows
network              what `mesh-llm doctor` asks: addresses, relay, the way to each member
metrics              the node's series in `/metrics`
metric_families      how such series are written
history              the last minutes, kept by the host
events               what has changed in the mesh
traffic              what crosses to each peer
token_latency        where a token's time goes
time_to_first_token  measured and predicted
plan_experience      what plans show while they run, beside what was predicted
experience_file      kept for the next prediction
process_usage        what this node's processes use
"""
