"""The file to attach to a question: findings, options and the end of the logs, without secrets."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mesh_llm import __version__
from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION, PROTOCOL_VERSION
from mesh_llm.doctor.context import CheckContext
from mesh_llm.doctor.finding import Finding
from mesh_llm.doctor.redaction import redact, secret_values
from mesh_llm.errors import MeshError
from mesh_llm.home import Home

LOG_LINES = 200
LOG_TAIL_BYTES = 64 << 10
"""Read from the end of each log."""


def document(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {"check": each.check, "level": each.level, "what": each.what, "why": each.why, "mend": each.mend}
        for each in findings
    ]


def report_text(context: CheckContext, findings: Iterable[Finding]) -> str:
    parts = [
        ("versions", _versions()),
        ("findings", json.dumps(document(findings), indent=2, ensure_ascii=False)),
        ("config.toml", _read(context.home.config_file)),
        ("network", json.dumps(context.node.network if context.node is not None else None, indent=2)),
        *((f"logs/{name}", _tail(context.home, name)) for name in ("node.log", "engine.log")),
    ]
    text = "".join(f"== {title} ==\n{body}\n\n" for title, body in parts)
    return redact(text, {*secret_values(), *_home_secrets(context.home)})


def _versions() -> str:
    system = (
        f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    )
    return f"mesh-llm {__version__}, {ENGINE_PACKAGE} {ENGINE_VERSION}, protocol {PROTOCOL_VERSION}\n{system}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"({error.strerror})"


def _tail(home: Home, name: str) -> str:
    try:
        with (home.log_folder / name).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({error.strerror})"
    return "\n".join(lines[-LOG_LINES:])


def _home_secrets(home: Home) -> Iterator[str]:
    """The node's key, and every long text in what the home remembers of its mesh."""
    key = _read(home.path / "identity").strip()
    if len(key) == 64:
        yield key
    try:
        yield from _texts(home.read_mesh() or {}, under="")
    except MeshError:
        # A damaged file is a finding already, and none of it is in the report.
        return


def _texts(value: object, *, under: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, under=str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, under=under)
    elif isinstance(value, str) and len(value) >= 16 and ("token" in under or "secret" in under):
        yield value
