"""Meshes, delays and networks on one machine, for tests, benches and the demo.

cluster     a mesh of real nodes, each a process with its own home
member      program: a node of such a mesh, which ends with whoever started it
split       a split engine without a mesh: worker children, links, an engine child
delay       lines: links that are slow, narrow or lossy
addresses   the two addresses of a line, as people write them
conditions  what one way of a line does to what passes
delay_queue  hands things on when their time has come
datagrams   UDP through a line
rpc_proxy   stock ggml-rpc through a line: only what computes is slowed, and everything is counted
chaos       a mesh under load while things are done to it
quic        links over QUIC between two processes
simulate    meshes of thousands of nodes in one process
"""
