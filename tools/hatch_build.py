"""Hatchling's hook: a wheel gets the lock file, and the native libraries that `tools/wheel.py` has compiled.

Without libraries it is for any platform, and whoever installs it compiles them on first use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltLibraries(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        # An installed mesh-llm bundles the very versions that it was tested with.
        build_data["force_include"]["requirements.lock"] = "mesh_llm/requirements.lock"
        folder = os.environ.get("MESH_LLM_PREBUILT")
        if not folder:
            return
        build_data["pure_python"] = False
        build_data["tag"] = os.environ["MESH_LLM_WHEEL_TAG"]
        for path in sorted(Path(folder).iterdir()):
            build_data["force_include"][str(path)] = f"mesh_llm/prebuilt/{path.name}"
