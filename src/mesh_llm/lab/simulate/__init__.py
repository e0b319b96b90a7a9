"""Meshes of thousands of nodes in one process: the real membership and planning code, simulated networks.

run             what a simulation goes through
report          its document: tables and curves
distributions   what meshes are made of: machines, networks, sessions
events          a queue of events and its clock
signing         how simulated nodes sign and verify
network         delays, firewalls and partitions between them, and what messages weigh
world           a mesh of whole views
whole_views     joins, departures, a partition and churn in such a mesh
modelled        a few whole views in a mesh whose other members are modelled
others          the modelled members: what they know, and when news reach them
planning_cases  how long planning takes, and how good plans are
optimum         the best of all plans, for small meshes
days            plans and waits over hours
measures        figures from what was seen
"""
