"""Errors written for the person who reads them: what happened, to what, what to do."""

from __future__ import annotations

import errno


class MeshError(Exception):
    """An expected failure: one sentence, perhaps a hint, never a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


_ROOM = "make room (df -h shows where), then try again"
_ELSEWHERE = "name other folders in MESH_LLM_HOME, MESH_LLM_CACHE or MESH_LLM_MODELS"
_MENDS = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EROFS: _ELSEWHERE, errno.EACCES: _ELSEWHERE}


def of_system(error: OSError, *, what: str | None = None) -> MeshError:
    """What the system refused: a full disk, a folder that may not be written to. The person's to mend."""
    named = what or error.filename
    return MeshError(
        f"{f'{named}: ' if named else ''}{error.strerror or error}", hint=_MENDS.get(error.errno or 0)
    )


class UsageError(MeshError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class NotOwner(MeshError):
    """Only an owner of the mesh may do that."""


class EngineMissing(MeshError):
    """The engine wheel is absent, or not the one that this version was made for."""


class BuildFailed(MeshError):
    """A native library could not be built."""


class ModelError(MeshError):
    """A model file is missing, unreadable, damaged, or not one we can run."""


class ModelDoesNotFit(MeshError):
    """The memory at hand does not hold the model."""


class DownloadFailed(MeshError):
    """A model could not be fetched."""


class EngineFailed(MeshError):
    """The engine child died or could not start."""


class HomeInUse(MeshError):
    """Another node runs on the same home."""


class PortInUse(MeshError):
    """The API port belongs to somebody else."""


class NodeNotRunning(MeshError):
    """A command needs a running node, and there is none on this home."""


class NodeUnreachable(MeshError):
    """There is no way to another node right now."""


class LinkRefused(MeshError):
    """Another node, or this one, does not take a link or a lease."""


class MalformedMessage(MeshError):
    """A peer sent something that is none of the messages that members exchange."""


class Misquoted(MalformedMessage):
    """A peer passed on what another one has signed, under numbers that are not in it."""


class Forged(MeshError):
    """A peer passed on something that its signature does not hold for."""


class InviteRefused(MeshError):
    """A text that is no invite token, or no longer one."""


class CredentialRefused(MeshError):
    """A chain of grants that does not make its holder a member."""


class JoinRefused(MeshError):
    """A mesh could not be joined, or a member would not have us."""


class Expelled(JoinRefused):
    """The invite by which this node came in was revoked."""


class PeerLost(MeshError):
    """A connection or a stream to another node broke, or never came about."""


class LinkFailed(MeshError):
    """A data link between two nodes did not come about."""


class AgentConfigRefused(MeshError):
    """An agent's config file is left as it is."""
