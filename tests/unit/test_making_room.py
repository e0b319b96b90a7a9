"""Which models on demand have to go for another one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from mesh_llm.planning.decide import decide
from mesh_llm.planning.making_room import Loaded, Room, kept_by, make_room
from mesh_llm.types import Fingerprint, Mode, Plan
from tests.support.planning import mesh, model, node, settings

SIZES = {"old": 4, "mid": 4, "new": 4, "big": 12}
"""In GB, of models that are loaded."""


def loaded(name: str, idle_since: int, **more: Any) -> Loaded:
    return Loaded(fingerprint=Fingerprint(name), name=name, idle_since=idle_since, **more)


def plans(need_gb: int, free_gb: int = 0) -> Callable[[Collection[Fingerprint]], Plan]:
    """Of a model of that size; whatever goes gives its memory back."""
    fits = decide(mesh(node("ann", 60)), model(), settings(), current=None)
    waits = decide(mesh(node("ann", 1)), model(), settings(), current=None)
    assert (fits.mode, waits.mode) == (Mode.SOLO, Mode.WAITING)

    def without(gone: Collection[Fingerprint]) -> Plan:
        return fits if free_gb + sum(SIZES[each] for each in gone) >= need_gb else waits

    return without


def goes(room_for_gb: int, *models: Loaded) -> list[str]:
    room = make_room(models, plans(room_for_gb))
    assert room.is_enough
    return [each.name for each in room.goes]


def test_the_least_recently_used_goes() -> None:
    assert goes(4, loaded("new", 30), loaded("old", 10), loaded("mid", 20)) == ["old"]


def test_no_more_go_than_necessary() -> None:
    assert goes(8, loaded("new", 30), loaded("old", 10), loaded("mid", 20)) == ["old", "mid"]
    # The oldest one's memory would not do.
    assert goes(12, loaded("old", 10), loaded("big", 20)) == ["big"]


def test_one_that_answers_stays_while_another_can_go() -> None:
    assert goes(4, loaded("old", 0), loaded("new", 30)) == ["new"]


def test_where_only_one_that_answers_has_the_memory_nothing_goes_yet() -> None:
    room = make_room([loaded("big", 0), loaded("old", 10)], plans(12))
    assert (room.goes, [each.name for each in room.stays]) == ((), ["big"])
    assert room.is_enough
    assert room.reason == "it waits for the memory of big, which is in use or was loaded a moment ago"


def test_what_never_fits_says_what_is_needed() -> None:
    room = make_room([loaded("old", 10)], plans(100))
    assert not room.is_enough
    assert room.goes == ()
    assert "need" in room.reason


def test_what_waits_for_models_that_stay_names_those_alone_that_are_in_its_way() -> None:
    stays = [loaded("big", 0), loaded("mid", 0, priority=3)]
    assert kept_by([], stays, plans(12)) == ("big",)
    assert kept_by([loaded("old", 10)], stays, plans(20)) == ("big", "mid")
    assert kept_by([loaded("old", 10)], stays, plans(100)) == ()
    waits = plans(100)(())
    room = Room(plan=waits, kept_by=("big", "mid"))
    assert room.reason == f"{waits.reason}; it would fit without big and mid"


def test_equals_go_in_the_same_order_on_every_node() -> None:
    assert goes(4, loaded("new", 10), loaded("mid", 10)) == goes(4, loaded("mid", 10), loaded("new", 10))


def test_the_least_important_goes_before_the_least_recently_used() -> None:
    assert goes(4, loaded("old", 10, priority=1), loaded("new", 30), loaded("mid", 20, priority=1)) == ["new"]
    assert goes(8, loaded("old", 10, priority=1), loaded("new", 30), loaded("mid", 20, priority=1)) == [
        "new",
        "old",
    ]


def test_one_that_gives_way_goes_after_idle_ones_and_before_one_that_answers() -> None:
    steady = loaded("mid", 0, gives_way=True)
    assert goes(4, steady, loaded("old", 10, priority=9)) == ["old"]
    assert goes(8, steady, loaded("old", 10)) == ["old", "mid"]
    assert goes(4, steady, loaded("old", 0)) == ["mid"]
    room = make_room([steady, loaded("old", 0)], plans(8))
    assert (room.goes, room.takes_over, [each.name for each in room.stays]) == ((), False, ["old"])
    room = make_room([steady, loaded("big", 0, gives_way=True, priority=1)], plans(4))
    assert ([each.name for each in room.goes], room.takes_over) == (["mid"], True)
    assert room.reason == "mid goes to make room for it"
