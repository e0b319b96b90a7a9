"""Model files from other nodes of the mesh: asking for them, checking each piece, and serving one's own."""
