"""install.sh of a bundle, with a tiny stand-in for mesh-llm: what is left when something is wrong."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mesh_llm.bundle.build import INSTALL, PYTHONS
from mesh_llm.cli.service_files import Service, unit_text

TOOLS = (
    *(
        "sh",
        "awk",
        "cat",
        "chmod",
        "cp",
        "df",
        "dirname",
        "grep",
        "ln",
        "mkdir",
        "mktemp",
        "mv",
        "readlink",
        "rm",
    ),
    *("rmdir", "sed", "tail", "uname"),
)
PIP = next(iter((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")), None)
MACHINE = platform.machine()

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is made for Linux"),
    pytest.mark.skipif(PIP is None, reason="this Python has no pip of its own (ensurepip)"),
]


class Machine:
    """A bundle, unpacked on a machine with an empty home and few commands."""

    def __init__(self, folder: Path) -> None:
        self.bundle, self.home, self.bin = folder / "bundle", folder / "home", folder / "bin"
        for made in (self.bundle, self.home, self.bin):
            made.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on this machine"
            (self.bin / tool).symlink_to(found)
        self.command("python3", f'exec {sys.executable} "$@"')
        self.env = {"HOME": str(self.home), "PATH": str(self.bin)}
        self.pack("1.0")

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def pack(self, version: str, *, glibc: str = "2.17", need_kb: int = 1, works: bool = True) -> None:
        shutil.rmtree(self.bundle)
        (self.bundle / "wheels").mkdir(parents=True)
        (self.bundle / "models").mkdir()
        assert PIP is not None
        shutil.copy(PIP, self.bundle / "wheels")
        shutil.copy(INSTALL, self.bundle)
        (self.bundle / "models" / "tiny.gguf").write_bytes(b"GGUF")
        write_wheel(self.bundle / "wheels", version, works=works)
        facts = {"version": version, "system": "Linux", "machine": MACHINE, "glibc": glibc}
        facts |= {"pythons": " ".join(PYTHONS), "need_kb": str(need_kb), "models_kb": "1"}
        (self.bundle / "bundle.txt").write_text("".join(f"{key} {value}\n" for key, value in facts.items()))
        self.sum_up()

    def sum_up(self) -> None:
        files = [path for path in sorted(self.bundle.rglob("*")) if path.is_file()]
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(self.bundle)}\n"
            for path in files
            if path.name != "SHA256SUMS"
        ]
        (self.bundle / "SHA256SUMS").write_text("".join(lines))

    def install(self, *arguments: str, script: Path | None = None, **env: str) -> tuple[int, str]:
        argv = [str(self.bin / "sh"), str(script or self.bundle / "install.sh"), *arguments]
        done = subprocess.run(
            argv,
            env={**self.env, **env},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stdout == ""
        return done.returncode, done.stderr

    @property
    def installed(self) -> Path:
        return self.home / ".local" / "bin" / "mesh-llm"

    def version(self) -> str:
        return subprocess.run(
            [self.installed, "--version"], env=self.env, capture_output=True, text=True, check=True
        ).stdout.partition(" (")[0]

    def left(self) -> list[str]:
        """Everything in the home."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*"))


def write_wheel(folder: Path, version: str, *, works: bool) -> None:
    info = f"mesh_llm-{version}.dist-info"
    body = f"""
import os, sys
def main():
    if sys.argv[1] == "service":
        os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "mesh_llm", *sys.argv[1:]])
    print('mesh-llm, version {version if works else "?"} (engine of its own, protocol 2)')
"""
    with zipfile.ZipFile(folder / f"mesh_llm-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mesh_llm.py", body)
        metadata = f"Metadata-Version: 2.1\nName: mesh-llm\nVersion: {version}\nProvides-Extra: engine\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nmesh-llm = mesh_llm:main\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    # A name with a space: every path has to be quoted.
    folder = tmp_path.resolve() / "a machine"
    folder.mkdir()
    return Machine(folder)


