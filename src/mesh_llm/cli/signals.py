"""Which signals end a command."""

from __future__ import annotations

import signal


def ending() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a request to end, and a terminal that was closed, unless `nohup` has that one ignored."""
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)
