"""Every command that the README and docs/install.md show to install mesh-llm, run as it stands.

Two users with empty homes: one who installs the wheel, in each of the ways that are shown, and packs a
bundle, and one who gets it. `scp` copies to the latter's home.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.test_documentation import INSTALLING
from tests.support.node import temporary_home
from tests.support.packaged import make_wheel

WITHIN_S = 1200.0

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="the pages show what is typed on Linux"),
]


class User:
    def __init__(self, home: Path, tools: Path) -> None:
        self.home = home
        home.mkdir()
        self._env = {
            "HOME": str(home),
            "PATH": f"{home}/.local/bin:{home}/mesh/bin:{tools}:/usr/local/bin:/usr/bin:/bin",
            "MESH_LLM_NO_RELAY": "1",
            "PIPX_DEFAULT_PYTHON": sys.executable,
            # As pip does: an index of one's own may have a certificate that only the system knows.
            "UV_SYSTEM_CERTS": "1",
            **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))},
        }

    def types(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-e", "-c", command],
            cwd=self.home,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def tools() -> Iterator[Path]:
    """pipx and uv from the package index, and an scp that stays on this machine."""
    with temporary_home() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
        pip = ["-m", "pip", "install", "--quiet", "pipx", "uv"]
        subprocess.run([folder / "tools" / "bin" / "python", *pip], check=True)
        scp = folder / "tools" / "bin" / "scp"
        scp.write_text(f'#!/bin/sh\nexec cp "$1" "{folder}/${{2%:}}/"\n')
        scp.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("MESH_LLM_TEST_WHEEL")
    return Path(named).resolve() if named else make_wheel(tmp_path_factory.mktemp("wheel"))


def test_installing_as_it_is_shown(wheel: Path, smollm2: Path) -> None:
    (readme,), (by_wheel, packing, unpacking) = INSTALLING.values()
    with tools() as folder:
        user, other = (User(folder / name, folder / "tools" / "bin") for name in ("user", "other"))
        (user.home / ".models").mkdir()
        (user.home / ".models" / smollm2.name).symlink_to(smollm2)
        # The name that the pages show is that of x86-64.
        (user.home / wheel.name).symlink_to(wheel)
        shown = [line.replace("x86_64", os.uname().machine) for line in by_wheel.splitlines()]
        with_pipx, with_uv, with_pip = shown

        user.types(with_pipx)
        user.types(readme.splitlines()[0].replace("pipx install", "pipx install --force"))
        assert "Why is the sky blue?" in user.types(readme.splitlines()[1])
        user.types("pipx uninstall mesh-llm")
        user.types(with_uv)
        assert user.types("mesh-llm --version").startswith("mesh-llm, version ")
        user.types("uv tool uninstall mesh-llm")
        user.types(with_pip)

        user.types(packing)
        other.types(unpacking)
        assert other.types("mesh-llm --version") == user.types("mesh-llm --version")
        other.types("sh ~/.local/share/mesh-llm/install.sh --uninstall --purge")
