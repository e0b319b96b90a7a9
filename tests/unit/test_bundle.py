"""What goes into a bundle: locked versions for each Python, and mesh-llm's own wheel."""

from __future__ import annotations

import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from mesh_llm.bundle import locked, own_wheel
from mesh_llm.bundle.build import BundleSpec, build, glibc_minor
from mesh_llm.errors import MeshError, UsageError

LOCK = """\
# made by make lock
click==8.5.1 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
colorama==0.4.6 ; sys_platform == 'win32' \\
    --hash=sha256:cc
rich==15.0.0 \\
    --hash=sha256:dd
"""


@pytest.fixture
def pins(tmp_path: Path) -> dict[str, locked.Pin]:
    (tmp_path / "requirements.lock").write_text(LOCK)
    return locked.pins(tmp_path / "requirements.lock")


def test_the_lock_file_is_read(pins: dict[str, locked.Pin]) -> None:
    assert list(pins) == ["click", "colorama", "rich"]
    assert pins["click"].line() == "click==8.5.1 --hash=sha256:aa --hash=sha256:bb"
    assert pins["colorama"].line() == "colorama==0.4.6 --hash=sha256:cc"


def test_markers_count_for_the_python_of_the_bundle(
    pins: dict[str, locked.Pin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "_requires", lambda name: [])
    wanted = ["click>=8", "rich; python_version < '3.12' and extra == 'engine'", "tiny; extra == 'dev'"]
    names = {python: [pin.name for pin in locked.needed(wanted, pins, python)] for python in ("3.11", "3.12")}
    assert names == {"3.11": ["click", "rich"], "3.12": ["click"]}


def test_a_package_that_is_not_locked(pins: dict[str, locked.Pin]) -> None:
    with pytest.raises(MeshError, match="the lock file does not name aiohttp"):
        locked.needed(["aiohttp"], pins, "3.12")


def test_a_node_needs_no_compiler_and_no_tests() -> None:
    requires = ["xllamacpp; extra == 'engine'", "pip; extra == 'engine'", "cmake; extra == 'build'", "click"]
    found = [pin.name for pin in locked.needed(requires, locked.pins(locked.lock_file()), "3.14")]
    assert found == ["click", "pip", "xllamacpp"]


def test_the_oldest_glibc() -> None:
    several = "a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"
    assert glibc_minor([several, "b-1-py3-none-any.whl"]) == 17
    assert glibc_minor([several, "c-1-py3-none-manylinux_2_28_x86_64.whl"]) == 28


# -- mesh-llm's own wheel -------------------------------------------------------------------------

INFO = "mesh_llm-1.0.dist-info"
FILES = {
    "mesh_llm/a.py": b"a = 1\n",
    "mesh_llm/prebuilt/libggml-mesh.so": b"mesh",
    "mesh_llm/prebuilt/libggml-cpu-x64.so": b"x64",
    "mesh_llm/prebuilt/libggml-cpu-haswell.so": b"haswell",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: mesh-llm\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_17_x86_64\n",
}


@pytest.fixture
def installed(tmp_path: Path) -> Distribution:
    site = tmp_path / "site"
    record = ["../bin/mesh-llm,,", f"{INFO}/RECORD,,", f"{INFO}/INSTALLER,,", "mesh_llm/__pycache__/a.pyc,,"]
    for name, content in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
        record.append(f"{name},sha256={own_wheel._digest(content)},{len(content)}")
    (site / INFO / "RECORD").write_text("\n".join(record))
    return PathDistribution(site / INFO)


def test_an_installation_becomes_a_wheel_again(installed: Distribution, tmp_path: Path) -> None:
    wheel = own_wheel.repack(installed, tmp_path, None)
    assert wheel.name == "mesh_llm-1.0-py3-none-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {name: archive.read(name) for name in FILES} == FILES
        assert set(archive.namelist()) == {*FILES, f"{INFO}/RECORD"}
    first = wheel.read_bytes()
    assert own_wheel.repack(installed, tmp_path, None).read_bytes() == first


def test_one_cpu_library_alone(installed: Distribution, tmp_path: Path) -> None:
    with zipfile.ZipFile(own_wheel.repack(installed, tmp_path, "haswell")) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    assert libraries == ["mesh_llm/prebuilt/libggml-cpu-haswell.so", "mesh_llm/prebuilt/libggml-mesh.so"]


def test_a_changed_installation_is_not_passed_on(installed: Distribution, tmp_path: Path) -> None:
    (tmp_path / "site/mesh_llm/a.py").write_text("a = 2\n")
    with pytest.raises(MeshError, match=r"mesh_llm/a.py was changed after mesh-llm was installed"):
        own_wheel.repack(installed, tmp_path, None)


def test_an_installation_without_libraries(installed: Distribution, tmp_path: Path) -> None:
    (tmp_path / "site" / INFO / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")
    with pytest.raises(MeshError, match="installed without native libraries"):
        own_wheel.repack(installed, tmp_path, None)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wheel", "error"),
    [
        ("missing.whl", "there is no wheel "),
        ("mesh_llm-0.0.1-py3-none-any.whl", "is not a wheel of mesh-llm "),
        ("other-1.0-py3-none-any.whl", "is not a wheel of mesh-llm "),
    ],
)
async def test_a_wheel_that_will_not_do(tmp_path: Path, wheel: str, error: str) -> None:
    if wheel != "missing.whl":
        (tmp_path / wheel).touch()
    spec = BundleSpec(
        target=tmp_path / "out" / "b.tar.gz", wheel=tmp_path / wheel, native=False, model_files=()
    )
    spec.target.parent.mkdir()
    with pytest.raises(UsageError, match=error):
        await build(spec, lambda progress: None)
    assert list(spec.target.parent.iterdir()) == []


async def test_no_such_folder(tmp_path: Path) -> None:
    spec = BundleSpec(target=tmp_path / "no" / "b.tar.gz", wheel=None, native=False, model_files=())
    with pytest.raises(UsageError, match="there is no folder "):
        await build(spec, lambda progress: None)
