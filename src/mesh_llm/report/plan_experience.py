"""What the plans that this node hosts show while they run, beside what was predicted of them."""

from __future__ import annotations

from pathlib import Path

from mesh_llm.gateway.metrics import FirstToken
from mesh_llm.host.plan_run import PlanRun
from mesh_llm.planning.experience import Experience, plan_key
from mesh_llm.planning.predict import predict
from mesh_llm.planning.speculation import cache_settings, made_by
from mesh_llm.report.experience_file import ExperienceFile
from mesh_llm.report.view import NodeView
from mesh_llm.types import Fingerprint, Plan, Prediction


class PlanExperience:
    def __init__(self, view: NodeView, file: Path) -> None:
        self._view = view
        self._file = ExperienceFile(file)
        self._token_s: float | None = None
        self._first: FirstToken | None = None
        self._of: PlanRun | None = None
        self._before = ("", Experience())
        """What the plan that runs had shown when it began to run, and its key."""

    def of(self, plan: Plan) -> Experience:
        return self._file.of(self._key(plan))

    def before(self, plan: Plan) -> Experience:
        """Without what it shows now: else a prediction would be made of what it is held against."""
        key = self._key(plan)
        return self._before[1] if key == self._before[0] else self._file.of(key)

    def _key(self, plan: Plan) -> str:
        settings = self._view.settings()
        fingerprint = settings.fingerprint if settings is not None else Fingerprint("")
        return plan_key(plan, self._view.mesh.snapshot(), fingerprint)

    def learn(self, run: PlanRun) -> None:
        """Something has been answered, or is being answered."""
        key, seen = self._key(run.plan), self.of(run.plan)
        if run is not self._of:
            self._of, self._before = run, (key, seen)
        token_s, first = self._view.token_s(run), self._view.first_token()
        if token_s is not None and token_s != self._token_s:
            self._token_s = token_s
            if (predicted := self._predicted(run.plan, None)) is not None:
                seen = seen.with_token(token_s * predicted.tok_s)
        if first is not None and first.prompt_tokens and first != self._first:
            self._first = first
            if (predicted := self._predicted(run.plan, first.prompt_tokens)) is not None:
                seen = seen.with_first_token(first.seconds / predicted.first_token_s)
        self._file.learn(key, seen)

    def _predicted(self, plan: Plan, prompt_tokens: int | None) -> Prediction | None:
        """By what the devices have shown, and not by what the plan has."""
        return raw_prediction(self._view, plan, prompt_tokens)


def raw_prediction(view: NodeView, plan: Plan, prompt_tokens: int | None) -> Prediction | None:
    """Of a plan, for so long a prompt; None where the model or a speed is not known here."""
    settings = view.mesh.settings()
    facts = view.model_files.facts(settings.fingerprint) if settings is not None else None
    if settings is None or facts is None or plan.host is None:
        return None
    more = {} if prompt_tokens is None else {"prompt_tokens": max(1, prompt_tokens)}
    return predict(
        facts,
        plan.stages,
        view.mesh.snapshot(),
        host=plan.host,
        settings=cache_settings(facts, made_by(plan, facts, settings), plan.context),
        head_on_worker=plan.head_on_worker,
        **more,
    )
