"""Measurements of mesh-llm, both sides of every comparison in one run.

    python -m bench.run                 everything, half an hour
    python -m bench.run --quick         fewer rounds, some ten minutes
    python -m bench.run --only solo     one of solo, overhead, idle, startup, split

METHODOLOGY.md says how, results/ holds what came out.
"""
