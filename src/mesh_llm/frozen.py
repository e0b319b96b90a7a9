"""Frozen dataclasses with slots and keyword-only fields, made quickly.

The standard library compiles six functions for each frozen dataclass, which took a third of the time that
importing a node takes. A class made here has one function of its own, `__init__`, and shares the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, NoReturn, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True, kw_only=True)`, but for pickling and pattern matching."""
    # Without a docstring, the standard library writes one from the signature, which takes as long again.
    cls.__doc__ = cls.__doc__ or cls.__name__
    made: Any = dataclass(init=False, repr=False, eq=False, match_args=False, slots=True, kw_only=True)(cls)
    made._compared = staticmethod(_getter([each.name for each in fields(made) if each.compare]))
    made.__init__ = _init(made)
    made.__eq__, made.__hash__, made.__repr__ = _eq, _hash, _repr
    made.__setattr__, made.__delattr__ = _refuse_to_set, _refuse_to_delete
    return made  # type: ignore[no-any-return]


def _init(made: Any) -> Callable[..., None]:
    """Sets the fields through their slots, which is also quicker than `object.__setattr__`."""
    names: dict[str, Any] = {"MISSING": MISSING}
    parameters, body = [], []
    for each in fields(made):
        name, default = each.name, ""
        names[f"set_{name}"] = getattr(made, name).__set__
        if each.default is not MISSING:
            names[f"default_{name}"] = each.default
            default = f"default_{name}"
        elif each.default_factory is not MISSING:
            names[f"make_{name}"] = each.default_factory
            default = "MISSING"
        made_here = f"make_{name}()" if default == "MISSING" else default
        if each.init:
            parameters.append(f"{name}={default}" if default else name)
            given = f"{made_here} if {name} is MISSING else {name}" if default == "MISSING" else name
            body.append(f" set_{name}(self, {given})")
        elif default:
            body.append(f" set_{name}(self, {made_here})")
    if hasattr(made, "__post_init__"):
        body.append(" self.__post_init__()")
    star = "*, " if parameters else ""
    exec(f"def __init__(self, {star}{', '.join(parameters)}):\n" + "\n".join(body or [" pass"]), names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{made.__qualname__}.__init__"
    return init


def _getter(names: list[str]) -> Callable[[object], object]:
    return attrgetter(*names) if names else lambda _: ()


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self._compared(self) == other._compared(other)


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse_to_set(self: object, name: str, to: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
