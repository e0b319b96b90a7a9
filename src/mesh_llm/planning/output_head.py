"""Where the output head of a split model belongs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlaces:
    """What decides: the head's size, and how fast each side would be with it."""

    head_bytes: int
    """Also where it is tied to the embedding: the bytes that a token's logits read."""
    vocabulary: int
    hidden: int
    host_bytes_per_s: float
    """At which the host's own device reads weights."""
    worker_bytes_per_s: float
    link_bytes_per_s: float
    """From the last worker to the host."""


def head_belongs_on_worker(places: HeadPlaces) -> bool:
    """True where the host would take longer for the head than the logits take to come back.

    The delay of the link does not count: the last worker's result crosses it
    either way, as an activation or as logits.
    """
    on_host = places.head_bytes / places.host_bytes_per_s
    more_to_send = LOGIT_BYTES * max(0, places.vocabulary - places.hidden)
    on_worker = places.head_bytes / places.worker_bytes_per_s + more_to_send / places.link_bytes_per_s
    return on_worker < on_host
