"""Imports are most of the time that a node takes to start: no more of them than a verb needs."""

from __future__ import annotations

import gc
import importlib
import os
from types import ModuleType

_AUTHORITIES = "SSL_CERT_FILE"


def import_quickly(module: str) -> ModuleType:
    """The module, and whatever it imports.

    Importing aiohttp reads this machine's certificate authorities, a tenth of a second in every process.
    Nothing here needs them: a download brings its own (`download.hub.trust`). And what is imported stays,
    so there is no garbage to look for.
    """
    authorities = os.environ.get(_AUTHORITIES)
    os.environ[_AUTHORITIES] = os.devnull
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()
        del os.environ[_AUTHORITIES]
        if authorities is not None:
            os.environ[_AUTHORITIES] = authorities
