"""`mesh-llm service`: a node that the system starts, restarts and stops, for its user and without root."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click
from click.core import ParameterSource

from mesh_llm.cli import secret
from mesh_llm.cli.control import call
from mesh_llm.cli.options import debug_option, home_option, home_path, json_option, node_config
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.service_files import STOP_S, Service, agent_text, environment_text, unit_text
from mesh_llm.config import NodeConfig
from mesh_llm.engine.process import Finished, run, spawn
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.home import Home, write_private, write_whole
from mesh_llm.transport import invite

COMMAND_S = 20.0
"""For the system's service manager, which only takes orders."""
JOIN_S = 120.0
"""For a node to be in the mesh of its token: it may build native libraries before."""
POLL_S = 0.5
KEPT = (
    *("PATH", "LD_LIBRARY_PATH", "CXX", "CUDA_VISIBLE_DEVICES", "TMPDIR", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    *("MESH_LLM_MODELS", "MESH_LLM_CACHE", "MESH_LLM_BIND_IP", "MESH_LLM_NO_RELAY"),
)
"""Variables of the person who installs it that a node uses; a service has none of them by itself."""


# -- the system's managers --------------------------------------------------------------------------


class Manager(ABC):
    """Of services of this user."""

    @abstractmethod
    def file(self, service: Service) -> Path: ...

    @abstractmethod
    def text(self, service: Service) -> bytes: ...

    @abstractmethod
    async def start(self, service: Service) -> None:
        """Now and whenever this user's services begin; anew if it runs."""

    @abstractmethod
    async def stop(self, service: Service) -> None:
        """Now, after its open answers, and for good."""

    @abstractmethod
    async def state(self, service: Service) -> dict[str, object]: ...

    @abstractmethod
    def logs(self, service: Service, lines: int, *, follow: bool) -> list[str]:
        """The command that shows them."""


class Systemd(Manager):
    def file(self, service: Service) -> Path:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return base / "systemd" / "user" / f"{service.name}.service"

    def text(self, service: Service) -> bytes:
        return unit_text(service).encode()

    async def start(self, service: Service) -> None:
        await self._systemctl("daemon-reload")
        # After five failures in a row it would refuse.
        await self._tried("reset-failed", service.name)
        await self._systemctl("enable", service.name)
        await self._systemctl("restart", service.name)

    async def stop(self, service: Service) -> None:
        await self._systemctl("disable", "--now", service.name)

    async def state(self, service: Service) -> dict[str, object]:
        asked = "ActiveState,UnitFileState,MainPID,NRestarts"
        said = await self._systemctl("show", f"--property={asked}", service.name)
        found = dict(line.split("=", 1) for line in said.output if "=" in line)
        return {
            "state": found.get("ActiveState", "unknown"),
            "enabled": found.get("UnitFileState") == "enabled",
            "pid": int(found.get("MainPID", "0")) or None,
            "restarts": int(found.get("NRestarts", "0")),
            "linger": Path("/var/lib/systemd/linger", getpass.getuser()).exists(),
        }

    def logs(self, service: Service, lines: int, *, follow: bool) -> list[str]:
        shown = ["journalctl", "--user", "--unit", service.name, "--lines", str(lines), "--no-pager"]
        return [*shown, *(["--follow"] if follow else [])]

    async def _systemctl(self, *arguments: str) -> Finished:
        finished = await self._tried(*arguments)
        if finished.status != 0:
            why = (finished.errors or ("it gives no reason",))[-1]
            raise MeshError(
                f"systemctl --user {arguments[0]} failed: {why}",
                hint="log in as this user with a session of systemd; over su or sudo there is none",
            )
        return finished

    async def _tried(self, *arguments: str) -> Finished:
        # A stop waits for open answers.
        return await run(["systemctl", "--user", *arguments], timeout_s=COMMAND_S + STOP_S)


class Launchd(Manager):
    """Written after its manual, and never tried."""

    def file(self, service: Service) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{service.name}.plist"

    def text(self, service: Service) -> bytes:
        return agent_text(service, self._log(service))

    async def start(self, service: Service) -> None:
        with suppress(MeshError):
            await self.stop(service)
        await self._launchctl("bootstrap", f"gui/{os.getuid()}", str(self.file(service)))

    async def stop(self, service: Service) -> None:
        await self._launchctl("bootout", self._target(service))

    async def state(self, service: Service) -> dict[str, object]:
        finished = await run(["launchctl", "print", self._target(service)], timeout_s=COMMAND_S)
        words = [line.split("=") for line in finished.output if "=" in line]
        found = {parts[0].strip(): parts[1].strip() for parts in words}
        pid = found.get("pid", "")
        return {
            "state": found.get("state", "unknown") if finished.status == 0 else "inactive",
            "enabled": finished.status == 0,
            "pid": int(pid) if pid.isdigit() else None,
        }

    def logs(self, service: Service, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self._log(service))]

    def _log(self, service: Service) -> Path:
        return service.home / "logs" / "service.log"

    def _target(self, service: Service) -> str:
        return f"gui/{os.getuid()}/{service.name}"

    async def _launchctl(self, *arguments: str) -> None:
        finished = await run(["launchctl", *arguments], timeout_s=COMMAND_S + STOP_S)
        if finished.status != 0:
            why = (finished.errors or ("it gives no reason",))[-1]
            raise MeshError(f"launchctl {arguments[0]} failed: {why}")


