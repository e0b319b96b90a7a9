"""The plots: every point stands at its own time, and a gap is a gap."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import CannedNode, visit

NOW = 1_700_000_000.0


def told(ages_s: Sequence[float]) -> str:
    """An event stream that begins with points of such ages."""
    samples = [{"t": NOW - age_s, "tok_s": 10.0, "active": 1, "queued": 0} for age_s in ages_s]
    snapshot = {"status": None, "history": {"interval_s": 2, "samples": samples}}
    return f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n"


def curve(page: Page) -> list[list[float]]:
    """How long ago the points of throughput are, by where they stand; a list for each unbroken line."""
    path = page.locator("#plot-throughput path.series-0")
    expect(path).to_have_attribute("d", re.compile("M"))
    right = float(str(page.locator("#plot-throughput svg").first.get_attribute("width"))) - 12
    lines = str(path.get_attribute("d")).split("M")[1:]
    places = [[float(place) for place in re.findall(r"(?:^|L)([0-9.]+) ", line)] for line in lines]
    return [[round(300 * (right - place) / (right - 44)) for place in line] for line in places]


@pytest.mark.parametrize(
    ("ages_s", "lines"),
    [
        ((8, 6, 4, 2, 0), [[8, 6, 4, 2, 0]]),
        # The node was asleep for a while.
        ((206, 204, 4, 2, 0), [[206, 204], [4, 2, 0]]),
        # An hour ago is not a minute ago.
        ((3604, 3602, 3600, 2, 0), [[2, 0]]),
        # Somebody has put the clock back.
        ((-3600, -3602, 2, 0), [[2, 0]]),
    ],
)
def test_points_stand_at_their_times(
    browser: Browser, ages_s: tuple[float, ...], lines: list[list[float]]
) -> None:
    with visit(browser, CannedNode.URL) as visited:
        page = visited.page
        CannedNode(page, {"events": lambda _: (200, told(ages_s))})
        assert curve(page) == lines


def test_the_cursor_tells_the_time_of_its_point(browser: Browser) -> None:
    with visit(browser, CannedNode.URL) as visited:
        page = visited.page
        CannedNode(page, {"events": lambda _: (200, told((206, 204, 4, 2, 0)))})
        assert curve(page)
        plot = page.locator("#plot-throughput [role=slider]")
        plot.focus()
        plot.press("Home")
        expect(plot).to_have_attribute("aria-valuetext", "10.0 tok/s, 3 min 26 s ago")
        box = plot.bounding_box()
        assert box is not None
        # Nearer to the point at 204 s than to the one at 4 s.
        page.mouse.move(box["x"] + 44 + (box["width"] - 56) * (1 - 150 / 300), box["y"] + 50)
        expect(plot).to_have_attribute("aria-valuetext", "10.0 tok/s, 3 min 24 s ago")
