"""Meshes of thousands of nodes in one process: the real membership and planning code, simulated networks.

events     a queue of events and its clock
signing    how simulated nodes sign and verify
network    delays, firewalls and partitions between them, and what messages weigh
world      a mesh of whole views
"""
