"""Program: a simulated mesh in one process, which tells the CPU time that its members take.

It runs in the tree that PYTHONPATH names and uses that tree's own world
(`lab/simulate/world.py`), so that members of any commit can be
asked, as long as the world keeps these: `facts(key, ...)`, `World(...)` with
`start`, `warm`, `run`, `crash`, `perform`, `hosts`, `up` and `now`, and of a host
`id`, `key`, `asleep` and its view's `publish`, `records` and `digest`. How a view
is made is the world's business.

Arguments: the number of nodes. Then one JSON document for each line of stdin,
`{"phase": NAME, "seconds": S, "nodes": N}`, is answered by one line on stdout.
Every message goes through JSON and back, once for each receiver, as between nodes.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import mesh_llm


def _world() -> Any:
    """The tree's own; earlier commits have it among the tests."""
    try:
        return import_module("mesh_llm.lab.simulate.world")
    except ModuleNotFoundError:
        return import_module("tests.support.membership_world")


membership_world = _world()
World, facts = membership_world.World, membership_world.facts

TICK_S = 0.25
"""As in a node."""
SETTLE_S = 4.0
"""Until nobody talks about the connections that `warm` has made."""
# What a node with one small machine tells; longer facts would hide what else a record costs.
_FACTS: dict[str, Any] = {
    "engine": "2026.10.11549",
    "machine": "5f2a9c0e7b1d4863a1c4e0f7d9b25836",
    "memory_bytes": 15 << 30,
    "machine_memory_bytes": 16 << 30,
    "cores": 8,
}


class Members:
    def __init__(self, count: int) -> None:
        # Where members sign what they say, it is verified, too: that is part of what they cost.
        verifies = "verify" in signature(World).parameters
        self._world = World(seed=1, tick_s=TICK_S, weigh_every=1, **({"verify": True} if verifies else {}))
        self._count = count
        self._changed = 0
        self._crashed = 0
        self._newcomers = 0
        with _verifying_once():
            for key in range(count):
                self._world.start(key)
            self._world.warm()
            self._world.run(SETTLE_S)
        # A real node has one view to look through, not a thousand: keep them out of the collector's way.
        gc.collect()
        gc.freeze()

    def idle(self, seconds: float, nodes: int) -> None:
        self._world.run(seconds)

    def facts(self, seconds: float, nodes: int) -> None:
        """So many nodes change what they tell about themselves, one after the other."""
        for _ in range(nodes):
            host = self._host(self._changed)
            self._changed += 1
            told = facts(host.key, **_FACTS, lent_bytes=self._changed << 20)
            self._world.perform(host, host.view.publish(told, self._world.now))
            self._world.run(seconds / nodes)

    def crash(self, seconds: float, nodes: int) -> None:
        """They are killed, called dead, and come back as a home that remembers its mesh does."""
        keys = [self._host(self._crashed + number).key for number in range(nodes)]
        self._crashed += nodes
        remembered = {key: self._world.hosts[key].view.records for key in keys}
        for key in keys:
            self._world.crash(key)
        self._world.run(seconds / 2)
        for key in keys:
            self._world.start(key, know=remembered[key])
        self._world.run(seconds / 2)

    def newcomer(self, seconds: float, nodes: int) -> None:
        """One learns of all others from a single member, while the rest sleeps."""
        teacher = self._host(-1 - self._newcomers)  # not one of those that fell
        self._newcomers += 1
        teacher.asleep = False
        known = [record for record in teacher.view.records if record.node == teacher.id]
        pupil = self._world.start(f"newcomer {self._newcomers}", know=known)
        begun = self._world.now
        while pupil.view.digest != teacher.view.digest:
            if self._world.now - begun > seconds:
                raise SystemExit(f"a newcomer did not know the mesh after {seconds:g} s")
            self._world.run(TICK_S)
        self._world.crash(pupil.key)
        teacher.asleep = True

    def _hush(self) -> None:
        """All sleep, for longer than they would believe that it was the others who fell silent."""
        if not self._newcomers:
            for host in self._world.up:
                host.asleep = True
            self._world.run(SETTLE_S)

    def _host(self, number: int) -> Any:
        # Neighbours by number are far apart on the ring: ids are hashes of the keys.
        return self._world.hosts[number % self._count]

    def measured(self, phase: str, seconds: float, nodes: int) -> dict[str, Any]:
        if phase == "newcomer":
            self._hush()
        begun, cpu_s = self._world.now, time.process_time()
        getattr(self, phase)(seconds, nodes)
        return {"cpu_s": time.process_time() - cpu_s, "simulated_s": self._world.now - begun}


@contextmanager
def _verifying_once() -> Iterator[None]:
    """While nothing is measured: a thousand members would verify everybody's signatures, for minutes."""
    modules = [
        module
        for name in ("mesh_llm.transport.claims", "mesh_llm.transport.credential")
        if (module := sys.modules.get(name)) is not None
    ]
    kept = [module.verify for module in modules]
    for module in modules:
        module.verify = cache(module.verify)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, verify in zip(modules, kept, strict=True):
            module.verify = verify  # type: ignore[attr-defined]


def say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> None:
    members = Members(int(sys.argv[1]))
    say({"event": "ready", "files": [mesh_llm.__file__, membership_world.__file__]})
    for line in sys.stdin:
        asked = json.loads(line)
        say(members.measured(asked["phase"], asked["seconds"], asked["nodes"]))


if __name__ == "__main__":
    main()
