"""Where checks look, and what is known before they begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from mesh_llm.defaults import API_LISTEN, API_PORT
from mesh_llm.errors import MeshError
from mesh_llm.frozen import frozen
from mesh_llm.home import Home


@frozen
class RunningNode:
    """What the node on this home has answered."""

    status: Mapping[str, Any]
    network: Mapping[str, Any]
    """`report.network` has its fields; empty where the node is of a version without them."""


@frozen
class CheckContext:
    home: Home
    port: int = API_PORT
    listen: str = API_LISTEN
    console: int | None = None
    bind_port: int = 0
    bind_ip: str | None = None
    client: bool = False
    node: RunningNode | None = None
    """None: no node runs on this home."""
    node_problem: MeshError | None = None
    """Why a node that should be there did not answer."""
    config_problem: MeshError | None = None
    """Why the home's file of options cannot be used."""
    root: Path = field(default=Path("/"))
    """Of the files by which the kernel tells of itself; tests have one of their own."""
    now: Callable[[], float] = time.time
