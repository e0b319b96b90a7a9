"""`mesh-llm completion`: verbs and options by the Tab key."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from mesh_llm.cli.main import command_group
from mesh_llm.cli.options import debug_option
from mesh_llm.errors import UsageError
from mesh_llm.home import write_whole

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MESH_LLM_COMPLETE"
"""By which the script asks; click looks for this name."""

_shell_option = click.option("--shell", type=click.Choice(SHELLS), help="default: yours, by SHELL")


@click.group()
def completion() -> None:
    """Complete verbs and options of mesh-llm by the Tab key."""


@completion.command()
@_shell_option
@debug_option
def show(shell: str | None, debug: bool) -> None:
    """Print the script for a shell."""
    click.echo(script(_chosen(shell)))


@completion.command()
@_shell_option
@debug_option
def install(shell: str | None, debug: bool) -> None:
    """Install the script where the shell looks for it, for this user."""
    chosen = _chosen(shell)
    file = place(chosen)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole({file: script(chosen) + "\n"})
    click.echo(f"Wrote {file}; it counts in new shells")
    if chosen == "zsh":
        click.echo(f"Put this into ~/.zshrc, before compinit: fpath=({file.parent} $fpath)", err=True)
    elif chosen == "bash":
        click.echo("bash needs bash-completion for it (sudo apt install bash-completion)", err=True)


def _chosen(shell: str | None) -> str:
    found = shell or Path(os.environ.get("SHELL", "")).name
    if found not in SHELLS:
        raise UsageError(
            f"there is no completion for {found or 'an unknown shell'}", hint=f"--shell {'|'.join(SHELLS)}"
        )
    return found


def script(shell: str) -> str:
    made = get_completion_class(shell)
    assert made is not None
    return made(command_group(), {}, "mesh-llm", _VARIABLE).source().strip()


def place(shell: str) -> Path:
    """Where a shell finds it by the command's name."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "mesh-llm",
        "zsh": data / "zsh" / "site-functions" / "_mesh-llm",
        "fish": config / "fish" / "completions" / "mesh-llm.fish",
    }[shell]
