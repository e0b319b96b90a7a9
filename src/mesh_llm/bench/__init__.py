"""What `mesh-llm bench` measures."""
