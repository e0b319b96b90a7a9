"""`mesh-llm doctor`: what is wrong with this machine and its mesh, and the command that mends it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mesh_llm import __version__
from mesh_llm.cli.config_file import PROBLEM, ConfiguredIfFine
from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_path, json_option, options_named
from mesh_llm.cli.output import print_json
from mesh_llm.doctor.context import CheckContext, RunningNode
from mesh_llm.doctor.examine import examine, worst
from mesh_llm.doctor.finding import Finding, Level
from mesh_llm.doctor.report import document, report_text
from mesh_llm.errors import MeshError, NodeNotRunning
from mesh_llm.home import Home

_WIDTH = max(map(len, Level))


@click.command(cls=ConfiguredIfFine)
@click.argument("checks", nargs=-1, metavar="[CHECK]...")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="also write a report without secrets, to attach to a question",
)
@options_named("port", "listen", "console", "bind_port", "bind_ip", "client", "home")
@json_option
@debug_option
def doctor(checks: tuple[str, ...], report: Path | None, as_json: bool, debug: bool, **options: Any) -> None:
    """Check this machine and its mesh: what is wrong, why it matters, and the command that mends it.

    Asks this machine, the running node and its mesh; nobody else. Ends with 1 if something is broken.
    With names of checks, it runs those alone.
    """
    context, findings = asyncio.run(_examine(options, checks))
    if as_json:
        print_json({"version": __version__, "level": worst(findings), "findings": document(findings)})
    else:
        _show(findings)
    if report is not None:
        _write(report, report_text(context, findings))
        click.echo(f"Report in {report}: read it before you pass it on", err=True)
    raise SystemExit(1 if worst(findings) is Level.BROKEN else 0)


async def _examine(
    options: dict[str, Any], checks: Sequence[str]
) -> tuple[CheckContext, tuple[Finding, ...]]:
    home = Home(home_path(options.pop("home")))
    options["bind_ip"] = options["bind_ip"] or os.environ.get("MESH_LLM_BIND_IP") or None
    node, problem = await _running(home)
    refused = click.get_current_context().meta.get(PROBLEM)
    context = CheckContext(home=home, node=node, node_problem=problem, config_problem=refused, **options)
    return context, await examine(context, checks)


async def _running(home: Home) -> tuple[RunningNode | None, MeshError | None]:
    try:
        status = await call(home, "GET", "/api/status")
        network = await call(home, "GET", "/api/network")
    except NodeNotRunning:
        return None, None
    except MeshError as error:
        return None, error
    return RunningNode(status=status, network=network), None


def _show(findings: Sequence[Finding]) -> None:
    name_width = max((len(each.check) for each in findings), default=0)
    margin = " " * (_WIDTH + name_width + 4)
    for each in findings:
        click.echo(f"{each.level:{_WIDTH}}  {each.check:{name_width}}  {each.what}")
        if each.level is not Level.OK:
            click.echo(f"{margin}why:  {each.why}\n{margin}mend: {each.mend}")
    counts = Counter(each.level for each in findings)
    click.echo(f"\n{counts[Level.BROKEN]} broken, {counts[Level.WARNING]} warnings, {counts[Level.OK]} ok")


def _write(path: Path, text: str) -> None:
    """Readable by its owner: who else may see it is theirs to decide."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
