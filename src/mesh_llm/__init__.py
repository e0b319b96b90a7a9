"""mesh-llm: one large language model over several machines, behind one OpenAI-compatible API.

A node finds its peers, agrees with them who holds which layers, runs its share
in an engine child (llama.cpp) and answers the whole llama-server API for all.

Imports point one way, and tests/unit/test_architecture.py keeps it so:

    cli         one file per verb family; the only place that prints
    node        composition root: wires what follows, one task group
    gateway, console, engine, transport, models
                the outside world, one part each; none imports another
    membership, planning
                decisions: pure, time is passed in and effects come out
    types, errors, defaults
                nouns, sentences for people, every port and limit with its reason

Beside them, `config` and `home` hold what a person set and where state lies.
"""

__version__ = "0.2.0"
