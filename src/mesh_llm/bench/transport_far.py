"""Program: the far ends of links that are measured, whose descriptors its first line of input names."""

from __future__ import annotations

import json
import socket
import sys
import threading

from mesh_llm.transport import link_meter

_BYTES, _WITHIN_S = 1 << 40, 600.0
"""It measures itself alone: its owner ends it."""


def main() -> None:
    for number in json.loads(sys.stdin.readline()):
        end = socket.socket(fileno=number)
        limits = {"limit_bytes": _BYTES, "within_s": _WITHIN_S}
        threading.Thread(target=link_meter.answer, args=(end,), kwargs=limits, daemon=True).start()
    # Its input stays open as its lifeline.
    sys.stdin.read()


if __name__ == "__main__":
    main()
