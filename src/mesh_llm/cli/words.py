"""Words that people type from habit: other names of verbs, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

OTHER_NAMES = {
    "ps": "status",
    "list": "models",
    "ls": "models",
    "pull": "download",
    "start": "serve",
}
"""Each is the same as the verb behind it."""
_MEANT = {
    **dict.fromkeys(("ask", "prompt", "repl"), "chat"),
    **dict.fromkeys(("info", "nodes", "top"), "status"),
    **dict.fromkeys(("quit", "exit", "kill", "down"), "stop"),
    **dict.fromkeys(("search", "fetch", "get"), "download"),
    **dict.fromkeys(("up", "launch", "server"), "serve"),
    **dict.fromkeys(("unpause", "continue"), "resume"),
    **dict.fromkeys(("token", "add"), "invite"),
    **dict.fromkeys(("check", "debug"), "doctor"),
}
"""Words of other programs that mean a verb of ours, and are spelt quite differently."""
EXPLAINED = {
    "show": "mesh-llm plan --model NAME tells of a model, mesh-llm status of what runs",
    **dict.fromkeys(
        ("rm", "remove", "delete"),
        "mesh-llm unload NAME takes a model out of the mesh; its file is yours to delete: "
        "mesh-llm models --json has its path",
    ),
    **dict.fromkeys(
        ("cp", "create", "push"),
        "a model is a GGUF file that --model names; ~/.mesh-llm/catalog.toml has names of your own",
    ),
}
"""Verbs of Ollama's that none of ours stands for."""
_WITH_A_NAME = {"stop": "unload", "serve": "run", "run": "chat"}
"""Verbs that Ollama's users give something which ours do not take, and those that do."""


def nearest(word: str, known: Collection[str]) -> str | None:
    """The one of `known` that is meant by a word that is none of them; None where nobody can tell."""
    word = word.lower()
    if (meant := _MEANT.get(word)) in known:
        return meant
    # "stats" is near "start" as well: a verb that begins alike comes first.
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return next((name for name in near if name[:2] == word[:2]), near[0] if near else None)


def meant_with(verb: str | None, extra: str) -> str | None:
    """What somebody meant who gave a verb more than it takes."""
    return f"{_WITH_A_NAME[verb]} {extra}" if verb in _WITH_A_NAME else None


def is_model(word: str) -> bool:
    """Whether somebody has typed a model in the place of a verb."""
    if word.endswith(".gguf") or word.startswith(("hf:", "ollama:")) or Path(word).expanduser().is_file():
        return True
    # Here: only a mistake has to wait for it.
    from mesh_llm.models import catalog, names

    return names.tagged(word, catalog.load()) is not None
