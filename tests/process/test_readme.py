"""Every command that the README shows is run here, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node import SMALL, NodeProcess, temporary_home

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS: list[str] = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
STARTS_A_NODE = ".venv/bin/mesh-llm\n"
NEEDS_NO_NODE = [
    block for block in BLOCKS if not re.search(r"curl|status|make|^\.venv/bin/mesh-llm$", block, re.MULTILINE)
]
NEEDS_A_NODE = [block for block in BLOCKS if re.search(r"curl|status", block)]


@pytest.fixture
def node(smollm2: Path) -> Iterator[NodeProcess]:
    with temporary_home() as home, NodeProcess(*SMALL, home=home, model=smollm2) as running:
        yield running.until_ready()


def run(block: str, home: Path, *, url: str = "") -> subprocess.CompletedProcess[str]:
    script = block.replace("http://localhost:9337", url) if url else block
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=ROOT,
        # Passive: two threads that spin for each other crawl where others want the cores, too.
        env={**os.environ, "MESH_LLM_HOME": str(home), "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_every_block_is_run() -> None:
    assert ["make demo\n", STARTS_A_NODE, *NEEDS_A_NODE, *NEEDS_NO_NODE] == BLOCKS
    assert len(NEEDS_A_NODE) == 2


@pytest.mark.skipif(not (ROOT / ".venv/bin/mesh-llm").exists(), reason="the README speaks of a clone's .venv")
@pytest.mark.parametrize("block", NEEDS_NO_NODE)
def test_commands_that_need_no_node(block: str, home: Path, smollm2: Path) -> None:
    for command in block.splitlines():
        done = run(command, home)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command


@pytest.mark.skipif(not (ROOT / ".venv/bin/mesh-llm").exists(), reason="the README speaks of a clone's .venv")
def test_commands_for_a_running_node(node: NodeProcess) -> None:
    for block in NEEDS_A_NODE:
        done = run(block, node.home, url=node.url)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stdout.strip(), block
    assert node.wait().status == 0  # the last block ends with `mesh-llm stop`


@pytest.mark.skipif(not (ROOT / ".venv/bin/mesh-llm").exists(), reason="the README speaks of a clone's .venv")
def test_make_demo_answers(home: Path, smollm2: Path) -> None:
    done = run(BLOCKS[0], home)
    assert done.returncode == 0, done.stderr
    assert "Why is the sky blue?" in done.stdout
    assert re.search(r"^decode +[\d.]+ tok/s$", done.stdout, re.MULTILINE)
