"""The `llm` command, with the mesh as one of its models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_llm.agents import config_files
from mesh_llm.agents.config_files import Endpoint
from tests.support.node import NodeProcess
from tests.support.questions import QUESTION, SCHEMA, WEATHER, check_weather

LLM = (sys.executable, "-m", "llm")
WITHIN_S = 60.0


@pytest.fixture
def user(api: NodeProcess, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has told `llm` of the mesh."""
    settings = config_files.rewritten("llm", "", Endpoint(url=api.url, model="any"))
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    # Without plugins: that for Ollama looks for one on this machine.
    return {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}


def llm(user: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [*LLM, *arguments],
        env=user,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", [("--no-stream",), ()], ids=["whole", "stream"])
def test_prompt(user: dict[str, str], chat_text: str, mode: tuple[str, ...]) -> None:
    text = llm(user, "-m", "mesh/any", *mode, "-o", "temperature", "0", "-o", "max_tokens", "12", QUESTION)

    assert text == f"{chat_text}\n"


def test_schema(user: dict[str, str]) -> None:
    text = llm(user, "-m", "mesh/any", "-o", "temperature", "0", "--schema", json.dumps(SCHEMA), WEATHER)

    check_weather(text)


def test_a_refusal_is_told(user: dict[str, str]) -> None:
    done = subprocess.run(
        [*LLM, "-m", "mesh/any", "one " * 4000],
        env=user,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )

    assert done.returncode == 1
    assert "2048" in done.stderr
