"""What clients of this node wait for the first token of an answer, beside what was predicted."""

from __future__ import annotations

from mesh_llm.defaults import PROMPT_TOKENS
from mesh_llm.planning.predict import predict
from mesh_llm.planning.speculation import cache_settings, made_by
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import FirstTokenStatus, PlanStatus


def first_token_status(view: NodeView, plan: PlanStatus | None) -> FirstTokenStatus:
    """`api.first_token` of the status: of the last answer by the engine that serves, if there is one.

    The prediction is for a prompt as long as that of this answer; before there is one, for the
    length that plans are compared by. `plan`: as the status has it.
    """
    seen = view.first_token()
    if seen is None:
        predicted_s = plan.predicted_first_token_s if plan is not None else None
        return FirstTokenStatus(measured_s=None, prompt_tokens=PROMPT_TOKENS, predicted_s=predicted_s)
    predicted_s = _predicted_s(view, seen.prompt_tokens) if seen.prompt_tokens is not None else None
    return FirstTokenStatus(
        measured_s=round(seen.seconds, 3),
        prompt_tokens=seen.prompt_tokens,
        predicted_s=round(predicted_s, 3) if predicted_s is not None else None,
    )


def _predicted_s(view: NodeView, prompt_tokens: int) -> float | None:
    """By the plan that serves; None where the model or a speed is not known here."""
    published, settings = view.mesh.serving(), view.mesh.settings()
    facts = view.model_files.facts(settings.fingerprint) if settings is not None else None
    if published is None or settings is None or facts is None:
        return None
    host, plan = published[0], published[1].plan
    found = predict(
        facts,
        plan.stages,
        view.mesh.snapshot(),
        host=host,
        settings=cache_settings(facts, made_by(plan, facts, settings), plan.context),
        head_on_worker=plan.head_on_worker,
        prompt_tokens=max(1, prompt_tokens),
    )
    return found.first_token_s if found is not None else None
