"""How bytes get from node to node: iroh's QUIC, and the sockets that are spliced to it."""