def _manager() -> Manager:
    if sys.platform == "darwin":
        return Launchd()
    if shutil.which("systemctl") is None:
        raise MeshError(
            "there is no systemd on this machine, which would run the service",
            hint="let your own init system start: mesh-llm serve --plain",
        )
    return Systemd()


# -- the verbs --------------------------------------------------------------------------------------


@click.group()
def service() -> None:
    """A node as a service: started at log-in, restarted when it fails, stopped after open answers."""


@service.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.option("--no-start", is_flag=True, help="write its files only")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[NODE OPTIONS]...")
def install(no_start: bool, options: tuple[str, ...]) -> None:
    """Install a node with these options as a service of this user, and start it.

    Takes the options of mesh-llm serve. Secrets among them go to service.env in the home, which only you
    can read; options in config.toml need not be repeated. Again, with other options, it replaces the
    service.
    """
    arguments = [*options[1:]] if options[:1] == ("--",) else [*options]
    manager = _manager()
    made, config, variables = _specified(arguments)
    if no_start and config.join is not None:
        raise UsageError(
            "--join and --no-start cannot be used together", hint="a token is used up by joining"
        )
    if config.join is not None:
        invite.decode(config.join)
    home = Home(config.home)
    home.create()
    file = manager.file(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = {path: _text(path) for path in (made.environment_file, file)}
    ran = before[file] is not None and asyncio.run(_runs(manager, made))
    try:
        texts = {made.environment_file: environment_text(variables), file: manager.text(made).decode()}
        # In one piece: a manager that reads half a file complains about it.
        write_whole(texts, mode=0o600)
        click.echo(f"Wrote {file}")
        if no_start:
            return
        asyncio.run(_start(manager, made, home, config, variables))
    except (KeyboardInterrupt, SystemExit):
        asyncio.run(_take_back(manager, made, before, restart=ran))
        click.echo(
            f"Interrupted: {made.name} is {'as it was' if before[file] else 'not installed'}", err=True
        )
        raise
    click.echo(f"Started {made.name}; mesh-llm service status shows it")
    if not Path("/var/lib/systemd/linger", getpass.getuser()).exists() and sys.platform == "linux":
        click.echo("It ends when you log out. To keep it running: loginctl enable-linger", err=True)


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


async def _runs(manager: Manager, made: Service) -> bool:
    with suppress(MeshError):
        return (await manager.state(made))["state"] == "active"
    return False


async def _take_back(
    manager: Manager, made: Service, before: Mapping[Path, str | None], *, restart: bool
) -> None:
    """Restore the files and the service: later starts must not find the token of this one."""
    try:
        with suppress(MeshError):
            await manager.stop(made)
    finally:
        for path, text in before.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_private(path, text)
    if restart:
        with suppress(MeshError):
            await manager.start(made)


def _specified(arguments: list[str]) -> tuple[Service, NodeConfig, dict[str, str]]:
    """The service that these options ask for, and its variables; checked as a start would."""
    from mesh_llm.cli.serve import serve

    variables = {name: value for name in KEPT if (value := os.environ.get(name))}
    with serve.make_context("mesh-llm service install", list(arguments)) as ctx:
        given, source = dict(ctx.params), ctx.get_parameter_source
        config = node_config(ctx.params)
        dropped = ["--home"]
        for option, value in (("--join", config.join), ("--api-key", config.api_key)):
            name = option.removeprefix("--").replace("-", "_")
            # The node reads what a file holds; but it must not join anew at every start.
            in_file = str(given[name]).startswith("@") and option != "--join"
            if value is not None and not in_file and source(name) is not ParameterSource.DEFAULT_MAP:
                variables[secret.VARIABLES[option]] = value
                dropped.append(option)
    if config.relay_token is not None:
        variables[secret.VARIABLES["--token"]] = config.relay_token
    made = Service(
        home=Home(config.home).path, arguments=tuple(_without(arguments, dropped)), folder=Path.cwd()
    )
    return made, config, {**variables, "MESH_LLM_NO_BROWSER": "1"}


def _without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in flags:
            skip = True
        elif argument.partition("=")[0] not in flags:
            kept.append(argument)
    return kept


async def _start(
    manager: Manager, made: Service, home: Home, config: NodeConfig, variables: dict[str, str]
) -> None:
    await manager.start(made)
    if config.join is None:
        return
    # From the next start on it returns to its mesh by itself; a token may expire, or its inviter be away.
    joined = await _joins(home, invite.decode(config.join).mesh)
    variables = {name: value for name, value in variables.items() if name != secret.VARIABLES["--join"]}
    write_private(made.environment_file, environment_text(variables))
    if not joined:
        await manager.stop(made)
        raise MeshError(
            f"the node did not join within {JOIN_S:.0f} s, and was stopped",
            hint=f"see mesh-llm service logs, then install it again with a new token ({made.name})",
        )


async def _joins(home: Home, mesh: str) -> bool:
    deadline = time.monotonic() + JOIN_S
    while time.monotonic() < deadline:
        with suppress(MeshError):
            status = await call(home, "GET", "/api/status")
            if status["mesh"]["id"] == mesh:
                return True
        await asyncio.sleep(POLL_S)
    return False


@service.command()
@home_option
@debug_option
def uninstall(home: Path | None, debug: bool) -> None:
    """Stop the service after open answers and remove its files; the home stays."""
    manager, made = _installed(home)
    asyncio.run(manager.stop(made))
    for path in (manager.file(made), made.environment_file):
        path.unlink(missing_ok=True)
    click.echo(f"Removed {made.name}")


@service.command()
@home_option
@json_option
@debug_option
def status(home: Path | None, as_json: bool, debug: bool) -> None:
    """Show whether the service runs, and whether it starts by itself."""
    manager, made = _installed(home)
    document: dict[str, object] = {"name": made.name, "file": str(manager.file(made)), "home": str(made.home)}
    document |= asyncio.run(manager.state(made))
    if as_json:
        print_json(document)
    else:
        print_table([(name, _shown(value)) for name, value in document.items()])


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


@service.command()
@click.option("-f", "--follow", is_flag=True, help="go on with new lines until Ctrl-C")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="how many of the last lines",
)
@home_option
@debug_option
def logs(follow: bool, lines: int, home: Path | None, debug: bool) -> None:
    """Show what the service has said: the system's journal. mesh-llm logs shows the node's own."""
    manager, made = _installed(home)
    raise SystemExit(asyncio.run(_passed_on(manager.logs(made, lines, follow=follow))))


async def _passed_on(argv: Sequence[str]) -> int:
    async with spawn(argv, on_stdout=click.echo, on_stderr=lambda line: click.echo(line, err=True)) as child:
        return await child.wait()


def _installed(home: Path | None) -> tuple[Manager, Service]:
    manager = _manager()
    made = Service(home=Home(home_path(home)).path)
    if not manager.file(made).exists():
        raise MeshError(f"no service is installed for {made.home}", hint="mesh-llm service install")
    return manager, made
