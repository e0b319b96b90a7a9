"""What `mesh-llm bench` measures, and how results are written."""
