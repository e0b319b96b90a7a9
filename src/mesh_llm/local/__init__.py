"""This machine: its hardware, and the models on its disk."""
