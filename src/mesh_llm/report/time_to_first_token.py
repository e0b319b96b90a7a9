"""What clients of this node wait for the first token of an answer, beside what was predicted."""

from __future__ import annotations

from mesh_llm.defaults import PROMPT_TOKENS
from mesh_llm.planning.experience import corrected
from mesh_llm.report.plan_experience import raw_prediction
from mesh_llm.report.view import NodeView
from mesh_llm.status_schema import FirstTokenStatus, PlanStatus
from mesh_llm.types import Prediction


def first_token_status(view: NodeView, plan: PlanStatus | None) -> FirstTokenStatus:
    """`api.first_token` of the status: of the last answer by the engine that serves, if there is one.

    The prediction is for a prompt as long as that of this answer; before there is one, for the
    length that plans are compared by. `plan`: as the status has it.
    """
    seen = view.first_token()
    if seen is None:
        return FirstTokenStatus(
            measured_s=None,
            prompt_tokens=PROMPT_TOKENS,
            predicted_s=plan.predicted_first_token_s if plan is not None else None,
            predicted_low_s=plan.predicted_first_token_low_s if plan is not None else None,
            predicted_high_s=plan.predicted_first_token_high_s if plan is not None else None,
        )
    found = _predicted(view, seen.prompt_tokens)
    low, high = found.first_token_range if found is not None else (None, None)
    return FirstTokenStatus(
        measured_s=round(seen.seconds, 3),
        prompt_tokens=seen.prompt_tokens,
        predicted_s=round(found.first_token_s, 3) if found is not None else None,
        predicted_low_s=round(low, 3) if low is not None else None,
        predicted_high_s=round(high, 3) if high is not None else None,
    )


def _predicted(view: NodeView, prompt_tokens: int | None) -> Prediction | None:
    """By the plan that serves; None where the model or a speed is not known here."""
    published = view.mesh.serving()
    if published is None or prompt_tokens is None:
        return None
    plan = published[1].plan
    found = raw_prediction(view, plan, prompt_tokens)
    return corrected(found, view.experience_before(plan)) if found is not None else None
