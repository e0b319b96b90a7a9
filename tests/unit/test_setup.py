"""tools/setup.sh: what it says when something is missing, and that it never looks finished when it is not."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION

ROOT = Path(__file__).parents[2]
MACOS = sys.platform == "darwin"
SYSTEM_TOOLS = [
    "sh",
    "awk",
    "cat",
    "cksum",
    "date",
    "df",
    "dirname",
    "grep",
    "mkdir",
    "rm",
    "tail",
    "tr",
    "uname",
]
FULL_DISK = (
    "echo Filesystem 1024-blocks Used Available Capacity Mounted on; echo /dev/x 9000000 8600000 400000 96% /"
)

# A project that pip can install without any package: its build backend lies beside it.
BACKEND = """
import zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return name

build_wheel = build_editable
"""
TINY_PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


class Clone:
    """A copy of what set-up reads, with a PATH on which only chosen commands lie."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone"
        self.bin = folder / "bin"
        (self.root / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "setup.sh", self.root / "tools")
        for name in ("requirements.lock", "requirements-dev.lock"):
            (self.root / name).write_text("# nothing is needed\n")
        (self.root / "pyproject.toml").write_text(TINY_PROJECT)
        (self.root / "backend.py").write_text(BACKEND)
        self.bin.mkdir()
        for tool in SYSTEM_TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on this machine"
            (self.bin / tool).symlink_to(found)
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "PIP_CONFIG_FILE": os.devnull, "CXX": "sh"}

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def python(self, name: str = "python3", before: str = "") -> None:
        """The Python of this test as command `name`; `before` runs ahead of whatever it is given by -c."""
        prelude = f"import sys; {before}; code = sys.argv[2]; sys.argv[1:3] = []; exec(code)"
        run = f'exec {sys.executable} -c "{prelude}" "$@"' if before else f'exec {sys.executable} "$@"'
        self.command(name, run)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [str(self.bin / "sh"), "tools/setup.sh", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.root, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def setup(self, *arguments: str) -> tuple[int, str]:
        """Exit code and stderr; stdout stays empty whatever happens."""
        with self.start(*arguments) as process:
            out, err = process.communicate()
        assert out == ""
        return process.returncode, err

    def stamps(self) -> list[str]:
        return sorted(path.name for path in self.root.glob(".venv/.*-*"))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path.resolve())


def said(error: str, *, linux: str, macos: str = "brew install python@3.12") -> str:
    return f"Error: {error}\nHint: {macos if MACOS else linux}\n"


def test_no_python(clone: Clone) -> None:
    linux = "sudo apt install python3 python3-venv"
    assert clone.setup() == (1, said("Python 3.11 or newer is needed; found none", linux=linux))
    assert not (clone.root / ".venv").exists()


def test_old_python(clone: Clone) -> None:
    clone.python(before="sys.version_info = (3, 9, 2, 'final', 0)")
    linux = "sudo apt install python3.11 python3.11-venv"
    assert clone.setup() == (1, said("Python 3.11 or newer is needed; found 3.9.2", linux=linux))
    assert not (clone.root / ".venv").exists()


def test_no_venv_module(clone: Clone) -> None:
    clone.python(before="sys.modules['ensurepip'] = None; sys.version_info = (3, 11, 2, 'final', 0)")
    error = said("Python 3.11.2 lacks its venv module", linux="sudo apt install python3-venv")
    assert clone.setup() == (1, error)
    assert not (clone.root / ".venv").exists()


@pytest.mark.parametrize("name", ["python3.12", "python3.14"])
def test_a_newer_python_beside_an_old_one_is_taken(clone: Clone, name: str) -> None:
    clone.python(before="sys.version_info = (3, 9, 2, 'final', 0)")
    clone.command("python3.13", "echo not installed >&2; exit 127")
    clone.python(name)
    argv = [str(clone.bin / "sh"), "tools/setup.sh", "python"]
    chosen = subprocess.run(argv, cwd=clone.root, env=clone.env, capture_output=True, text=True, check=True)
    assert chosen.stdout == f"{clone.bin / name}\n"


def test_a_chosen_python_is_not_replaced_by_another(clone: Clone) -> None:
    clone.python()
    clone.env["PYTHON"] = "python3.99"
    error = "Python 3.11 or newer is needed; found none at PYTHON=python3.99"
    assert clone.setup() == (1, said(error, linux="sudo apt install python3 python3-venv"))


