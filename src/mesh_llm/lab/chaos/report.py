"""What a run found, as tables and curves."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from mesh_llm.lab.chaos.oracles import ORACLES, STILL_S, ChaosFinding, of_kind, unstruck_pauses
from mesh_llm.lab.chaos.pauses import PARTS, Pause, moments_of
from mesh_llm.lab.chaos.records import Record
from mesh_llm.lab.chaos.schedule import KINDS
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series

LONGEST = 12
"""Pauses that are listed one by one."""
_READY = re.compile(r"^engine ready .*took_s=([\d.]+)")


def document(
    records: Sequence[Record], findings: Sequence[ChaosFinding], facts: Mapping[str, str]
) -> Document:
    run = records[0]
    found = list(unstruck_pauses(records))
    loading = [float(took[1]) for each in of_kind(records, "told") if (took := _READY.search(each["text"]))]
    loading = loading or [0.0]
    return Document(
        name="chaos",
        title="A mesh under load while things are done to it",
        command=run["command"],
        facts={
            **facts,
            "seed": str(run["seed"]),
            "minutes": f"{run['minutes']:g}",
            "loading": f"{median(loading):.1f} s for an engine to be ready, in the median of {len(loading)}",
        },
        tables=(
            _oracles(findings, found),
            _findings(findings),
            _faults(records),
            _answers(records),
            _parts(found),
            _longest(found),
            _failed_plans(records),
        ),
        plots=(_memory(records), _descriptors(records), _lengths(found)),
        figures=(
            Figure(
                name="pause",
                unit="s",
                values=tuple(round(each.length_s, 2) for each in found),
                higher_is_better=False,
            ),
            Figure(name="loading", unit="s", values=tuple(loading), higher_is_better=False),
            Figure(
                name="still",
                unit="s",
                values=tuple(round(each.still_s, 2) for each in found),
                higher_is_better=False,
            ),
        ),
        notes=_notes(run),
    )


def _notes(run: Record) -> tuple[str, ...]:
    return (
        "three nodes (two of them owners) and a lite client on this machine, one model split over all three; "
        "one node is left untouched at any time",
        "disk, memory and clock faults touch the lab's own processes alone: RLIMIT_FSIZE, RLIMIT_AS, and the "
        "clock of a node's own process; nothing is sent beyond loopback",
        "a pause is the longest gap of an answer, from 2 s on; not those of clients whose own node was "
        "struck",
        *(f"left out: {kind}: {why}" for kind, why in run["left_out"].items()),
    )


def _oracles(findings: Sequence[ChaosFinding], found: Sequence[Pause]) -> ResultTable:
    counts = Counter(each.oracle for each in findings)
    return ResultTable(
        title="What has to hold",
        columns=("oracle", "", "findings"),
        rows=tuple(
            (name, (check.__doc__ or "").split("\n")[0], str(counts[name])) for name, check in ORACLES.items()
        ),
        note=_stood_still(found),
    )


def _stood_still(found: Sequence[Pause]) -> str:
    """What the allowance for each loss lets pass."""
    over = sum(each.still_s > STILL_S for each in found)
    still_s = max((each.still_s for each in found), default=0.0)
    longest_s = max((each.length_s for each in found), default=0.0)
    return (
        f"still: {STILL_S:g} s are allowed for each loss in a pause; answers that stood still for longer "
        f"than that: {over}, the longest for {still_s:.1f} s; the longest pause, with what computing took: "
        f"{longest_s:.1f} s"
    )


def _findings(findings: Sequence[ChaosFinding]) -> ResultTable:
    rows = tuple((f"{each.at_s:.1f}", each.oracle, each.text) for each in findings)
    return ResultTable(title="Findings", columns=("s", "oracle", "what"), rows=rows or (("", "", "none"),))


def _faults(records: Sequence[Record]) -> ResultTable:
    counts: Counter[tuple[str, str]] = Counter(
        (each["fault"], each["phase"]) for each in of_kind(records, "fault")
    )
    return ResultTable(
        title="Faults",
        columns=("fault", "what happens", "done", "nothing to strike"),
        rows=tuple(
            (name, kind.text, str(counts[name, "end"]), str(counts[name, "failed"]))
            for name, kind in KINDS.items()
        ),
    )


def _answers(records: Sequence[Record]) -> ResultTable:
    forms: dict[str, list[Record]] = defaultdict(list)
    for answer in of_kind(records, "answer"):
        forms[answer["form"]].append(answer)
    columns = ("form", "asked", "whole", "client left", "refused or broken off", "resumed")
    return ResultTable(
        title="Answers",
        columns=columns,
        rows=tuple(
            (
                form,
                str(len(found)),
                str(sum(each["outcome"] == "done" for each in found)),
                str(sum(each["outcome"] == "left" for each in found)),
                str(sum(each["outcome"] not in ("done", "left") for each in found)),
                str(sum(bool(each["seams"]) for each in found)),
            )
            for form, found in sorted(forms.items())
        ),
        note="whole: to the last word, and compared with the undisturbed answer",
    )


def _parts(found: Sequence[Pause]) -> ResultTable:
    """Of pauses in which another engine went on, or another plan began to serve."""
    caused = [each for each in found if each.still_s > 0]
    rows = []
    for part in PARTS:
        values = [each.parts[part] for each in caused] or [0.0]
        share = 100 * sum(values) / (sum(each.length_s for each in caused) or 1.0)
        rows.append((part, f"{median(values):.1f}", f"{max(values):.1f}", f"{share:.0f} %"))
    return ResultTable(
        title="Where the time of pauses goes",
        columns=("part", "median s", "longest s", "share"),
        rows=tuple(rows),
        note=f"pauses with a loss in them: {len(caused)} of {len(found)}; computing: a place in the queue, "
        "reading all again, the word itself, and what was lost before a word came",
    )


def _longest(found: Sequence[Pause]) -> ResultTable:
    ordered = sorted(found, key=lambda each: each.length_s, reverse=True)[:LONGEST]
    return ResultTable(
        title="The longest pauses",
        columns=("s", "still", "at", "question", "losses", "the first by", *PARTS, "why plans failed"),
        rows=tuple(
            (
                f"{each.length_s:.1f}",
                f"{each.still_s:.1f}",
                f"{each.begin_s:.0f}",
                f"{each.question} via {each.via}",
                str(each.losses),
                each.fault,
                *(f"{each.parts[part]:.1f}" for part in PARTS),
                "; ".join(each.failures),
            )
            for each in ordered
        ),
    )


def _failed_plans(records: Sequence[Record]) -> ResultTable:
    took: dict[str, list[float]] = defaultdict(list)
    for each in moments_of(records).failed:
        took[each.why].append(each.failed_s - each.proposed_s)
    ordered = sorted(took.items(), key=lambda each: sum(each[1]), reverse=True)
    return ResultTable(
        title="Why plans failed before they served",
        columns=("why", "plans", "seconds in all"),
        rows=tuple((why, str(len(each)), f"{sum(each):.1f}") for why, each in ordered) or (("none", "", ""),),
    )


def _memory(records: Sequence[Record]) -> Plot:
    series = tuple(
        Series(label=label, x=x, y=tuple(value / 2**20 for value in y))
        for label, (x, y) in _usage(records, "rss_bytes").items()
    )
    return Plot(title="Memory", x_label="s", y_label="MiB", series=series)


def _descriptors(records: Sequence[Record]) -> Plot:
    series = tuple(Series(label=label, x=x, y=y) for label, (x, y) in _usage(records, "descriptors").items())
    return Plot(title="Open descriptors", x_label="s", y_label="", series=series)


def _usage(records: Sequence[Record], what: str) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Of nodes' own processes, whichever has the name at that time."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in of_kind(records, "usage"):
        if record["role"] == "node":
            found[record["name"]].append((record["at"], float(record[what])))
    return {name: (tuple(x for x, _ in at), tuple(y for _, y in at)) for name, at in found.items()}


def _lengths(found: Sequence[Pause]) -> Plot:
    ordered = sorted(found, key=lambda each: each.begin_s)
    x = tuple(each.begin_s for each in ordered)
    return Plot(
        title="Pauses",
        x_label="s",
        y_label="s",
        series=(
            Series(label="whole pause", x=x, y=tuple(each.length_s for each in ordered)),
            Series(label="standing still", x=x, y=tuple(each.still_s for each in ordered)),
        ),
    )