def test_it_installs_upgrades_and_leaves_without_a_trace(machine: Machine) -> None:
    status, said = machine.install()
    assert (status, machine.version()) == (0, "mesh-llm, version 1.0"), said
    bin_folder = machine.home / ".local" / "bin"
    assert f"Note: {bin_folder} is not on your PATH" in said
    assert (machine.home / ".models" / "tiny.gguf").read_bytes() == b"GGUF"

    first = machine.installed.resolve().parent.parent
    machine.pack("2.0", works=False)
    status, said = machine.install()
    assert status == 1
    assert "Error: the packages could not be installed on this machine\nHint: " in said
    assert machine.version() == "mesh-llm, version 1.0", "a failed upgrade leaves the old one working"

    machine.pack("2.0")
    (first.parent / "1.9.killed").mkdir()
    status, said = machine.install(PATH=f"{machine.bin}:{bin_folder}")
    assert (status, machine.version()) == (0, "mesh-llm, version 2.0"), said
    assert "PATH" not in said
    folders = {path.name for path in first.parent.iterdir() if path.is_dir()}
    second = machine.installed.resolve().parent.parent
    assert folders == {first.name, second.name}, "a node may still run from the first; what failed is gone"

    status, said = machine.install("--uninstall", script=first.parent / "install.sh")
    assert status == 0, said
    assert machine.left() == [".models", ".models/tiny.gguf", ".models/tiny.gguf.sha256"]


@pytest.mark.full
def test_purging_keeps_what_it_did_not_bring(machine: Machine) -> None:
    assert machine.install("--client", "--prefix", "else where")[0] == 0
    (machine.home / ".mesh-llm").mkdir()
    (machine.home / ".models" / "own.gguf").touch()
    status, said = machine.install("--uninstall", "--purge", "--prefix", str(machine.home / "else where"))
    assert status == 0, said
    assert machine.left() == [".models", ".models/own.gguf"]


