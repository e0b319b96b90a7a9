"""How far an engine guesses ahead, and how a mesh's settings ask it to run. Pure."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.defaults import GUESS_TEXT_MAX
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.planning.batch_sizes import micro_batch
from mesh_llm.planning.fit import CacheSettings, stage_need
from mesh_llm.types import ModelFacts, Plan


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


def made_by(plan: Plan, model: ModelFacts, settings: MeshSettings) -> MeshSettings:
    """The settings that a plan was made by: without the draft model where only so it fits."""
    stage = next((stage for stage in plan.stages if stage.node == plan.host), None)
    if settings.draft is None or stage is None:
        return settings
    head = not plan.head_on_worker or stage is plan.stages[-1]
    cache = cache_settings(model, settings, plan.context)
    need = stage_need(model, cache, (stage.first, stage.last), host=True, head=head)
    return settings if stage.need_bytes >= need.total_bytes else replace(settings, draft=None)


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
