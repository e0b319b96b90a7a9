"""All of a simulation as one document: tables, curves, and what they stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

from mesh_llm.defaults import CLEARLY_FASTER
from mesh_llm.frozen import frozen
from mesh_llm.lab.simulate import distributions
from mesh_llm.lab.simulate.days import DayCase
from mesh_llm.lab.simulate.measures import Rate, growth, quantile
from mesh_llm.lab.simulate.modelled import ModelledCase
from mesh_llm.lab.simulate.planning_cases import GOOD, PlanningTime, PlanQuality
from mesh_llm.lab.simulate.whole_views import WholeCase
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series
from mesh_llm.types import Mode

Case = TypeVar("Case", PlanningTime, WholeCase, ModelledCase, DayCase)


@frozen
class Findings:
    times: tuple[PlanningTime, ...]
    qualities: tuple[PlanQuality, ...]
    whole: tuple[WholeCase, ...]
    modelled: tuple[ModelledCase, ...]
    days: tuple[tuple[str, DayCase], ...]
    """By the name of the model."""


def document_of(found: Findings, *, command: str, facts: dict[str, str]) -> Document:
    return Document(
        name="simulate",
        title="Meshes of many nodes, simulated",
        command=command,
        facts=facts,
        tables=tuple(
            table
            for table in (_times(found), _quality(found), _whole(found), _traffic(found), _days(found))
            if table.rows
        ),
        plots=tuple(plot for plot in _plots(found) if any(series.x for series in plot.series)),
        figures=_figures(found),
        notes=_notes(),
    )


# -- tables --------------------------------------------------------------------------------------


def _times(found: Findings) -> ResultTable:
    return ResultTable(
        title="Planning time",
        columns=("nodes", "model", "plan", "stages", "median, ms", "longest, ms"),
        rows=tuple(
            (
                f"{each.nodes:,}",
                each.model,
                each.mode.value,
                str(each.stages),
                f"{1e3 * median(each.seconds):.1f}",
                f"{1e3 * max(each.seconds):.1f}",
            )
            for each in found.times
        ),
        note="CPU time of one decision with its snapshot: a first plan, then decisions to keep it.",
    )


def _quality(found: Findings) -> ResultTable:
    cases = {
        "all": found.qualities,
        "one stage is best": [each for each in found.qualities if each.best_stages == 1],
        "more are best, a split is planned": [each for each in _splits(found) if each.mode is Mode.SPLIT],
        "more are best, one node is planned": [each for each in _splits(found) if each.mode is Mode.SOLO],
        f"all without gains below {CLEARLY_FASTER:g} times that one node forgoes": [
            each for each in found.qualities if not each.kept_whole
        ],
        "no plan holds it": [each for each in found.qualities if each.best_stages == 0],
    }
    return ResultTable(
        title="Plans of small meshes against the best of all plans",
        columns=(
            "cases",
            "count",
            "within 5 %",
            "median",
            "worst",
            "within 5 %, same host",
            "worst, same host",
        ),
        rows=tuple(
            (
                name,
                str(len(some)),
                str(sum(each.share >= GOOD for each in some)),
                f"{median(each.share for each in some):.3f}",
                f"{min(each.share for each in some):.3f}",
                str(sum(each.searched >= GOOD for each in some)),
                f"{min(each.searched for each in some):.3f}",
            )
            for name, some in cases.items()
            if some
        ),
        note="Predicted speed of the plan as a part of the best one's; two to six nodes, exhaustive. "
        "Same host: as a part of the best among plans that the chosen node hosts. A model that fits on one "
        f"node stays there unless several are {CLEARLY_FASTER:g} times as fast: fewer can fail.",
    )


def _splits(found: Findings) -> list[PlanQuality]:
    return [each for each in found.qualities if each.best_stages > 1]


def _whole(found: Findings) -> ResultTable:
    return ResultTable(
        title="Until everybody knows",
        columns=("nodes", "new facts, s", "join, s", "leave, s", "crash, s", "after a partition, s"),
        rows=tuple(
            (f"{each.nodes:,}", *(f"{value:.2f}" for value in _convergence(each))) for each in found.whole
        ),
        note="Whole views of the real code: until all tables are equal again, noticing a crash included.",
    )


def _convergence(case: WholeCase) -> tuple[float, ...]:
    return (case.facts_s, case.join_s, case.leave_s, case.crash_s, case.heal_s)


def _converged_s(at: int, case: WholeCase) -> float:
    return _convergence(case)[at]


def _traffic(found: Findings) -> ResultTable:
    rows: list[tuple[int, str, Rate, Rate, float, float | None]] = [
        (each.nodes, "all", each.quiet, each.churn, each.churn_mistaken, each.facts_bytes)
        for each in found.whole
    ]
    rows += [
        (each.nodes, f"{each.views}, others modelled", each.quiet, each.churn, each.churn_mistaken, None)
        for each in found.modelled
    ]
    return ResultTable(
        title="Messages of each node and second",
        columns=(
            "nodes",
            "whole views",
            "quiet, messages",
            "quiet, bytes",
            "churn, messages",
            "churn, bytes",
            "mistaken members",
            "one change, bytes",
        ),
        rows=tuple(
            (
                f"{nodes:,}",
                views,
                f"{quiet.messages:.1f}",
                f"{quiet.bytes:,.0f}",
                f"{churn.messages:.1f}",
                f"{churn.bytes:,.0f}",
                f"{wrong:.2f}",
                "" if one is None else f"{one:,.0f}",
            )
            for nodes, views, quiet, churn, wrong, one in rows
        ),
        note="Sent by each. Mistaken: members that a view has wrong at a time, of those that come and go. "
        "One change: what a change of one node's facts costs each of the others.",
    )


def _days(found: Findings) -> ResultTable:
    return ResultTable(
        title="Plans and waits over hours",
        columns=(
            "nodes",
            "model",
            "hours",
            "come or go",
            "plans changed",
            "for each hour",
            "users noticed",
            "without a plan",
            "reading the prompt, median s",
            "wait, median s",
            "95 %, s",
            "99 %, s",
        ),
        rows=tuple(
            (
                f"{day.nodes:,}",
                model,
                f"{day.hours:.1f}",
                str(day.events),
                str(day.changes),
                f"{day.changes / day.hours:.2f}" if day.hours else "",
                str(day.pauses),
                f"{100 * day.without_plan:.1f} %",
                _seconds(day.prompt_s, 0.5),
                *(_seconds(day.wait_s, part) for part in (0.5, 0.95, 0.99)),
            )
            for model, day in found.days
        ),
        note="Wait: until the first token after a prompt of 512 tokens, for somebody who asks at any time; "
        "reading the prompt is a part of it, and on machines without a large GPU nearly all. Who asks while "
        "no machines hold the model waits until they do, and is left out where they never do.",
    )


def _seconds(values: Sequence[float], part: float) -> str:
    return f"{quantile(values, part):.1f}" if values else "–"


# -- curves --------------------------------------------------------------------------------------


def _plots(found: Findings) -> tuple[Plot, ...]:
    models = list(dict.fromkeys(each.model for each in found.times))
    return (
        _plot(
            "Planning time",
            "ms of CPU time",
            [
                _curve(
                    model,
                    [each for each in found.times if each.model == model],
                    lambda each: 1e3 * median(each.seconds),
                )
                for model in models
            ],
        ),
        _plot(
            "Until everybody knows",
            "seconds",
            [
                _curve(name, found.whole, partial(_converged_s, at))
                for at, name in enumerate(("new facts", "join", "leave", "crash", "after a partition"))
            ],
            y_log=False,
        ),
        _plot(
            "Control traffic of each node",
            "bytes a second",
            [
                _curve("quiet", found.whole, lambda each: each.quiet.bytes),
                _curve("churn", found.whole, lambda each: each.churn.bytes),
                _curve(
                    "quiet, others modelled",
                    found.modelled,
                    lambda each: each.quiet.bytes,
                ),
                _curve(
                    "churn, others modelled",
                    found.modelled,
                    lambda each: each.churn.bytes,
                ),
            ],
        ),
        _plot(
            "Waits for a first token",
            "seconds, 95 %",
            [
                _curve(
                    model,
                    [day for name, day in found.days if name == model and day.wait_s],
                    lambda each: quantile(each.wait_s, 0.95),
                )
                for model in dict.fromkeys(name for name, _ in found.days)
            ],
        ),
    )


def _plot(title: str, y_label: str, series: Sequence[Series], *, y_log: bool = True) -> Plot:
    drawn = tuple(each for each in series if each.x)
    return Plot(title=title, x_label="nodes", y_label=y_label, series=drawn, x_log=True, y_log=y_log)


def _curve(label: str, cases: Sequence[Case], y: Callable[[Case], float]) -> Series:
    return Series(label=label, x=tuple(float(case.nodes) for case in cases), y=tuple(map(y, cases)))


# -- figures and notes ---------------------------------------------------------------------------


def _figures(found: Findings) -> tuple[Figure, ...]:
    figures = [
        Figure(
            name=f"planning, {each.nodes} nodes, {each.model}",
            unit="s",
            values=each.seconds,
            higher_is_better=False,
        )
        for each in found.times
    ]
    if found.qualities:
        shares = tuple(each.share for each in found.qualities)
        figures.append(Figure(name="plan quality", unit="of the best", values=shares, higher_is_better=True))
    cases: list[WholeCase | ModelledCase] = [*found.whole, *found.modelled]
    for case in cases:
        kind = "" if isinstance(case, WholeCase) else ", modelled"
        for name, rate in (("quiet", case.quiet), ("churn", case.churn)):
            figures.append(
                Figure(
                    name=f"control traffic, {case.nodes} nodes, {name}{kind}",
                    unit="B/s",
                    values=(rate.bytes,),
                    higher_is_better=False,
                )
            )
    if len(found.whole) > 1:
        nodes = [case.nodes for case in found.whole]
        figures += [
            Figure(
                name=f"growth of control traffic with nodes, {name}",
                unit="power",
                values=(growth(nodes, rates),),
                higher_is_better=False,
            )
            for name, rates in (
                ("quiet", [case.quiet.bytes for case in found.whole]),
                ("churn", [case.churn.bytes for case in found.whole]),
            )
        ]
    return tuple(figures)


def _notes() -> tuple[str, ...]:
    kinds = ", ".join(
        f"{kind.name} {100 * kind.share:.0f} % ({kind.session_h:g} h)" for kind in distributions.KINDS
    )
    nats = ", ".join(f"{nat.value} {100 * share:.0f} %" for nat, share in distributions.NAT_SHARES.items())
    return (
        f"machines and how long they stay on average: {kinds}",
        f"NATs: {nats}; {100 * distributions.LEAVES:.0f} % leave in an orderly way; "
        f"what a node tells changes every {distributions.FACTS_CHANGE_S:.0f} s on average",
        "every figure that is assumed stands with its reason in src/mesh_llm/lab/simulate/distributions.py",
    )