class Services:
    """A systemctl that notes what it is told, and units of nodes."""

    def __init__(self, machine: Machine) -> None:
        self.folder = machine.home / ".config" / "systemd" / "user"
        self.folder.mkdir(parents=True)
        self._log = machine.home.parent / "systemctl.log"
        self._machine = machine
        self.answers()

    def answers(self, *, status: int = 0) -> None:
        self._machine.command("systemctl", f'echo "$@" >>"{self._log}"; exit {status}')

    def install(self, monkeypatch: pytest.MonkeyPatch, home: Path, python: Path) -> Path:
        """As `mesh-llm service install` of that Python does."""
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("HOME", str(self._machine.home))
        made = Service(home=home)
        unit = self.folder / f"{made.name}.service"
        unit.write_text(unit_text(made))
        home.mkdir(exist_ok=True)
        made.environment_file.write_text("MESH_LLM_API_KEY=secret\n")
        monkeypatch.undo()
        return unit

    def told(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


def test_uninstalling_takes_its_services_along(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.install()[0] == 0
    services, python = Services(machine), machine.installed.resolve().with_name("python")
    homes = [machine.home / ".mesh-llm", machine.home / "a second home"]
    for home in homes:
        services.install(monkeypatch, home, python)
    another = services.install(monkeypatch, machine.home / "another", Path("/usr/bin/python3"))

    status, said = machine.install("--uninstall")

    assert (status, said.count("\n")) == (0, 1), said
    assert list(services.folder.iterdir()) == [another]
    assert not any((home / "service.env").exists() for home in homes)
    names = ["mesh-llm", Service(home=homes[1]).name]
    assert sorted(services.told()) == [f"--user disable --now {name}" for name in names]


@pytest.mark.full
def test_a_service_that_systemd_does_not_stop_goes_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.install()[0] == 0
    services, python = Services(machine), machine.installed.resolve().with_name("python")
    unit = services.install(monkeypatch, machine.home / ".mesh-llm", python)
    services.answers(status=1)

    status, said = machine.install("--uninstall")

    assert status == 0, said
    assert services.told() == ["--user disable --now mesh-llm"]
    assert not unit.exists()


def test_without_a_service_systemd_is_left_alone(machine: Machine) -> None:
    assert machine.install()[0] == 0
    services = Services(machine)
    assert machine.install("--uninstall")[0] == 0
    assert services.told() == []


@pytest.mark.full
def test_folders_that_were_there_stay(machine: Machine) -> None:
    (machine.home / ".local" / "bin").mkdir(parents=True)
    assert machine.install()[0] == 0
    assert machine.install("--uninstall")[0] == 0
    assert machine.left()[:2] == [".local", ".local/bin"]


def test_a_failure_at_the_very_end_leaves_the_old_version_working(machine: Machine) -> None:
    assert machine.install()[0] == 0
    machine.pack("2.0")
    machine.command("cp", f'case $2 in */install.sh*) exit 1;; esac; exec {shutil.which("cp")} "$@"')

    status, said = machine.install()

    assert status == 1
    assert f"Error: {machine.home}/.local could not be written to\n" in said
    assert machine.version() == "mesh-llm, version 1.0"
    assert [path.name for path in machine.installed.parent.iterdir()] == ["mesh-llm"]


def test_a_model_whose_sum_cannot_be_written(machine: Machine) -> None:
    machine.command("sed", f'case $1 in "s|  models"*) exit 1;; esac; exec {shutil.which("sed")} "$@"')

    status, said = machine.install()

    assert status == 1
    assert f"Error: {machine.home}/.models/tiny.gguf could not be written\nHint: make room" in said
    assert machine.left() == [".models"]


def test_an_interrupt_right_after_the_switch_leaves_it_installed(machine: Machine) -> None:
    last = f'{shutil.which("mv")} "$@"; case $3 in */bin/mesh-llm) kill -INT $PPID;; esac'
    machine.command("mv", last)

    status, said = machine.install()

    assert (status, machine.version()) == (130, "mesh-llm, version 1.0"), said


def test_a_home_behind_a_symbolic_link(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that an installation keeps is found by one way, and the home by the other."""
    by_link = machine.home.with_name("home by link")
    by_link.symlink_to(machine.home)
    assert machine.install(HOME=str(by_link))[0] == 0
    python = by_link / machine.installed.resolve().with_name("python").relative_to(machine.home)
    services = Services(machine)
    services.install(monkeypatch, machine.home / ".mesh-llm", python)

    status, said = machine.install(
        "--uninstall", script=by_link / ".local" / "share" / "mesh-llm" / "install.sh", HOME=str(by_link)
    )

    assert status == 0, said
    assert list(services.folder.iterdir()) == []
    assert not machine.installed.is_symlink()


def test_a_prefix_is_the_same_with_a_slash(machine: Machine) -> None:
    folder = machine.home / "there"
    assert machine.install("--prefix", f"{folder}/")[0] == 0
    machine.pack("2.0")
    status, said = machine.install("--prefix", str(folder))
    assert status == 0, said
    status, said = machine.install("--uninstall", "--prefix", f"{folder}/")
    assert status == 0, said
    assert machine.left()[:1] == [".models"]


def test_a_python_in_a_folder_with_a_space(machine: Machine) -> None:
    python = machine.bin / "my python3"
    (machine.bin / "python3").rename(python)
    status, said = machine.install(PYTHON=str(python))
    assert status == 0, said


def test_folders_to_which_cd_may_go(machine: Machine) -> None:
    elsewhere = machine.home.with_name("elsewhere")
    (elsewhere / "bundle").mkdir(parents=True)
    shutil.copytree(machine.bundle, machine.home / "bundle")
    status, said = machine.install(script=Path("bundle") / "install.sh", CDPATH=str(elsewhere))
    assert status == 0, said


# -- bad input --------------------------------------------------------------------------------------


def refused(machine: Machine, *arguments: str) -> str:
    """What it says; nothing may be installed."""
    status, said = machine.install(*arguments)
    assert status == 1, said
    assert said.startswith("Error: ")
    assert said.count("\n") == 2
    assert "\nHint: " in said
    assert machine.left() == []
    return said.partition("\n")[0].removeprefix("Error: ")


def test_a_damaged_file(machine: Machine) -> None:
    wheel = next(machine.bundle.glob("wheels/mesh_llm-*"))
    content = wheel.read_bytes()
    wheel.write_bytes(content[:-10] + b"0123456789")
    assert refused(machine) == f"the bundle is not whole: wheels/{wheel.name} is damaged"
    wheel.write_bytes(content[:-10])
    assert refused(machine) == f"the bundle is not whole: wheels/{wheel.name} is damaged"
    wheel.unlink()
    assert refused(machine) == f"the bundle is not whole: wheels/{wheel.name} is missing"
    (machine.bundle / "SHA256SUMS").unlink()
    assert refused(machine) == f"{machine.bundle} is not a whole bundle"


@pytest.mark.parametrize("name", ["wheels/aiohttp-99-py3-none-any.whl", "models/other.gguf"])
def test_a_file_that_another_bundle_left(machine: Machine, name: str) -> None:
    (machine.bundle / name).touch()
    assert refused(machine) == f"the bundle is not whole: {name} does not belong to it"


def test_no_space(machine: Machine) -> None:
    machine.pack("1.0", need_kb=10**12)
    assert "needs 1000000001 MB of free disk space; " in refused(machine)


def test_a_disk_that_fills_up(machine: Machine) -> None:
    fake = 'case $1 in -m) echo "OSError: [Errno 28] No space left on device" >&2; exit 1;; esac'
    machine.command("python3", f'{fake}; exec {sys.executable} "$@"')
    status, said = machine.install()
    assert status == 1
    assert "Error: the disk was full before mesh-llm was installed\n" in said
    assert machine.left() == []


def test_a_prefix_that_cannot_be_written_to(machine: Machine) -> None:
    # Not one by its mode: root may write there all the same.
    machine.pack("1.0", need_kb=0)
    assert refused(machine, "--prefix", "/proc").startswith("/proc/bin cannot be made")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_prefix(machine: Machine) -> None:
    machine.home.chmod(0o555)
    try:
        assert "cannot be made" in refused(machine)
    finally:
        machine.home.chmod(0o755)


def python_that_answers(machine: Machine, answer: str) -> None:
    machine.command("python3", f'case $1 in -c) echo "{answer}";; esac')


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("3.9 unfit whole 2.36", "Python 3.11 to 3.14 is needed; found 3.9"),
        ("3.15 unfit whole 2.36", "Python 3.11 to 3.14 is needed; found 3.15"),
        ("3.12 fits bare 2.36", "Python 3.12 lacks its venv module"),
        ("3.12 fits whole musl", "this system has musl instead of glibc, and the packages need glibc"),
        ("3.12 fits whole 2.12", "glibc 2.17 is needed; this system has 2.12"),
    ],
)
def test_a_python_or_a_system_that_will_not_do(machine: Machine, answer: str, error: str) -> None:
    python_that_answers(machine, answer)
    assert refused(machine) == error


def test_no_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    assert refused(machine) == "Python 3.11 to 3.14 is needed; found none"


def test_another_architecture(machine: Machine) -> None:
    machine.command("uname", "case $1 in -s) echo Linux;; -m) echo riscv64;; esac")
    assert refused(machine) == f"this bundle is for Linux {MACHINE}; this machine is Linux riscv64"


def test_the_command_of_another_installation_is_left_alone(machine: Machine) -> None:
    machine.installed.parent.mkdir(parents=True)
    machine.installed.write_text("another's")
    status, said = machine.install()
    assert status == 1
    assert said.startswith(f"Error: {machine.installed} belongs to another installation\n")
    assert machine.installed.read_text() == "another's"


def test_nothing_to_uninstall(machine: Machine) -> None:
    assert refused(machine, "--uninstall") == f"mesh-llm is not installed below {machine.home}/.local"


def test_wrong_options(machine: Machine) -> None:
    assert machine.install("--frefix")[0] == 2
    assert machine.install("--prefix")[0] == 2


def test_the_script_is_plain() -> None:
    subprocess.run(["sh", "-n", INSTALL], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed (sudo apt install shellcheck)")
    checked = subprocess.run(["shellcheck", INSTALL], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
