"""What has to hold, whatever happened: judged by the log of a run alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from mesh_llm.frozen import frozen
from mesh_llm.lab.chaos.pauses import Pause, pauses
from mesh_llm.lab.chaos.questions import is_same
from mesh_llm.lab.chaos.records import Record

WAIT_S = 150.0
"""The gateway gives up after two minutes; nobody waits any longer than that."""
STILL_S = 10.0
"""That an answer may stand still for each loss, above what computing takes: some node can hold the model."""
STRUCK_S = 8.0
"""After a fault ended: a gateway on the node that was struck may still be finding its feet."""
GONE_S = 20.0
"""For others to notice that a node is gone: seconds; and for its children to end."""
REVOKED_S = 15.0
"""For everybody to hear of a revocation."""
QUARTER = 4
"""What a process holds in the last quarter of its life is compared with the first."""
SAMPLES_LEAST = 12
GROWTH = {"rss_bytes": (1.3, 48 << 20), "descriptors": (1.0, 64), "threads": (1.0, 40)}
"""Beyond so many times what it was, and so much on top, it grows. A host has more than a node that stands
by, and each gated link has three threads and four descriptors of the laboratory's own."""
DISK_BYTES = 48 << 20
"""Of a node's home: its logs are rotated at 36 MB in all."""


@frozen
class ChaosFinding:
    oracle: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.oracle}: {self.text}"


def judge(records: Sequence[Record]) -> list[ChaosFinding]:
    """All that did not hold, by time."""
    found = [finding for oracle in ORACLES.values() for finding in oracle(records)]
    return sorted(found, key=lambda each: each.at_s)


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


class Strikes:
    """When each node was struck, from the blow to a little after it was undone."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        begun: dict[int, Record] = {}
        for record in of_kind(records, "fault"):
            if record["phase"] == "begin":
                begun[record["number"]] = record
            elif record["number"] in begun:
                self._add(begun.pop(record["number"]), record["at"] + STRUCK_S)
        for record in begun.values():
            self._add(record, float("inf"))

    def _add(self, begin: Record, end_s: float) -> None:
        self._spans[begin["node"]].append((begin["at"] - 1.0, end_s))

    def hit(self, name: str, begin_s: float, end_s: float) -> bool:
        """Whether something was done to the node that a client was connected to, at that time."""
        return any(begin_s < until and since < end_s for since, until in self._spans.get(name, ()))

    def hit_at(self, record: Record) -> bool:
        return self.hit(record["name"], record["at"], record["at"])


# -- answers ---------------------------------------------------------------------------------------


def altered(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Nothing is lost from a text, doubled in it, or other than it would have been."""
    expected = {each["question"]: each["text"] for each in of_kind(records, "reference")}
    for answer in of_kind(records, "answer"):
        whole, text = expected.get(answer["question"], ""), answer["text"]
        is_whole = answer["outcome"] == "done"
        right = is_same(answer["form"], text, whole) if is_whole else whole.startswith(text)
        if not right:
            at = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(text))
            yield ChaosFinding(
                oracle="altered",
                at_s=answer["ended"],
                text=f"answer {answer['number']} ({answer['question']} via {answer['via']}, resumed at "
                f"{answer['seams']}) differs from character {at}: {text[at : at + 40]!r} instead of "
                f"{whole[at : at + 40]!r}",
            )


