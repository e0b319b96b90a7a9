"""How far an engine guesses ahead, and how a mesh's settings ask it to run. Pure."""

from __future__ import annotations

from mesh_llm.defaults import GUESS_TEXT_MAX
from mesh_llm.planning.batches import micro_batch
from mesh_llm.planning.fit import CacheSettings
from mesh_llm.types import MeshSettings, ModelFacts


def text_guesses(model: ModelFacts, settings: MeshSettings) -> int:
    """Tokens guessed at once by what stood in the text before; 0 where nothing is guessed."""
    return GUESS_TEXT_MAX if settings.guess and can_guess(model) else 0


def model_guesses(model: ModelFacts, settings: MeshSettings) -> int:
    """The same by the draft model."""
    return settings.draft_max if settings.draft is not None and text_guesses(model, settings) else 0


def can_guess(model: ModelFacts) -> bool:
    """Whether a wrong guess can be taken back: a state that every token changes cannot.

    The engine would save it before each guess, and on a split model that is
    more than a guess can save.
    """
    return not any(layer.cache.state_bytes for layer in model.layers)


def cache_settings(model: ModelFacts, settings: MeshSettings, context: int) -> CacheSettings:
    """What the mesh's settings ask for, at so many tokens per slot."""
    guesses = max(text_guesses(model, settings), model_guesses(model, settings))
    return CacheSettings(
        context=context,
        slots=settings.slots,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        micro_batch=micro_batch(model),
        guesses=guesses,
        draft=settings.draft if guesses else None,
    )
