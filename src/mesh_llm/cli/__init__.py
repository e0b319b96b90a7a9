"""The command line: the only place that prints. One file per family of verbs."""
