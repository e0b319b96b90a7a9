"""Completion in real shells, and the manual page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mesh_llm.cli import man
from mesh_llm.cli.main import _VERBS
from mesh_llm.cli.options import node_parameters
from tests.support.command import MESH_LLM, mesh_llm

ASK = """
source "$1"
COMP_WORDS=($2) COMP_CWORD=$3
_mesh_llm_completion mesh-llm
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is missing")
    ended = mesh_llm("completion", "install", "--shell", "bash", env={"XDG_DATA_HOME": str(tmp_path)})
    script = tmp_path / "bash-completion" / "completions" / "mesh-llm"
    assert (ended.status, ended.stdout) == (0, f"Wrote {script}; it counts in new shells\n")
    command = tmp_path / "mesh-llm"
    command.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in MESH_LLM) + ' "$@"\n')
    command.chmod(0o755)

    def completed(words: str) -> list[str]:
        said = subprocess.run(
            ["bash", "-c", ASK, "bash", script, words, str(len(words.split()) - 1)],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        )
        return said.stdout.split()

    assert completed("mesh-llm serv") == ["serve", "service"]
    assert completed("mesh-llm service un") == ["uninstall"]
    assert completed("mesh-llm --ctx") == ["--ctx-size"]


@pytest.mark.parametrize(
    ("shell", "place"),
    [("zsh", "zsh/site-functions/_mesh-llm"), ("fish", "fish/completions/mesh-llm.fish")],
)
def test_other_shells_find_theirs(tmp_path: Path, shell: str, place: str) -> None:
    ended = mesh_llm(
        *("completion", "install"),
        env={"SHELL": f"/bin/{shell}", "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
    )

    assert ended.status == 0
    assert "mesh-llm" in (tmp_path / place).read_text()


def test_an_unknown_shell() -> None:
    ended = mesh_llm("completion", "install", env={"SHELL": "/bin/tcsh"})

    assert (ended.status, ended.stderr) == (
        2,
        "Error: there is no completion for tcsh\nHint: --shell bash|zsh|fish\n",
    )


def test_the_manual_has_every_verb_and_option() -> None:
    text = man.page().replace("\\-", "-")

    assert [verb for verb in _VERBS if f".SS mesh-llm {verb}" not in text] == []
    assert [
        flag for flag in node_parameters() if not re.search(rf"^\.B (-\w+, )?--{flag}\b", text, re.M)
    ] == []


def test_the_manual_is_well_formed(tmp_path: Path) -> None:
    ended = mesh_llm("man", "--install", env={"XDG_DATA_HOME": str(tmp_path)})
    page = tmp_path / "man" / "man1" / "mesh-llm.1"
    assert ended.stdout == f"Wrote {page}; man mesh-llm shows it\n"
    if shutil.which("groff") is None:
        pytest.skip("groff is missing")

    checked = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", page], capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stderr) == (0, "")
