"""Meshes, delays and networks on one machine, for tests, benches and the demo.

cluster     a mesh of real nodes, each a process with its own home
member      program: a node of such a mesh, which ends with whoever started it
split       a split engine without a mesh: worker children, links, an engine child
delay       links with a delay
quic        links over QUIC between two processes
"""
