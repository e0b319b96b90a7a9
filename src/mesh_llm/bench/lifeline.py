"""Program: become another program that ends when the bench does, even by kill -9.

A block that starts a child ends it, too, but not when the bench itself is
killed. Linux keeps this wish across exec; elsewhere the child is merely run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    follow_parent()
    os.execv(sys.argv[1], sys.argv[1:])
