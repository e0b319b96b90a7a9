"""How long a bench runs."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_llm.bench.rounds import Rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    quick: bool = False
    count: int | None = None
    """Rounds that were asked for; None: as many as the bench finds right."""

    def choose(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def rounds(self, *, full: int, quick: int, full_s: float, quick_s: float) -> Rounds:
        return Rounds(wanted=self.choose(full, quick), budget_s=quick_s if self.quick else full_s)
