"""The plans that this node hosts: which one should run, bringing it up, and what its children are told."""
