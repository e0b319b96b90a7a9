"""The console's page, opened for a person who has just asked for it."""

from __future__ import annotations

import os
import sys
import threading

from mesh_llm.cli.output import is_terminal

_NOBODY_LOOKS = ("CI", "SSH_CONNECTION", "SSH_TTY", "MESH_LLM_NO_BROWSER")


def open_page(url: str) -> None:
    """Where somebody sits at this machine's own screen; elsewhere the printed link has to do."""
    if is_at_a_screen():
        import webbrowser

        # Some browsers keep their caller waiting until they are closed.
        threading.Thread(target=webbrowser.open, args=(url,), name="browser", daemon=True).start()


def is_at_a_screen() -> bool:
    if not (is_terminal(sys.stdout) and is_terminal(sys.stdin)) or any(map(os.environ.get, _NOBODY_LOOKS)):
        return False
    # Without a display the "browser" would be one in this very terminal.
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
