"""The other nodes of the mesh: members, paths and data links to them, what they claim, their engine."""
