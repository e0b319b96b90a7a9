"""Where the time of a pause went: read from what nodes logged meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mesh_llm.frozen import frozen
from mesh_llm.lab.chaos.records import Record

PAUSE_S = 2.0
"""A shorter gap is no pause: three nodes and their clients share a few cores."""
PARTS = ("detection", "waiting for a plan", "failed plans", "loading", "reaching", "computing")
"""From the fault to the first notice of it, from there to a plan, through plans that failed, to one that
serves, to where the answer goes on, and to its next word (a place in the queue, reading again, the word)."""

ROUND_S = 0.5
"""Between two answers that go on at once."""
TOLD_S = 4.0
"""A gateway says that it has lost an engine as soon as it knows why, or after three seconds."""

_NOTICED = re.compile(
    r"plan broken|plan failed|engine lost|engine died|worker lost|worker died|worker hung|^lost:"
)
_LOST = re.compile(r"engine lost url")
_PROPOSED = re.compile(r"plan proposed epoch=(\d+)")
_SERVING = re.compile(r"plan serving epoch=(\d+)")
_FAILED = re.compile(r"plan (?:failed|dropped) epoch=(\d+): (.*)")
_RESUMED = re.compile(r"request resumed elsewhere")


@frozen
class Pause:
    """The longest gap of one answer."""

    answer: int
    question: str
    via: str
    begin_s: float
    end_s: float
    fault: str
    """The last one before somebody noticed; empty where there was none."""
    losses: int
    """Engines that went on, one after the other, before the next word came, and plans on their way that
    a further fault ended: each time all begins anew."""
    parts: dict[str, float]
    failures: tuple[str, ...] = ()
    """Why plans did not come to serve meanwhile."""

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def still_s(self) -> float:
        """Without what computing took: nobody can save that."""
        return self.length_s - self.parts["computing"]


@frozen
class FailedPlan:
    """One that did not come to serve."""

    proposed_s: float
    failed_s: float
    why: str


@frozen
class Moments:
    """What happened in the mesh, by time."""

    faults: tuple[tuple[float, str], ...]
    noticed: tuple[float, ...]
    lost: tuple[tuple[float, str], ...]
    """By the gateway of a node."""
    proposed: tuple[tuple[float, str], ...]
    serving: tuple[tuple[float, str], ...]
    failed: tuple[FailedPlan, ...]
    resumed: tuple[tuple[float, str], ...]


def pauses(records: Sequence[Record]) -> Iterator[Pause]:
    """The longest gap of each answer, where it is long enough."""
    moments = moments_of(records)
    for answer in records:
        if answer["kind"] != "answer" or answer["outcome"] == "left":
            continue
        heard = [answer["at"], *answer["pieces"], answer["ended"]]
        begin_s, end_s = max(pairwise(heard), key=lambda gap: gap[1] - gap[0])
        if end_s - begin_s >= PAUSE_S:
            before = heard.index(begin_s)
            is_resumed = before in answer["seams"] or (before == 0 and answer["resumed"] > 0)
            rounds = list(_rounds(moments, answer["via"], begin_s, end_s)) if is_resumed else []
            yield Pause(
                answer=answer["number"],
                question=answer["question"],
                via=answer["via"],
                begin_s=begin_s,
                end_s=end_s,
                fault=rounds[0].fault if rounds else "",
                losses=sum(each.losses for each in rounds),
                parts=_parts(rounds, end_s - begin_s),
                failures=tuple(why for each in rounds for why in each.failures),
            )


def moments_of(records: Sequence[Record]) -> Moments:
    told = sorted((each for each in records if each["kind"] == "told"), key=lambda each: float(each["at"]))

    def matches(pattern: re.Pattern[str]) -> Iterator[tuple[float, str, re.Match[str]]]:
        for each in told:
            if found := pattern.search(each["text"]):
                yield each["at"], each["name"], found

    proposed = tuple((at, f"{name} {found[1]}") for at, name, found in matches(_PROPOSED))
    serving = tuple((at, f"{name} {found[1]}") for at, name, found in matches(_SERVING))
    unserved = {plan: at for at, plan in proposed if plan not in {served for _, served in serving}}
    return Moments(
        faults=tuple(
            (each["at"], f"{each['fault']} {each['node']}")
            for each in records
            if each["kind"] == "fault" and each["phase"] == "begin"
        ),
        noticed=tuple(at for at, _, _ in matches(_NOTICED)),
        lost=tuple((at, name) for at, name, _ in matches(_LOST)),
        proposed=proposed,
        serving=serving,
        failed=tuple(
            FailedPlan(proposed_s=unserved[plan], failed_s=at, why=found[2])
            for at, name, found in matches(_FAILED)
            if (plan := f"{name} {found[1]}") in unserved
        ),
        resumed=tuple((at, name) for at, name, _ in matches(_RESUMED)),
    )


@frozen
class _Round:
    """From one engine that was asked to the next."""

    fault: str
    losses: int
    parts: dict[str, float]
    failures: tuple[str, ...]


def _parts(rounds: Sequence[_Round], length_s: float) -> dict[str, float]:
    """Of all rounds together; the rest was computing, to the end or until the next loss."""
    parts = {part: sum(each.parts[part] for each in rounds) for part in PARTS[:-1]}
    return {**parts, PARTS[-1]: length_s - sum(parts.values())}


def _rounds(moments: Moments, via: str, begin_s: float, end_s: float) -> Iterator[_Round]:
    """Each ends where the gateway has another engine go on."""
    ends = [at for at, name in moments.resumed if name == via and begin_s < at <= end_s]
    # Several answers that went on at once are one round.
    ends = [at for at, later in pairwise([*ends, float("inf")]) if later - at >= ROUND_S]
    for start_s, stop_s in pairwise([begin_s, *(ends or [end_s])]):
        lost_s = next((at for at, name in moments.lost if name == via and start_s < at <= stop_s), stop_s)
        since_s = max(start_s, lost_s - TOLD_S) if lost_s < stop_s else start_s
        noticed_s = next((at for at in moments.noticed if since_s < at <= stop_s), start_s)
        yield _round(moments, start_s, noticed_s, stop_s)


def _round(moments: Moments, start_s: float, noticed_s: float, stop_s: float) -> _Round:
    fault_s, fault = max((each for each in moments.faults if each[0] <= noticed_s), default=(start_s, ""))
    serving = [each for each in moments.serving if noticed_s < each[0] <= stop_s]
    served_s, plan = serving[-1] if serving else (noticed_s, "")
    tried = [each for each in moments.proposed if noticed_s <= each[0] <= served_s]
    own = [at for at, each in tried if each == plan]
    first_s = tried[0][0] if tried else noticed_s
    # What served in the end may have been on its way before.
    last_s = own[-1] if own else first_s
    times = [max(start_s, fault_s), noticed_s, first_s, last_s, served_s, stop_s]
    for index in range(1, len(times)):
        times[index] = min(stop_s, max(times[index], times[index - 1]))
    lengths = (later - earlier for earlier, later in pairwise(times))
    failed = [each for each in moments.failed if noticed_s <= each.failed_s <= served_s]
    struck = [
        each for each in failed if any(each.proposed_s <= at <= each.failed_s for at, _ in moments.faults)
    ]
    return _Round(
        fault=fault,
        losses=1 + len(struck),
        parts=dict(zip(PARTS, lengths, strict=False)),
        failures=tuple(each.why for each in failed),
    )
