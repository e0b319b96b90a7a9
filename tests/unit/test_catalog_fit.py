"""The catalog by what a machine, or a mesh, can run."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.cli.catalog_fit import fitting, holds
from mesh_llm.cli.inventory import FreeMemory
from mesh_llm.models import catalog
from mesh_llm.models.catalog import CatalogEntry, UrlSource
from mesh_llm.models.header_cache import NO_FINGERPRINT
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.planning.would_fit import supposed
from mesh_llm.types import NodeFacts, NodeId, Role, Speed
from tests.support.planning import ENGINE, GB

CATALOG = catalog.load()
LARGE = CATALOG.find("gpt-oss-120b")
SPEED = Speed(read_bytes_per_s=20e9, flops_per_s=0.3e12, attention_per_s=0.1e12)


def node(number: int, gigabytes: float, *, machine: str = "", speed: Speed | None = SPEED) -> Candidate:
    facts = NodeFacts(
        name=f"n{number}",
        role=Role.NODE,
        version="1",
        engine=ENGINE,
        machine=machine,
        memory_bytes=int(gigabytes * GB),
        machine_memory_bytes=int(gigabytes * GB),
        speed=speed,
    )
    return Candidate(id=NodeId(f"{number:064x}"), facts=facts)


def rooms(*nodes: Candidate) -> FreeMemory:
    mesh = supposed(nodes, NO_FINGERPRINT) if len(nodes) > 1 else None
    return FreeMemory(here=supposed(nodes[:1], NO_FINGERPRINT), mesh=mesh, runs=True)


def test_nodes_of_one_machine_have_its_memory_once() -> None:
    """65 GB are not there because three nodes each see the same 22 GB."""
    one_machine = rooms(*(node(number, 22, machine="m") for number in (1, 2, 3)))
    three_machines = rooms(*(node(number, 26, machine=f"m{number}") for number in (1, 2, 3)))

    assert holds(LARGE, one_machine) == (False, False)
    assert holds(LARGE, three_machines) == (False, True)
    [found] = fitting([LARGE], one_machine)
    assert not found.fits
    assert found.plan is not None
    assert found.plan.have_bytes == 22 * GB


def test_a_node_alone_is_a_mesh_of_one() -> None:
    small = CATALOG.find("smollm2")

    assert holds(small, rooms(node(1, 8))) == (True, True)
    assert holds(LARGE, rooms(node(1, 8))) == (False, False)
    assert holds(small, FreeMemory(here=rooms(node(1, 8)).here, mesh=None)) == (True, None)
    unknown = CatalogEntry(name="x", source=UrlSource(url="https://x/x.gguf"))
    assert holds(unknown, rooms(node(1, 8))) == (None, None)


def test_the_best_comes_first() -> None:
    names = ("Qwen3-8B", "Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3-32B", "gpt-oss-120b")
    shapeless = replace(CATALOG.find("Gemma-4-31B"), shape=())
    found = fitting([*(CATALOG.find(name) for name in names), shapeless], rooms(node(1, 30)))

    # A mixture reads little: it is quick, and larger. A shape that is not known has no speed.
    # 20 GB of weights are read once a second.
    assert [each.entry.name for each in found] == [
        *("Qwen3-0.6B", "Qwen3-30B-A3B")[::-1],
        *("Gemma-4-31B", "Qwen3-32B", "Qwen3-8B", "gpt-oss-120b"),
    ]
    assert [each.fits for each in found] == [True] * 5 + [False]
    assert found[-1].missing_bytes > 30 * GB
    assert found[2].predicted is None
    document = found[0].document()
    assert document["predicted_tok_s_low"] < document["predicted_tok_s"] < document["predicted_tok_s_high"]
    assert (document["over"], document["fits"], document["exact"]) == ("machine", True, True)


def test_what_only_the_mesh_holds() -> None:
    [found] = fitting([LARGE], rooms(node(1, 40, machine="a"), node(2, 40, machine="b")))

    assert (found.fits, found.over_mesh) == (True, True)
    assert found.cells()[5] == "2 nodes of the mesh"
    assert found.document()["nodes"] == 2
