"""What a node tells about itself and its mesh: status, metrics, history, events, and plans that might be."""
