"""`mesh-llm relay`: a server for nodes that cannot reach each other directly, in iroh's relay protocol."""
