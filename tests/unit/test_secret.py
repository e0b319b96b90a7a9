"""Secrets on a command line, and where else they may come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mesh_llm.cli import secret
from mesh_llm.engine.process import WITHHELD
from mesh_llm.errors import UsageError
from mesh_llm.transport.identity import Identity
from mesh_llm.transport.invite import Invite, encode
from mesh_llm.types import Address, MeshId

INVITER = Identity.from_secret(bytes(range(32)))
INVITE = Invite(
    id="00112233445566ff",
    mesh=MeshId(INVITER.id),
    secret=bytes(16),
    inviter=INVITER.id,
    address=Address(direct=()),
)
TOKEN = encode(INVITE, INVITER)
"""As short as one can be."""


@pytest.mark.parametrize(
    ("given", "shown", "secrets"),
    [
        *(
            (
                ["join", *before, TOKEN, *after],
                ["join", *before, "$MESH_LLM_JOIN", *after],
                {"MESH_LLM_JOIN": TOKEN},
            )
            for before, after in (([], ["--port", "0"]), (["--plain"], []), (["--name", "x", "--"], []))
        ),
        (
            ["--join", "T", "--port", "0"],
            ["--join", "$MESH_LLM_JOIN", "--port", "0"],
            {"MESH_LLM_JOIN": "T"},
        ),
        (
            ["serve", "--join=T=", "--api-key", "K"],
            ["serve", "--join=$MESH_LLM_JOIN", "--api-key", "$MESH_LLM_API_KEY"],
            {"MESH_LLM_JOIN": "T=", "MESH_LLM_API_KEY": "K"},
        ),
        (
            ["relay", "--token", "--join"],
            ["relay", "--token", "$MESH_LLM_RELAY_TOKEN"],
            {"MESH_LLM_RELAY_TOKEN": "--join"},
        ),
        (
            ["service", "install", "--", "--api-key", "K"],
            ["service", "install", "--", "--api-key", "$MESH_LLM_API_KEY"],
            {"MESH_LLM_API_KEY": "K"},
        ),
    ],
)
def test_secrets_are_moved_out_of_a_command_line(
    given: list[str], shown: list[str], secrets: dict[str, str]
) -> None:
    assert secret.without_secrets(given) == (shown, secrets)


@pytest.mark.parametrize(
    "given",
    [
        ["--join", "-", "--api-key", "@key"],
        ["--join", "$MESH_LLM_JOIN"],
        ["--join", ""],
        ["--join"],
        ["--", "--join", "T"],
        ["--name", "T"],
        ["join", "mesh1-attic"],
        ["join", "--name", "mesh1"],
    ],
)
def test_a_command_line_without_secrets_stays_as_it_is(given: list[str]) -> None:
    assert secret.without_secrets(given) == (given, {})


def test_children_get_none_of_the_variables() -> None:
    assert set(secret.VARIABLES.values()) == WITHHELD


def test_a_variable_counts_where_no_option_does_and_is_gone_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_LLM_JOIN", "T")
    assert secret.read("--join", None) == "T"
    assert "MESH_LLM_JOIN" not in os.environ
    assert secret.read("--join", None) is None
    monkeypatch.setenv("MESH_LLM_JOIN", "T")
    assert secret.read("--join", "other") == "other"
    assert "MESH_LLM_JOIN" not in os.environ
    with pytest.raises(UsageError, match=r"--join \$MESH_LLM_JOIN: the variable is not set, or empty"):
        secret.read("--join", "$MESH_LLM_JOIN")


def private(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def test_a_file_holds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = private(tmp_path / "token", "  the token\n\n")

    assert secret.read("--join", f"@{path}") == "the token"
    assert capsys.readouterr() == ("", "")


def test_a_file_that_others_can_read_is_worth_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = private(tmp_path / "token", "T\n")
    path.chmod(0o644)

    assert secret.read("--join", f"@{path}") == "T"
    assert capsys.readouterr().err == (
        f"Warning: {path} can be read by other users of this machine (chmod 600 {path})\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no such file"),
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("one\ntwo\n", "the file holds more than one line"),
        ("x" * 70_000, "the file holds more than one line"),
    ],
)
def test_a_file_that_is_of_no_use(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        private(path, text)

    with pytest.raises(UsageError) as refused:
        secret.read("--join", f"@{path}")

    assert refused.value.message == f"--join @{path}: {why}"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        secret.read("--api-key", f"@{tmp_path}")
