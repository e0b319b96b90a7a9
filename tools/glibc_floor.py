"""Link against an older glibc than this machine's, and tell what a library needs to run.

glibc keeps every version that a symbol ever had. `write_stubs` makes libraries to link against that have
only those which the oldest supported glibc has, too; what came later is in `native/floor`. Nothing of the
stubs is in the result.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

FLOOR = (2, 17)
"""As the engine's own wheel (manylinux_2_17, manylinux2014)."""

_VERSION = re.compile(r"GLIBC_(\d+)\.(\d+)(?:\.(\d+))?$")
_KEPT = ("libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
_ELSEWHERE = ("libpthread.so.0", "libdl.so.2")
"""Parts of libc by now; where they are not, they have to be loaded for themselves."""


def _version(name: str) -> tuple[int, ...] | None:
    found = _VERSION.match(name)
    return tuple(int(part) for part in found.groups() if part) if found else None


def _symbols(library: Path, *, undefined: bool) -> Iterable[tuple[str, str]]:
    """Names and versions (empty: none) of what a library exports, or needs."""
    said = _output(["readelf", "--wide", "--dyn-syms", str(library)])
    for line in said.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":") and (fields[6] == "UND") == undefined:
            name, _, version = fields[7].partition("@")
            if not (undefined and fields[4] == "WEAK"):
                yield name, version.removeprefix("@")


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def write_stubs(compiler: str, folder: Path, floor_sources: Path) -> None:
    """Into `folder`, to be named to the linker with -L: libc and libm as they were, and an empty libgomp.

    OpenMP's functions are the engine's to load, as ggml's are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stubs = []
    for name in _KEPT:
        original = Path(_output([compiler, f"-print-file-name={name}"]).strip())
        if original.is_file():
            _write_stub(compiler, original, folder / name)
            stubs.append(folder / name)
    for name in _ELSEWHERE:
        subprocess.run(
            [
                compiler,
                "-shared",
                "-nostdlib",
                f"-Wl,-soname,{name}",
                "-o",
                folder / name,
                "-x",
                "c",
                "/dev/null",
            ],
            check=True,
        )
    compiled = folder / "floor.o"
    subprocess.run(
        [compiler, "-x", "c", "-O2", "-fPIC", "-c", floor_sources / "floor.c", "-o", compiled], check=True
    )
    for archive, parts in (("libfloor.a", [compiled]), ("libgomp.a", [])):
        (folder / archive).unlink(missing_ok=True)
        subprocess.run(["ar", "rcsD", folder / archive, *parts], check=True)
    # The loader's functions (thread-local variables) are looked for with libc's.
    parts = [*(stub for stub in stubs if not stub.name.startswith("libm")), folder / "libfloor.a"]
    (folder / "libc.so").write_text(f"INPUT ( {' '.join(map(str, parts))} )\n")
    (folder / "libm.so").write_text(f"INPUT ( {folder}/libm.so.6 )\n")


def link_options(folder: Path) -> list[str]:
    """For the linker, where the stubs are in `folder`: the C++ library becomes part of the result, unseen."""
    elsewhere = ",".join(f"-l:{name}" for name in _ELSEWHERE)
    return [
        *(f"-L{folder}", "-static-libstdc++", "-Wl,--exclude-libs,ALL"),
        f"-Wl,--push-state,--no-as-needed,{elsewhere},--pop-state",
    ]


def _write_stub(compiler: str, original: Path, stub: Path) -> None:
    newest: dict[str, str] = {}
    for name, text in _symbols(original, undefined=False):
        version = _version(text)
        if version is None or version[:2] > FLOOR:
            continue
        if name not in newest or version > (_version(newest[name]) or ()):
            newest[name] = text
    # A version that has no symbol here would be no version of the stub's.
    by_version: dict[str, list[str]] = {}
    for name, text in newest.items():
        by_version.setdefault(text, []).append(name)
    source, script = stub.with_suffix(".s"), stub.with_suffix(".map")
    source.write_text("".join(f".globl {name}\n.type {name}, %function\n{name}:\n" for name in newest))
    script.write_text("".join(f"{text} {{ {'; '.join(names)}; }};\n" for text, names in by_version.items()))
    subprocess.run(
        [
            *(compiler, "-shared", "-nostdlib", "-x", "assembler", source, "-o", stub),
            *(f"-Wl,-soname,{stub.name}", f"-Wl,--version-script={script}"),
        ],
        check=True,
    )


def flaws(library: Path, provided: frozenset[str]) -> list[str]:
    """Why a library may not run on the oldest system; `provided`: symbols of what is loaded before it."""
    found = []
    for name, text in _symbols(library, undefined=True):
        version = _version(text)
        if version is not None and version[:2] > FLOOR:
            found.append(f"{library.name} needs {name} of {text}")
        elif not text and name not in provided:
            found.append(f"{library.name} needs {name}, which nothing provides")
        elif text.startswith(("GLIBCXX", "CXXABI")):
            found.append(f"{library.name} needs {name} of {text}, which is to be part of it")
    return found


def exports(library: Path) -> frozenset[str]:
    return frozenset(name for name, _ in _symbols(library, undefined=False))
