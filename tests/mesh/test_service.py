"""A service that joins a mesh: the token counts once, and the next start returns to the mesh without it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mesh_llm.cli import service
from mesh_llm.cli.service_files import Service, environment_text
from mesh_llm.home import Home, write_private
from tests.support.command import ALONE
from tests.support.joining import JoiningNode, Lab
from tests.support.node import status_of
from tests.support.waiting import until


class Shell(service.Manager):
    """Starts what a service's files say, as a service manager would."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def file(self, service: Service) -> Path:
        return service.home / "unit"

    def text(self, service: Service) -> bytes:
        return b""

    async def start(self, service: Service) -> None:
        self.begin(service)

    def begin(self, service: Service) -> None:
        script = 'set -a; . "$0"; exec "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", script, service.environment_file, *service.command], stdout=subprocess.DEVNULL
        )

    async def stop(self, service: Service) -> None:
        self.end()

    async def state(self, service: Service) -> dict[str, object]:
        return {}

    def logs(self, service: Service, lines: int, *, follow: bool) -> list[str]:
        return []

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(60) == 0
            self.process = None


@contextmanager
def shell() -> Iterator[Shell]:
    manager = Shell()
    try:
        yield manager
    finally:
        manager.end()


@pytest.mark.full
async def test_a_token_counts_once(nodes: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one = nodes.create("one")
    for name, value in {**ALONE, "MESH_LLM_MODELS": str(nodes.model.parent)}.items():
        monkeypatch.setenv(name, value)
    home = Home(nodes.folder / "two")
    options = [
        "--home",
        str(home.path),
        "--name",
        "two",
        "--port",
        "0",
        "--threads",
        "1",
        "--join",
        one.token(),
    ]
    made, config, variables = service._specified(options)
    home.create()
    write_private(made.environment_file, environment_text(variables))
    assert "MESH_LLM_JOIN" in made.environment_file.read_text()
    assert not any("mesh1-" in argument for argument in made.command)

    with shell() as manager:
        await service._start(manager, made, home, config, variables)

        assert "MESH_LLM_JOIN" not in made.environment_file.read_text()
        one.until_nodes("one", "two")
        manager.end()
        manager.begin(made)
        until(lambda: _sees(home.path, one), within_s=60, what="it returns to its mesh")


def _sees(home: Path, other: JoiningNode) -> bool:
    status = status_of(home)
    return status is not None and other.name in [node["name"] for node in status["mesh"]["nodes"]]
