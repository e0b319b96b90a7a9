"""`mesh-llm`: the verbs, and how every one of them ends.

Verbs are imported when they are called, so that --help and --version stay
quick.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from mesh_llm import __version__
from mesh_llm.cli import secret, signals
from mesh_llm.cli.imports import import_quickly
from mesh_llm.cli.words import EXPLAINED, OTHER_NAMES, is_model, meant_with, nearest
from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION, PROTOCOL_VERSION
from mesh_llm.errors import MeshError, of_system

if TYPE_CHECKING:
    from types import FrameType

    from click.shell_completion import CompletionItem

_PARTS = f"engine {ENGINE_PACKAGE} {ENGINE_VERSION}, protocol {PROTOCOL_VERSION}"

_VERBS = {
    "serve": ("serve", "run a node (the same as mesh-llm without a command)"),
    "run": ("serve", "run a node with this model, or chat with the one that runs"),
    "chat": ("chat", "chat in this terminal, or answer what is piped in"),
    "status": ("status", "show nodes, links, plan and speed"),
    "plan": ("plan", "show who would compute what, how fast, and why; serves nothing"),
    "invite": ("invite", "make, list and revoke tokens for other machines"),
    "join": ("pair", "join a mesh of this network by the code on its owner's screen"),
    "promote": ("invite", "make a member an owner of the mesh"),
    "pause": ("lending", "lend nothing for a while: others take over first"),
    "resume": ("lending", "lend again"),
    "keys": ("keys", "make, list and revoke API keys; show their usage"),
    "share": ("share", "let guests on the local network chat, with a key and a QR code"),
    "leave": ("control", "hand over, leave the mesh and stop"),
    "stop": ("control", "stop the running node"),
    "load": ("load", "serve one more model in the mesh, or one with other options"),
    "unload": ("load", "serve a model no longer"),
    "use": ("load", "make a served model the default one"),
    "download": ("download", "list the catalog, or download a model"),
    "catalog": ("catalog", "show the catalog's lists, or update it from one that you trust"),
    "models": ("models", "list the models on this disk and whether they fit"),
    "service": ("service", "let the system start, restart and stop a node"),
    "logs": ("logs", "show the logs of the node and its engine; -f follows them"),
    "doctor": ("doctor", "find what is wrong with this machine and its mesh, and the mend"),
    "engine": ("engine", "show the engine of this machine, or build its libraries"),
    "bundle": ("bundle", "make one file that installs mesh-llm on other machines"),
    "bench": ("bench", "measure the running mesh, its links, or a split on this machine"),
    "lab": ("lab", "try slow links, faults and large meshes on this machine"),
    "relay": ("relay", "run a relay for nodes behind NATs"),
    "agent": ("agent", "connect pi, goose, aider and other agents to a node"),
    "completion": ("completion", "complete verbs and options by the Tab key, in your shell"),
    "man": ("man", "print or install the manual page"),
    "demo": ("demo", "try a mesh on this machine; demo stop ends it"),
}


class Verbs(click.Group):
    """A group that loads its commands one by one and runs a node when none is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        name = OTHER_NAMES.get(name, name)
        if name not in _VERBS:
            return None
        command = getattr(import_quickly(f"mesh_llm.cli.{_VERBS[name][0]}"), name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "help":
            args = [*args[1:], "--help"]
        if not args or args[0] not in {*_VERBS, *OTHER_NAMES}:
            from mesh_llm.cli.config_file import configure

            configure(ctx, args)
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing every verb for its one line of help."""
        from click.shell_completion import CompletionItem

        verbs = [
            CompletionItem(name, help=text)
            for name, (_, text) in _VERBS.items()
            if name.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            others = [(name, f"the same as {verb}") for name, verb in OTHER_NAMES.items()]
            help = ("help", "show the help of a command, as in mesh-llm help invite")
            formatter.write_dl([*((name, text) for name, (_, text) in _VERBS.items()), *others, help])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(
                f"--{given[0].replace('_', '-')} comes before {args[0]}; options go after the command"
            )
        return super().resolve_command(ctx, args)


def command_group() -> click.Group:
    from mesh_llm.cli.options import node_config, node_options

    @click.group(
        cls=Verbs,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    @click.version_option(
        __version__, prog_name="mesh-llm", message=f"%(prog)s, version %(version)s ({_PARTS})"
    )
    @click.pass_context
    @node_options
    def mesh_llm(ctx: click.Context, /, **options: Any) -> None:
        """Pool your machines into one OpenAI-compatible endpoint.

        Without a command it runs a node: it loads the model and answers at
        http://localhost:9337 until Ctrl-C.
        """
        if ctx.invoked_subcommand is None:
            # Checked first: most mistakes are told at once.
            config = node_config(options)
            import_quickly("mesh_llm.cli.serve").run_with_options(config, options)

    return mesh_llm


def help_text(columns: int) -> str:
    group = command_group()
    with group.make_context("mesh-llm", [], resilient_parsing=True, terminal_width=columns - 2) as ctx:
        return f"{group.get_help(ctx)}\n"


def explained(error: click.ClickException) -> tuple[str, str]:
    """Its sentence, and what to type instead as far as that can be told."""
    message, usual = error.format_message(), "mesh-llm --help lists commands and options"
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is not None and ctx.parent is not None:
        usual = f"{ctx.command_path} --help lists what it takes"
    unknown = re.match(r"No such command '(.+?)'\.", message)
    extra = re.match(r"Got unexpected extra argument \((.+)\)$", message)
    if ctx is not None and extra and (meant := meant_with(ctx.command.name, extra[1])):
        return message, f"did you mean mesh-llm {meant}?"
    if ctx is None or unknown is None or not isinstance(ctx.command, click.Group):
        return message, usual
    word = unknown[1]
    is_verb = isinstance(ctx.command, Verbs)
    if is_verb and word in EXPLAINED:
        return unknown[0], EXPLAINED[word]
    near = nearest(word, [*ctx.command.list_commands(ctx), *(("help",) if is_verb else ())])
    if near is None and is_verb and is_model(word):
        near = f"run {word}"
    return unknown[0], usual if near is None else f"did you mean {ctx.command_path} {near}?"


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


class _Interrupt:
    """Ends a command by another signal than Ctrl-C's; where a loop runs, as Ctrl-C does: by cancelling.

    An exception raised within a loop would leave half done whatever was under way.
    """

    def __init__(self) -> None:
        self.number: int = signal.SIGINT

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt) and interrupt is not signal.default_int_handler:
            interrupt(signal.SIGINT, frame)
        else:
            sys.exit(128 + number)


def main() -> None:
    """Entry point: every failure becomes one sentence and the right exit code."""
    secret.hide()
    debug = "--debug" in sys.argv[1:]
    # By their default these would leave a compiler or pip running, or an offer open; a node drains on them
    # instead. Python has a way of its own for Ctrl-C.
    interrupt = _Interrupt()
    for number in set(signals.ending()) - {signal.SIGINT}:
        signal.signal(number, interrupt)
    try:
        status = command_group().main(prog_name="mesh-llm", standalone_mode=False)
    except MeshError as error:
        from mesh_llm.cli.output import print_error

        if debug:
            _print_traceback()
        print_error(error)
        status = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        # Of verbs that have verbs: what they are is the answer, and no mistake needs a name.
        print(error.format_message(), file=sys.stderr)
        status = 2
    except click.ClickException as error:
        message, hint = explained(error)
        print(f"Error: {message}\nHint: {hint}", file=sys.stderr)
        status = 2
    except (click.Abort, KeyboardInterrupt):
        status = 128 + interrupt.number
    except OSError as error:
        # A full disk, a folder that may not be written to: the person's to mend, and no mistake of ours.
        if debug:
            _print_traceback()
        # One of standard output comes again when it is flushed, and is told then.
        if (of_output := flushed()) is None and not isinstance(error, BrokenPipeError):
            from mesh_llm.cli.output import print_error

            print_error(of_system(error))
        end_with(1, of_output)
    except SystemExit as error:
        status = error.code
    end_with(status if isinstance(status, int) else 0, flushed())


def flushed() -> OSError | None:
    """Why standard output cannot be written. At the end of Python it would be too late to say so."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What could not be written stays in a buffer, and is tried again at the end: it goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None


def end_with(status: int, of_output: OSError | None) -> NoReturn:
    """End the program; `of_output`: why not all that it said could be written."""
    if of_output is None:
        sys.exit(status)
    # Where the reader of our output went away (`mesh-llm status | head`), nobody is left to tell.
    if not isinstance(of_output, BrokenPipeError):
        from mesh_llm.cli.output import print_error

        print_error(of_system(of_output, what="standard output"))
    sys.exit(status or 1)
