"""An answer at temperature 0 whose mesh loses something ends as if nothing had happened, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processors
from tests.support.recovery import AFTER, Kill, RecoveringMesh, kills, recovering_mesh
from tests.support.sampling import first


@pytest.fixture(scope="module", params=["plain", pytest.param("drafts", marks=pytest.mark.full)])
def mesh(
    request: pytest.FixtureRequest, smollm2: Path, libraries: dict[str, Path]
) -> Iterator[RecoveringMesh]:
    if "cpu" not in libraries:
        pytest.skip("the CPU library could not be built")
    with recovering_mesh(smollm2, drafts=request.param == "drafts") as mesh:
        yield mesh


def check(mesh: RecoveringMesh, kill: Kill) -> None:
    [recovered] = mesh.recovered(kill)
    assert recovered.was_resumed, f"{kill}: it was over before"
    assert recovered.has_same_numbers, f"{kill}: {recovered}\n{recovered.outcome.text}"


@pytest.mark.parametrize(("victim", "at"), first(1, [("host", 5), ("engine", 8), ("worker", 3)]))
def test_killed_once(mesh: RecoveringMesh, victim: str, at: int) -> None:
    check(mesh, Kill(victim=victim, moment="early", questions=(0,), at=at))


def name_of(kill: Kill) -> str:
    return f"{kill.victim}-{kill.moment}-{kill.questions[0]}"


@pytest.mark.full
@pytest.mark.parametrize("kill", list(kills(range(4, 6))), ids=name_of)
def test_killed_twice(mesh: RecoveringMesh, kill: Kill) -> None:
    check(mesh, kill)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(50))
def test_killed_fifty_times(mesh: RecoveringMesh, number: int) -> None:
    for kill in kills(range(number, number + 1)):
        check(mesh, kill)


@pytest.mark.full
def test_an_heir_with_other_cpu_code_ends_the_answer(smollm2: Path, libraries: dict[str, Path]) -> None:
    """Its numbers differ, and its words may: here it only has to end."""
    if "cpu" not in libraries:
        pytest.skip("the CPU library could not be built")
    kill = Kill(victim="host", moment="early", questions=(0,), at=5)
    with recovering_mesh(smollm2, drafts=False, other=processors.without_library()) as mesh:
        [recovered] = mesh.recovered(kill)
    assert recovered.was_resumed, f"{kill}: it was over before"
    assert recovered.outcome.done, recovered
    assert len(recovered.outcome.pieces) == kill.at + AFTER, recovered
    assert not recovered.has_same_numbers, recovered
