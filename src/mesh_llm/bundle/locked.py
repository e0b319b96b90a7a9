"""Which packages a node needs for one version of Python: names, versions and hashes of the lock file."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mesh_llm.errors import EngineMissing, MeshError
from mesh_llm.frozen import frozen

PACKAGE = Path(__file__).resolve().parent.parent
_PIN = re.compile(r"([\w.-]+)==([^\s;]+)")


@frozen
class Pin:
    """A line of the lock file."""

    name: str
    version: str
    hashes: tuple[str, ...]

    def line(self) -> str:
        """For pip, without a marker: pip would read it for the Python that runs."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash={hash}" for hash in self.hashes)])


def clone() -> Path | None:
    """The clone that this mesh-llm runs from."""
    root = PACKAGE.parent.parent
    return root if (root / "tools" / "wheel.py").is_file() else None


def lock_file() -> Path:
    return (clone() or PACKAGE) / "requirements.lock"


def pins(lock: Path) -> dict[str, Pin]:
    """All of the lock file, by name."""
    try:
        text = lock.read_text("utf-8")
    except FileNotFoundError:
        raise MeshError(
            f"{lock} is missing: this mesh-llm was not installed from a release's wheel",
            hint="install it from a wheel (make wheel), or run it from a clone",
        ) from None
    found: dict[str, Pin] = {}
    for block in text.replace("\\\n", " ").splitlines():
        if match := _PIN.match(block):
            name, version = match.groups()
            hashes = tuple(re.findall(r"--hash=(\S+)", block))
            found[canonicalize_name(name)] = Pin(name=name, version=version, hashes=hashes)
    return found


def needed(requires: list[str], locked: dict[str, Pin], python: str) -> list[Pin]:
    """What `requires` (of mesh-llm) needs with its engine, and what that needs in turn."""
    wanted = [(Requirement(text), "engine") for text in requires]
    found: dict[str, Pin] = {}
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker and not _holds(requirement.marker, python, extra):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = _pinned(name, locked)
        for more in ("", *requirement.extras):
            if (name, more) not in seen:
                seen.add((name, more))
                wanted += [(Requirement(text), more) for text in _requires(name)]
    return [found[name] for name in sorted(found)]


def _holds(marker: Marker, python: str, extra: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    return marker.evaluate(environment)


def _pinned(name: str, locked: dict[str, Pin]) -> Pin:
    if name not in locked:
        raise MeshError(f"the lock file does not name {name}", hint="make lock writes it anew")
    return locked[name]


def _requires(name: str) -> list[str]:
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        raise EngineMissing(
            f"{name} is not installed, and a bundle needs what a node needs",
            hint='pip install "mesh-llm[engine]"',
        ) from None
