"""Where the output head goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh_llm.planning.placement import HeadPlaces, head_belongs_on_worker

GB = 1e9
LAPTOPS = HeadPlaces(
    head_bytes=430_000_000,
    vocabulary=128_256,
    hidden=4096,
    host_bytes_per_s=40 * GB,
    worker_bytes_per_s=40 * GB,
    link_bytes_per_s=0.1 * GB,
)


def test_equal_machines_keep_it_on_the_host() -> None:
    assert not head_belongs_on_worker(LAPTOPS)


@pytest.mark.parametrize(
    ("change", "on_worker"),
    [
        # 11 ms on the host against 0.4 and 5 ms: a GPU behind Gigabit Ethernet.
        ({"worker_bytes_per_s": 1000 * GB}, True),
        # The same GPU behind Wi-Fi: the logits alone take 50 ms.
        ({"worker_bytes_per_s": 1000 * GB, "link_bytes_per_s": 0.01 * GB}, False),
        # A very slow host.
        ({"host_bytes_per_s": 5 * GB}, True),
        # A small vocabulary sends no more than the activation would be.
        ({"vocabulary": 4096, "worker_bytes_per_s": 41 * GB}, True),
        ({"vocabulary": 4096}, False),
    ],
)
def test_a_faster_worker_takes_it_where_the_link_allows(change: dict[str, float], on_worker: bool) -> None:
    assert head_belongs_on_worker(replace(LAPTOPS, **change)) is on_worker  # type: ignore[arg-type]