def lost(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Every question is answered, unless the very node that was asked was struck."""
    strikes = Strikes(records)
    for answer in of_kind(records, "answer"):
        if answer["outcome"] in ("done", "left"):
            continue
        if strikes.hit(answer["via"], answer["at"], answer["ended"]):
            continue
        yield ChaosFinding(
            oracle="lost",
            at_s=answer["ended"],
            text=f"answer {answer['number']} ({answer['question']} via {answer['via']}) was "
            f"{answer['outcome']} after {answer['ended'] - answer['at']:.1f} s and {len(answer['pieces'])} "
            f"pieces: {answer['status']} {answer['error'][:160]}",
        )


def waits(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Nobody waits for longer than the gateway promises."""
    for answer in of_kind(records, "answer"):
        moments = [answer["at"], *answer["pieces"], answer["ended"]]
        longest_s = max(later - earlier for earlier, later in pairwise(moments))
        if longest_s > WAIT_S:
            yield ChaosFinding(
                oracle="waits",
                at_s=answer["ended"],
                text=f"answer {answer['number']} heard nothing for {longest_s:.1f} s",
            )


def still(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """No answer stands still for long while some node can hold the model."""
    for pause in unstruck_pauses(records):
        if pause.still_s > STILL_S * pause.losses:
            yield ChaosFinding(oracle="still", at_s=pause.end_s, text=_told(pause))


def unstruck_pauses(records: Sequence[Record]) -> Iterator[Pause]:
    """Those of clients whose own node was left alone."""
    strikes = Strikes(records)
    yield from (each for each in pauses(records) if not strikes.hit(each.via, each.begin_s, each.end_s))


def _told(pause: Pause) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in pause.parts.items() if seconds >= 0.05)
    asked = f"answer {pause.answer} ({pause.question} via {pause.via})"
    losses = f"losses: {pause.losses}, the first by {pause.fault or 'no fault'}"
    why = f"; plans failed: {'; '.join(pause.failures)}" if pause.failures else ""
    return f"{asked} stood still for {pause.still_s:.1f} s ({losses}): {parts}{why}"


# -- processes -------------------------------------------------------------------------------------


def orphans(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """A process whose node is gone ends by itself."""
    seen: dict[int, list[Record]] = defaultdict(list)
    for record in of_kind(records, "orphan"):
        seen[record["pid"]].append(record)
    for pid, found in seen.items():
        lasted_s = found[-1]["at"] - found[0]["at"]
        if lasted_s > GONE_S or found[-1].get("last"):
            yield ChaosFinding(
                oracle="orphans",
                at_s=found[-1]["at"],
                text=f"process {pid} outlived its node by {lasted_s:.0f} s: {found[0]['command']}",
            )


def growth(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """What a process holds settles."""
    lives: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in of_kind(records, "usage"):
        lives[record["name"], record["role"], record["pid"]].append(record)
    for (name, role, _), samples in lives.items():
        if len(samples) < SAMPLES_LEAST:
            continue
        quarter = len(samples) // QUARTER
        for what, (factor, spare) in GROWTH.items():
            if (role, what) == ("worker", "rss_bytes"):
                continue  # it holds the layers of one plan after the other, of whatever size
            first = median(each[what] for each in samples[1 : 1 + quarter])
            last = median(each[what] for each in samples[-quarter:])
            if last > factor * first + spare:
                text = f"{what} of the {role} of {name} grew from {first:,.0f} to {last:,.0f}"
                yield ChaosFinding(oracle="growth", at_s=samples[-1]["at"], text=text)


def disk(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Homes stay small."""
    largest: dict[str, Record] = {}
    for record in of_kind(records, "disk"):
        if record["bytes"] > largest.get(record["name"], {"bytes": DISK_BYTES})["bytes"]:
            largest[record["name"]] = record
    for name, record in largest.items():
        text = f"the home of {name} has {record['bytes'] / 1e6:.0f} MB"
        yield ChaosFinding(oracle="disk", at_s=record["at"], text=text)


# -- membership ------------------------------------------------------------------------------------


def ghosts(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Nobody counts on a node whose process is gone."""
    strikes = Strikes(records)
    gone: dict[str, float] = {}
    names: dict[str, str] = {}
    told: set[tuple[str, str]] = set()
    for record in sorted(records, key=lambda each: float(each["at"])):
        if record["kind"] == "member":
            names[record["id"]] = record["name"]
            if record["phase"] == "gone":
                gone[record["id"]] = record["at"]
            elif record["phase"] == "started":
                gone.pop(record["id"], None)
        elif record["kind"] == "status" and not strikes.hit_at(record):
            counted = {id for id, standing in record["members"].items() if standing == "alive"}
            for id in (counted | set(record["stages"])) & set(gone):
                if record["at"] - gone[id] > GONE_S and (record["name"], id) not in told:
                    told.add((record["name"], id))
                    away_s = record["at"] - gone[id]
                    text = f"{record['name']} counts on {names[id]}, which has been gone for {away_s:.0f} s"
                    yield ChaosFinding(oracle="ghosts", at_s=record["at"], text=text)


def revoked(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """Who was revoked is out, and stays out."""
    strikes = Strikes(records)
    out: dict[str, Record] = {}
    told: set[tuple[str, str]] = set()
    for record in sorted(records, key=lambda each: float(each["at"])):
        if record["kind"] == "member" and record["phase"] == "revoked":
            out[record["id"]] = record
        elif record["kind"] == "status" and not strikes.hit_at(record):
            for id in set(record["members"]) & set(out):
                late_s = record["at"] - out[id]["at"]
                if late_s > REVOKED_S and (record["name"], id) not in told:
                    told.add((record["name"], id))
                    text = f"{record['name']} lists {out[id]['name']} {late_s:.0f} s after it was revoked"
                    yield ChaosFinding(oracle="revoked", at_s=record["at"], text=text)


def settled(records: Sequence[Record]) -> Iterator[ChaosFinding]:
    """When all is over, all nodes serve together again, and every question is answered as before."""
    ends = of_kind(records, "settled")
    if not ends:
        yield ChaosFinding(oracle="settled", at_s=records[-1]["at"], text="the run did not come to its end")
    for end in ends:
        if not end["whole"]:
            yield ChaosFinding(oracle="settled", at_s=end["at"], text=f"not whole: {end['why']}")
        for wrong in end["wrong"]:
            yield ChaosFinding(oracle="settled", at_s=end["at"], text=f"answered wrongly in the end: {wrong}")


ORACLES: dict[str, Callable[[Sequence[Record]], Iterator[ChaosFinding]]] = {
    "altered": altered,
    "lost": lost,
    "waits": waits,
    "still": still,
    "orphans": orphans,
    "growth": growth,
    "disk": disk,
    "ghosts": ghosts,
    "revoked": revoked,
    "settled": settled,
}
