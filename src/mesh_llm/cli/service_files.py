"""The files of a service: a unit for systemd, an agent for launchd, and their environment. Texts only."""

from __future__ import annotations

import hashlib
import plistlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mesh_llm.defaults import DRAIN_S, HAND_OVER_S
from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen

STOP_S = DRAIN_S + HAND_OVER_S + 30.0
"""Before a node that was told to stop is killed: others take over, it drains, its children end."""
RESTART_S = 5
STARTS = 5
STARTS_WITHIN_S = 300
"""A node that fails more often needs a person."""


@frozen
class Service:
    """One node as a service of its user."""

    home: Path
    arguments: tuple[str, ...] = ()
    folder: Path = Path("/")
    """Relative paths among the arguments count from here."""

    @property
    def name(self) -> str:
        """Another one for each home."""
        if self.home == Path("~/.mesh-llm").expanduser():
            return "mesh-llm"
        plain = re.sub(r"[^A-Za-z0-9]+", "-", self.home.name).strip("-") or "home"
        return f"mesh-llm-{plain}-{hashlib.sha256(str(self.home).encode()).hexdigest()[:4]}"

    @property
    def environment_file(self) -> Path:
        return self.home / "service.env"

    @property
    def command(self) -> list[str]:
        run = [sys.executable, "-P", "-m", "mesh_llm", "serve", "--plain"]
        return [*run, "--home", str(self.home), *self.arguments]


def environment_text(variables: Mapping[str, str]) -> str:
    """As systemd and a shell read it."""
    return "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(variables.items()))


def _quoted(value: str) -> str:
    _refuse_line_breaks(value)
    escaped = re.sub(r'(["$`\\])', r"\\\1", value)
    return f'"{escaped}"'


def unit_text(service: Service) -> str:
    """No directive here needs a right that a user lacks, and none keeps a GPU from being used."""
    start = " ".join(_word(part) for part in service.command)
    return f"""\
# Written by mesh-llm service install; mesh-llm service uninstall removes it.
[Unit]
Description=mesh-llm node on {_path(service.home)}
StartLimitIntervalSec={STARTS_WITHIN_S}
StartLimitBurst={STARTS}

[Service]
Type=exec
EnvironmentFile={_path(service.environment_file)}
WorkingDirectory=-{_path(service.folder)}
ExecStart={start}
Restart=on-failure
RestartSec={RESTART_S}
# Wrong usage stays wrong.
RestartPreventExitStatus=2
# SIGTERM to the node alone: it drains, hands over, and ends its children.
KillMode=mixed
TimeoutStopSec={STOP_S:.0f}
SuccessExitStatus=143
UMask=0077
LimitNOFILE=65536
NoNewPrivileges=yes
LockPersonality=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def _word(text: str) -> str:
    """One word of a command: systemd expands `%` and `$`."""
    _refuse_line_breaks(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _path(path: Path) -> str:
    _refuse_line_breaks(str(path))
    return str(path).replace("%", "%%")


def _refuse_line_breaks(text: str) -> None:
    if re.search(r"[\r\n\0]", text):
        raise UsageError(f"{text!r} has a line break in it, which a service cannot be given")


def agent_text(service: Service, log: Path) -> bytes:
    """For launchd, which has no file of variables: a shell reads it. Never tried on a Mac."""
    shell = ["/bin/sh", "-c", 'set -a; . "$0"; exec "$@"', str(service.environment_file)]
    return plistlib.dumps(
        {
            "Label": service.name,
            "ProgramArguments": [*shell, *service.command],
            "WorkingDirectory": str(service.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": int(STOP_S),
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
            "Umask": 0o077,
        }
    )
