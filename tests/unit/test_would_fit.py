"""Whether a model would fit: the decision itself, on one machine or over several."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.planning.fit import gigabytes
from mesh_llm.planning.snapshot import Candidate
from mesh_llm.planning.would_fit import outlook, supposed
from mesh_llm.types import NodeFacts, NodeId, Role
from tests.support import planning
from tests.support.planning import ENGINE, FINGERPRINT, GB


def node(number: int, gigabytes_free: float, role: Role = Role.NODE) -> Candidate:
    facts = NodeFacts(
        name=f"n{number}",
        role=role,
        version="1",
        engine=ENGINE,
        memory_bytes=int(gigabytes_free * GB),
    )
    return Candidate(id=NodeId(f"{number:064x}"), facts=facts)


def test_it_fits_with_a_conversations_context() -> None:
    fit = outlook(supposed([node(1, 40)], FINGERPRINT), planning.model(), slots=1)

    assert (fit.fits, fit.context, fit.nodes) == (True, 4096, 1)
    assert 20 * GB < fit.need_bytes < fit.have_bytes == 40 * GB


def test_it_fits_with_less_context() -> None:
    snapshot = supposed([node(1, 22.6)], FINGERPRINT)

    assert outlook(snapshot, planning.model(), slots=4).context == 512


def test_it_does_not_fit_and_says_what_it_needs() -> None:
    fit = outlook(supposed([node(1, 8)], FINGERPRINT), planning.model(), slots=1)

    assert (fit.fits, fit.context, fit.nodes) == (False, 512, 0)
    assert fit.reason == f"need {gigabytes(fit.need_bytes)} for the model, have 8.0 GB on 1 node"


def test_a_mesh_holds_what_none_of_its_nodes_does() -> None:
    nodes = [node(1, 8), node(2, 8), node(3, 16), node(4, 100, Role.CLIENT)]
    snapshot = supposed(nodes, FINGERPRINT)

    assert len(snapshot.nodes) == 3
    assert outlook(snapshot, planning.model(), slots=1).fits


def test_nodes_that_are_gone_hold_nothing() -> None:
    nodes = [node(1, 8), replace(node(2, 100), alive=False)]

    assert not outlook(supposed(nodes, FINGERPRINT), planning.model(), slots=1).fits
