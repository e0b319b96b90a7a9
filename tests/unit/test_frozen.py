"""Quickly made frozen dataclasses behave as the standard library's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

from mesh_llm.frozen import frozen


def _classes(decorate: Callable[[type[Any]], Any]) -> tuple[Any, Any, Any]:
    @decorate
    class Point:
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        secret: str = field(default="", repr=False)

    @decorate
    class Checked:
        low: int
        high: int
        width: int = field(init=False)
        kind: str = field(init=False, default="range")
        seen: list[int] = field(init=False, default_factory=list)

        def __post_init__(self) -> None:
            if self.high < self.low:
                raise ValueError("high is below low")
            object.__setattr__(self, "width", self.high - self.low)

    @decorate
    class Empty:
        pass

    return Point, Checked, Empty


QUICK = _classes(frozen)
STANDARD = _classes(dataclass(frozen=True, slots=True, kw_only=True))
BOTH = pytest.mark.parametrize(("point", "checked", "empty"), [QUICK, STANDARD], ids=["frozen", "dataclass"])


@BOTH
def test_fields_are_given_by_name_or_have_defaults(point: Any, checked: Any, empty: Any) -> None:
    one, other = point(x=1), point(x=3, y=4, tags=["a"])
    assert (one.x, one.y, one.tags, other.y, other.tags) == (1, 2, [], 4, ["a"])
    assert one.tags is not point(x=1).tags
    one_range = checked(low=2, high=5)
    assert (one_range.width, one_range.kind, one_range.seen) == (3, "range", [])
    assert asdict(other) == {"x": 3, "y": 4, "tags": ["a"], "secret": ""}
    assert [each.name for each in fields(point)] == ["x", "y", "tags", "secret"]
    assert is_dataclass(empty)
    assert not hasattr(one, "__dict__")


@BOTH
def test_mistakes_are_refused(point: Any, checked: Any, empty: Any) -> None:
    mistakes: list[Callable[[], object]] = [
        point,
        lambda: point(1),
        lambda: point(x=1, z=2),
        lambda: empty(x=1),
    ]
    for wrong in mistakes:
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="high is below low"):
        checked(low=2, high=1)
    with pytest.raises(ValueError, match="high is below low"):
        replace(checked(low=2, high=5), high=1)


@BOTH
def test_nothing_can_be_changed(point: Any, checked: Any, empty: Any) -> None:
    one = point(x=1)
    with pytest.raises(FrozenInstanceError):
        one.x = 2
    with pytest.raises(FrozenInstanceError):
        del one.x
    with pytest.raises((FrozenInstanceError, TypeError)):
        empty().new = 1
    assert replace(one, x=2).x == 2
    assert one.x == 1


@BOTH
def test_values_with_equal_fields_are_equal(point: Any, checked: Any, empty: Any) -> None:
    assert point(x=1, tags=["a"]) == point(x=1, tags=["b"])
    assert hash(point(x=1, tags=["a"])) == hash(point(x=1))
    assert point(x=1) != point(x=2)
    assert point(x=1, secret="a") != point(x=1)
    assert point(x=1) != (1, 2, "")
    assert empty() == empty() != point(x=1)
    assert len({empty(), empty(), point(x=1), point(x=1)}) == 2


@pytest.mark.parametrize("decorate", [frozen, dataclass(frozen=True, slots=True, kw_only=True)])
def test_a_class_may_inherit_fields(decorate: Any) -> None:
    @decorate
    class Parent:
        x: int
        y: int = 2

    @decorate
    class Child(Parent):
        y: int = 3
        z: int = 4

    parent: Any = Parent
    make: Any = Child
    child = make(x=1)
    assert (child.x, child.y, child.z) == (1, 3, 4)
    assert child == make(x=1, y=3) != make(x=1, y=2)
    assert child != parent(x=1, y=3)
    assert not hasattr(child, "__dict__")


def test_they_look_the_same() -> None:
    shown = [repr(point(x=1, secret="s")) + repr(empty()) for point, _, empty in (QUICK, STANDARD)]
    assert shown[0] == shown[1]
    assert "secret" not in shown[0]