def test_full_disk(clone: Clone) -> None:
    clone.python()
    clone.command("df", FULL_DISK)
    assert clone.setup() == (
        1,
        f"Error: set-up needs 1.5 GB of free disk space in {clone.root}; 0.4 GB is free\n"
        "Hint: make room on that disk (df -h . shows it), then run make setup again\n",
    )
    assert not (clone.root / ".venv").exists()


def test_disk_that_fills_while_pip_installs(clone: Clone) -> None:
    made = '#!/bin/sh\\necho "ERROR: [Errno 28] No space left on device"\\nexit 1\\n'
    fill = f"mkdir -p .venv/bin; printf '{made}' >.venv/bin/python; chmod +x .venv/bin/python"
    (clone.bin / "chmod").symlink_to(shutil.which("chmod") or "chmod")
    clone.command("python3", f'if [ "$1" = -m ]; then {fill}; else exec {sys.executable} "$@"; fi')
    code, err = clone.setup()
    assert code == 1
    assert err == (
        "Setting up .venv (one minute the first time) …\n"
        "The last lines of .venv/setup.log:\n"
        "ERROR: [Errno 28] No space left on device\n"
        "Error: the disk was full before set-up was done\n"
        "Hint: make room (df -h . ~ /tmp shows where), then run make setup again\n"
    )
    assert not (clone.root / ".venv").exists()


def test_no_network(clone: Clone) -> None:
    clone.python()
    left_by_an_interruption = clone.root / ".venv" / "lib" / "half-installed"
    left_by_an_interruption.mkdir(parents=True)
    (clone.root / "requirements.lock").write_text(f"click==8.1.7 --hash=sha256:{'0' * 64}\n")
    clone.env |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    code, err = clone.setup()
    assert code == 1
    assert "The last lines of .venv/setup.log:\n" in err
    assert err.endswith(
        "ERROR: No matching distribution found for click==8.1.7\n"
        "Error: no package index can be reached\n"
        f"Hint: check the network and pip's settings ({clone.bin / 'python3'} -m pip config list),"
        " then run make setup again\n"
    )
    assert clone.stamps() == []
    assert not left_by_an_interruption.exists()


@pytest.mark.full
def test_a_network_that_breaks_off_in_the_middle(clone: Clone) -> None:
    clone.python()
    (clone.root / "requirements.lock").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    with closing_index() as index:
        clone.env |= {"PIP_INDEX_URL": index, "PIP_RETRIES": "0", "PIP_TRUSTED_HOST": "127.0.0.1"}
        code, err = clone.setup()
    assert code == 1
    # An older pip does not count the bytes, and notices by the hash.
    refused = r"\nError: (no package index can be reached|a downloaded package is not the one .*)\nHint: "
    assert re.search(refused, err), err
    assert clone.stamps() == []


