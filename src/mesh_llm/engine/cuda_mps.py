"""Whether CUDA's multi-process service (MPS) serves the processes of this user.

With it, processes compute on one GPU at the same time; without it, they take turns. A process asks for it
when it first uses CUDA, and never again: a service that is started later has no part in what runs already.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import closing
from pathlib import Path

_USUAL_FOLDER = "/tmp/nvidia-mps"
_ROOT = 0


def serves_this_user() -> bool:
    """By the socket of its control daemon: this user's, or root's, who starts a server for each user.

    The usual folder lies where anybody may make one.
    """
    control = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _USUAL_FOLDER) / "control"
    try:
        found = control.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid in (_ROOT, os.getuid()) and _listens(control)


def _listens(control: Path) -> bool:
    """A daemon that is gone leaves its socket behind.

    One that is there is connection-oriented: the kernel refuses a datagram socket for that, and does not
    disturb it.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(str(control))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return False
