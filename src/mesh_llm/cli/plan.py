"""`mesh-llm plan`: to be written."""
