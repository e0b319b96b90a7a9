"""mesh-llm: one large language model over several machines, behind one OpenAI-compatible API.

A node finds its peers, agrees with them who holds which layers, runs its share
in an engine child (llama.cpp) and answers the whole llama-server API.

Imports point down this list, and tests/unit/test_architecture.py keeps it so:

    cli         the commands; the only package that prints
    lab         meshes on one machine, for tests, benches and the demo
    node        wires one node together
    host, worker, peers, report, local
                what a node hosts, lends, knows of others, tells, and has on its machine
    gateway, console, engine, transport, relay, models, download, peer_fetch
                the outside world, one part each
    membership, planning, agents
                decisions: pure, time is passed in and effects come out
    types, sanitise, errors, defaults, loopback, third_party
                shared nouns, sentences for people, limits with their reasons

Beside them, `status_schema` is the status document, `config` and `home` hold what a person set and
where state lies, `tasks` helps with asyncio, and `same_user` tells whose program is connected.
Each package's docstring lists its modules; DESIGN.md is the map.
"""

__version__ = "0.2.0"
