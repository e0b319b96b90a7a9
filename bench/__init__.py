"""Measurements of mesh-llm, both sides of every comparison in one run.

    python -m bench.run                 everything, some fifteen minutes
    python -m bench.run --quick         fewer rounds, under three minutes
    python -m bench.run --only solo     one of solo, overhead, idle, startup

METHODOLOGY.md says how, results/ holds what came out.
"""
