"""Files that are sound and that the engine cannot run all the same, and what to do instead. Pure.

Ollama writes names of its own into the files of some models, and puts the
projector of others into the same file: they run in Ollama and nowhere else, and
the same models are to be had as upstream has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mesh_llm.errors import ModelError
from mesh_llm.frozen import frozen

_SHOWN_CHARS = 40
_OF_PROJECTORS = ("v.", "mm.")
"""How their tensors begin; no language model has such."""


@frozen
class Explanation:
    sentence: str
    hint: str


class _Ollamas(NamedTuple):
    """A name of Ollama's own."""

    model: str
    upstream: str | None
    """None where upstream has no such model at all."""
    entry: str | None
    """A name in the catalog under which the same model is to be had."""


_OLLAMAS = {
    "glm4moelite": _Ollamas("GLM-4.7-Flash", "deepseek2", "GLM-4.7-Flash"),
    "gptoss": _Ollamas("gpt-oss", "gpt-oss", "gpt-oss-20b"),
    "qwen25vl": _Ollamas("Qwen2.5-VL", "qwen2vl", None),
    "olmo3": _Ollamas("OLMo 3", "olmo2", None),
    "deepseekocr": _Ollamas("DeepSeek-OCR", "deepseek2-ocr", None),
    "mllama": _Ollamas("Llama 3.2 Vision", None, None),
}


def explain(architecture: str) -> Explanation | None:
    """What a name is that the engine does not know; None of one that is nobody's that we know."""
    own = _OLLAMAS.get(architecture)
    if own is None:
        return None
    elsewhere = f"upstream calls it {own.upstream}" if own.upstream else "upstream does not run that model"
    return Explanation(
        sentence=f"{architecture} is Ollama's own name for {own.model}; {elsewhere}",
        hint=_instead(own),
    )


def _instead(own: _Ollamas) -> str:
    if own.entry is not None:
        return f"mesh-llm download {own.entry}"
    if own.upstream is not None:
        return f"take a GGUF of {own.model} from Hugging Face: --model hf:OWNER/REPO"
    return "mesh-llm download lists models that work"


def unknown(architecture: str) -> Explanation:
    """The same of any name."""
    shown = "".join(sign if sign.isprintable() else "?" for sign in architecture[:_SHOWN_CHARS])
    return explain(architecture) or Explanation(
        sentence=f"{shown} is an architecture that this engine does not know",
        hint="a newer mesh-llm may; mesh-llm download lists models that work",
    )


def refusal(document: Mapping[str, Any]) -> Explanation | None:
    """Why the engine would refuse what `engine/children/gguf.py` printed; None if it would not."""
    architecture = document["metadata"].get("general.architecture")
    if not isinstance(architecture, str):
        return None
    if document.get("architecture_known") is False:
        return unknown(architecture)
    if any(row[0].startswith(_OF_PROJECTORS) for row in document["tensors"]):
        return Explanation(
            sentence="its projector is inside the file, as only Ollama has it; the engine takes two files",
            hint="take the GGUF of the same model from Hugging Face: --model hf:OWNER/REPO",
        )
    return None


def check_runs(document: Mapping[str, Any], file: str) -> None:
    """Raise where the engine would refuse it: before anything is loaded."""
    if (told := refusal(document)) is not None:
        raise ModelError(f"{file} cannot be run: {told.sentence}", hint=told.hint)