@contextmanager
def closing_index() -> Iterator[str]:
    """A package index that hangs up in the middle of its only package."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b'<a href="/tiny-1.0-py3-none-any.whl">tiny-1.0-py3-none-any.whl</a>'
            is_package = self.path.endswith(".whl")
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if is_package else "text/html")
            self.send_header("Content-Length", "100000" if is_package else str(len(page)))
            self.end_headers()
            self.wfile.write(b"PK" if is_package else page)

        def log_message(self, *ignored: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="index")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.full
def test_a_package_that_is_not_made_for_this_machine(clone: Clone) -> None:
    """As on musl, on another processor, or with a Python that is too new."""
    clone.python()
    (clone.root / "requirements.lock").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    clone.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone.root)}
    (clone.root / "tiny-1.0-cp311-cp311-musllinux_1_2_riscv64.whl").touch()
    code, err = clone.setup()
    assert code == 1
    error, hint = err.splitlines()[-2:]
    assert error.startswith("Error: a package is not there ready-made for this machine (")
    assert hint.endswith(", not musl (x86-64, arm64), or macOS 13 or newer: PYTHON=python3.12 make setup")
    assert clone.stamps() == []


@pytest.mark.full
def test_a_package_that_was_altered(clone: Clone) -> None:
    clone.python()
    (clone.root / "requirements.lock").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    clone.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone.root)}
    (clone.root / "tiny-1.0-py3-none-any.whl").write_bytes(b"half of it")
    code, err = clone.setup()
    assert code == 1
    assert err.splitlines()[-2] == ("Error: a downloaded package is not the one that the lock file names")
    assert clone.stamps() == []


def test_once_set_up_it_needs_nothing(clone: Clone) -> None:
    clone.python()
    code, err = clone.setup()
    pattern = r"Setting up \.venv \(one minute the first time\) …\nSet up in \d+ s: \.venv/bin/mesh-llm\n"
    assert (code, bool(re.fullmatch(pattern, err))) == (0, True), err
    assert len(clone.stamps()) == 2

    (clone.bin / "python3").unlink()
    assert clone.setup() == (0, "")

    # The stamps alone do not convince: an upgrade of the system's Python leaves no packages behind.
    (clone.root / ".venv" / "lib").rename(clone.root / "lib-of-another-python")
    code, err = clone.setup()
    assert (code, err.startswith("Error: Python 3.11 or newer is needed; found none\n")) == (1, True), err


def test_everything_is_compiled(clone: Clone) -> None:
    """Also where the environment says that no start may: every one would compile all of it."""
    clone.python()
    clone.env["PYTHONDONTWRITEBYTECODE"] = "1"
    wheel = clone.root / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("small.py", "")
        files.writestr("no_python.py", "def")
        files.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        files.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        files.writestr("small-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (clone.root / "requirements.lock").write_text(f"small==1.0 --hash=sha256:{digest}\n")
    clone.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone.root)}
    (clone.root / "src").mkdir()
    (clone.root / "src" / "ours.py").touch()

    assert clone.setup()[0] == 0
    compiled = {path.name.partition(".")[0] for path in clone.root.rglob("*.pyc")}
    assert {"small", "ours"} <= compiled


@pytest.mark.full
def test_what_tests_need_comes_on_top(clone: Clone) -> None:
    clone.python()
    first, _ = clone.setup()
    code, err = clone.setup("dev")
    pattern = (
        r"Setting up \.venv \(a few seconds\) …\nInstalling what tests and tools need …\n"
        r"Set up in \d+ s: \.venv/bin/mesh-llm\n"
    )
    assert (first, code, bool(re.fullmatch(pattern, err))) == (0, 0, True), err
    assert len(clone.stamps()) == 3
    assert clone.setup("dev") == clone.setup() == (0, "")

    # Other versions of them are installed anew, and nothing else is.
    (clone.root / "requirements-dev.lock").write_text("# still nothing\n")
    assert clone.setup() == (0, "")
    code, err = clone.setup("dev")
    assert (code, bool(re.fullmatch(pattern, err))) == (0, True), err
    assert len(clone.stamps()) == 3


def test_two_at_once_wait_for_each_other(clone: Clone) -> None:
    clone.python()
    clone.command("df", FULL_DISK)
    with (clone.root / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = clone.start()
        assert process.stderr
        said_first = process.stderr.readline()
    with process:
        _, err = process.communicate()
    assert said_first == "Waiting for another set-up in this clone …\n"
    assert err.startswith("Error: set-up needs 1.5 GB of free disk space")


def test_the_engine_is_pinned_alike_everywhere() -> None:
    pin = f"{ENGINE_PACKAGE}=={ENGINE_VERSION}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert pin in project["optional-dependencies"]["engine"]
    assert f"\n{pin} \\\n" in (ROOT / "requirements.lock").read_text("utf-8")


def test_the_lock_names_every_dependency_and_no_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    running = [*project["dependencies"], *extras["engine"], *extras["build"], *extras["setup"]]
    everything = [*running, *extras["dev"], *extras["test"], *extras["plots"]]
    pins = []
    for name, wanted in (("requirements.lock", running), ("requirements-dev.lock", everything)):
        lock = (ROOT / name).read_text("utf-8")
        pins.append(set(re.findall(r"^([a-z0-9-]+==\S+)", lock, re.MULTILINE)))
        locked = {pin.partition("==")[0] for pin in pins[-1]}
        assert {re.split("[=<>~ ]", line)[0].replace("_", "-") for line in wanted} - locked == set()
        assert "://" not in lock
        assert "index" not in lock
    assert pins[0] < pins[1], "the same versions in both"


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "tools").glob("*.sh")))
def test_shell_scripts(script: str) -> None:
    path = ROOT / "tools" / script
    subprocess.run(["sh", "-n", path], check=True)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed (sudo apt install shellcheck)")
    checked = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


def test_every_folder_of_tests_is_run() -> None:
    """They are named one by one, for their order: a new one could be forgotten."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {ROOT / path for path in options["testpaths"]} == folders
