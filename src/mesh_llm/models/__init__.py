"""Model files: what they say about themselves, where they lie and where they come from."""
