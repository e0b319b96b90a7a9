"""Which models have to go or move for another one, and at what price."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from mesh_llm.planning.decide import decide
from mesh_llm.planning.making_room import Loaded, Room, make_room, move, with_kept
from mesh_llm.types import Fingerprint, Mode, NodeId, Plan
from tests.support.planning import GB, mesh, model, node, plan_of, settings

SIZES = {"old": 4, "mid": 4, "new": 4, "big": 12}
"""In GB, of models that are loaded."""


def loaded(name: str, idle_since: int, **more: Any) -> Loaded:
    plans = (on(("ann", 0, 40), gb=SIZES[name]),)
    return Loaded(fingerprint=Fingerprint(name), name=name, idle_since=idle_since, plans=plans, **more)


def on(*stages: tuple[str, int, int], gb: int = 12, **changes: Any) -> Plan:
    """So many gigabytes in 40 layers."""
    plan = plan_of(*((NodeId(node), first, last) for node, first, last in stages), **changes)
    sizes = (gb * GB * (each.last - each.first) // 40 for each in plan.stages)
    weighed = (replace(each, weight_bytes=size) for each, size in zip(plan.stages, sizes, strict=True))
    return replace(plan, stages=tuple(weighed))


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
    assert room.reason(str) == (
        "it waits for the memory of big, which is in use or was loaded a moment ago; "
        "12.0 GB to read again when it comes back"
    )


def test_what_never_fits_says_what_is_needed() -> None:
    room = make_room([loaded("old", 10)], plans(100))
    assert not room.is_enough
    assert room.goes == ()
    assert "need" in room.reason(str)


def test_what_waits_for_models_that_stay_names_those_alone_that_are_in_its_way() -> None:
    stays = [loaded("big", 0), loaded("mid", 0, priority=3)]
    waits = plans(100)(())

    def told(need_gb: int, *others: Loaded) -> str:
        room = with_kept(Room(plan=waits), others, stays, plans(need_gb))
        return room.reason(str).removeprefix(waits.reason)

    assert told(12) == "; it would fit without big, 20.0 GB to read then"
    assert told(20, loaded("old", 10)) == "; it would fit without big and mid, 20.0 GB to read then"
    assert told(100, loaded("old", 10)) == ""


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


def reason(*goes: Loaded) -> str:
    return Room(plan=plans(0)(()), goes=goes).reason(
        {"ann": "desk", "ben": "den", "cay": "attic"}.__getitem__
    )


def test_it_tells_who_goes_and_what_is_read_again() -> None:
    assert reason(loaded("mid", 10)) == (
        "mid goes to make room for it; 4.0 GB to read again when it comes back"
    )
    assert reason(loaded("mid", 10), loaded("big", 0, gives_way=True, then=())) == (
        "mid and big go to make room for it; 16.0 GB to read again when they come back"
    )


def test_it_tells_who_moves_where_and_what_is_read_there() -> None:
    big = loaded("big", 0, gives_way=True, then=(on(("ben", 0, 40)),))
    assert reason(big) == "big moves to den to make room for it; 12.0 GB to read there"
    # A node that has layers already reads the others alone.
    spread = replace(big, then=(on(("ann", 0, 10), ("ben", 10, 20), ("cay", 20, 40)),))
    assert reason(spread) == "big moves to attic, den and desk to make room for it; 9.0 GB to read there"
    many = replace(big, then=(on(*((each, 0, 10) for each in "abcd")),))
    assert Room(plan=plans(0)(()), goes=(many,)).reason(str) == (
        "big moves to 4 nodes to make room for it; 12.0 GB to read there"
    )
    assert reason(loaded("old", 10), big) == (
        "old goes to make room for it; 4.0 GB to read again when it comes back; "
        "big moves to den to make room for it; 12.0 GB to read there"
    )


def test_it_tells_who_stays_with_less_context() -> None:
    less = on(("ann", 0, 40), context=2048)
    assert reason(loaded("big", 0, gives_way=True, then=(less,))) == (
        "big is loaded anew with 2048 tokens of context to make room for it; nothing new to read"
    )


def test_where_nobody_knows_what_becomes_of_a_model_it_makes_room() -> None:
    assert reason(loaded("big", 0, gives_way=True)) == "big makes room for it; 12.0 GB to read again"
    assert reason(loaded("big", 0, gives_way=True), loaded("mid", 0, gives_way=True)) == (
        "big and mid make room for it; 16.0 GB to read again"
    )


def test_a_plan_tells_whose_place_it_takes() -> None:
    here, there = on(("ann", 0, 40)), on(("ann", 0, 20), ("ben", 20, 40))
    assert move(here, there, str, room_for="coder") == (
        "moved from ann to make room for coder, at the price of reading 6.0 GB"
    )
    assert move(there, here, str) == "moved from ann and ben, at the price of reading 6.0 GB"
    assert move(here, replace(here, context=2048), str, room_for="coder") == (
        "loaded anew to make room for coder, with nothing new to read"
    )
    # What a member claims may make no sense.
    nothing = replace(here, stages=tuple(replace(each, last=0) for each in here.stages))
    assert move(nothing, nothing, str).startswith("loaded anew, ")
