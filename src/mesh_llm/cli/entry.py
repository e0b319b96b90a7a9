"""Where `mesh-llm` begins: its help lies ready, as importing click takes longer than starting Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

HELP = Path(__file__).with_name("help.txt")
"""Written by `make fmt`, for this many columns."""
HELP_COLUMNS = 80


def main() -> None:
    if sys.argv[1:] in (["--help"], ["-h"], ["help"]) and _columns() >= HELP_COLUMNS:
        _show(HELP.read_text("utf-8"))
    try:
        from mesh_llm.cli.main import main

        main()
    except KeyboardInterrupt:
        # Within an import: `main` itself knows how to end.
        sys.exit(130)


def _show(text: str) -> NoReturn:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        from mesh_llm.cli.main import end_with, flushed

        end_with(1, flushed() or error)
    sys.exit()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return HELP_COLUMNS
