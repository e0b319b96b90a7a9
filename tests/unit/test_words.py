"""Words that people type from habit, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from mesh_llm.cli import main, words
from mesh_llm.cli.main import command_group, explained
from mesh_llm.config import parse_memory
from mesh_llm.errors import UsageError


def told(*arguments: str) -> tuple[str, str]:
    """What is said of a command line that is wrong."""
    with pytest.raises(click.ClickException) as caught:
        command_group().main(list(arguments), prog_name="mesh-llm", standalone_mode=False)
    return explained(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["statsu"], "mesh-llm status"),
        (["STATUS"], "mesh-llm status"),
        (["model"], "mesh-llm models"),
        (["dowload", "smollm2"], "mesh-llm download"),
        (["helo"], "mesh-llm help"),
        (["quit"], "mesh-llm stop"),
        (["ask", "me"], "mesh-llm chat"),
        (["smollm2"], "mesh-llm run smollm2"),
        (["llama3.2:3b"], "mesh-llm run llama3.2:3b"),
        (["hf:owner/repo"], "mesh-llm run hf:owner/repo"),
        (["help", "statsu"], "mesh-llm status"),
        (["invite", "lst"], "mesh-llm invite list"),
        (["engine", "bild"], "mesh-llm engine build"),
        (["lab", "delya"], "mesh-llm lab delay"),
    ],
)
def test_a_word_that_is_no_verb_names_the_nearest(typed: list[str], meant: str) -> None:
    message, hint = told(*typed)
    wrong = next(word for word in typed if word not in ("help", "invite", "engine", "lab"))
    assert message == f"No such command '{wrong}'."
    assert hint == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("stop qwen3:8b", "did you mean mesh-llm unload qwen3:8b?"),
        ("serve qwen3:8b", "did you mean mesh-llm run qwen3:8b?"),
        ("run qwen3:8b Hello", "did you mean mesh-llm chat Hello?"),
        ("show qwen3:8b", "mesh-llm plan --model NAME tells of a model, mesh-llm status of what runs"),
        ("rm qwen3:8b", words.EXPLAINED["delete"]),
        ("create mine", words.EXPLAINED["push"]),
    ],
)
def test_verbs_as_ollamas_users_write_them(typed: str, hint: str) -> None:
    assert told(*typed.split())[1] == hint


def test_those_that_are_the_same_as_ollamas() -> None:
    with command_group().make_context("mesh-llm", ["status"], resilient_parsing=True) as ctx:
        verbs = ("run", "ps", "list", "ls", "pull", "serve", "stop")
        assert [verb for verb in verbs if command_group().get_command(ctx, verb) is None] == []


def test_what_is_explained_is_no_verb() -> None:
    with command_group().make_context("mesh-llm", ["status"], resilient_parsing=True) as ctx:
        assert not {*words.EXPLAINED} & {*command_group().list_commands(ctx), *words.OTHER_NAMES}


@pytest.mark.parametrize("word", ["xyzzy", "ä", "\x1b[2J", "1"])
def test_a_word_that_is_near_nothing_names_the_help(word: str) -> None:
    assert told(word)[1] == "mesh-llm --help lists commands and options"


def test_other_names_are_the_same_verbs() -> None:
    group = command_group()
    with group.make_context("mesh-llm", ["status"], resilient_parsing=True) as ctx:
        for name, verb in words.OTHER_NAMES.items():
            assert group.get_command(ctx, name) is group.get_command(ctx, verb)
            assert name not in group.list_commands(ctx)


def test_help_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        command_group().main(list(arguments), prog_name="mesh-llm", standalone_mode=False)
        return capsys.readouterr().out

    assert shown("help", "stop") == shown("stop", "--help")
    assert shown("help", "invite", "list") == shown("invite", "list", "--help")
    assert shown("help") == shown("--help")
    assert "help        show the help of a command" in main.help_text(80)


def test_a_file_in_the_place_of_a_verb_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "a-model"
    file.touch()
    assert words.is_model(str(file))
    assert words.is_model("somewhere/it.gguf")
    assert not words.is_model(str(tmp_path / "none"))


@pytest.mark.parametrize("text", ["8", " 8 ", "0.5", "16", "500"])
def test_memory_without_a_unit_asks_for_one(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_memory(text)
    assert caught.value.hint == f"did you mean {text.strip()}GB?"


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("2000000", 2_000_000), ("0", 0), ("1K", 1000)]
)
def test_memory_with_a_unit_is_taken(text: str, size: int) -> None:
    assert parse_memory(text) == size
