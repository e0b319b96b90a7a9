"""Pairing from the page: a code is shown, somebody agrees, and a machine is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request, expect

from tests.support.browser import CannedNode, visit
from tests.support.command import MESH_LLM, Running
from tests.support.joining import JoiningNode, lab, write_model
from tests.support.node import temporary_home


@pytest.fixture(scope="module")
def node(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoiningNode]:
    with lab(write_model(tmp_path_factory.mktemp("models") / "models")) as nodes:
        yield nodes.create("desk", "--console", "0")


def test_a_machine_is_let_in_from_the_page(browser: Browser, node: JoiningNode) -> None:
    with visit(browser, str(node.status()["console"]["url"])) as visited, temporary_home() as home:
        page = visited.open()
        page.select_option("#invite-role", "client")
        page.click("#pair-begin")
        expect(page.locator("#pair-label")).to_have_text("desk")
        found = Axe().run(page).response["violations"]
        assert [rule["id"] for rule in found if rule["impact"] in ("serious", "critical")] == []
        code = page.locator("#pair-code").inner_text()
        argv: list[str | Path] = [
            *MESH_LLM,
            "join",
            "desk",
            "--client",
            "--home",
            home,
            "--name",
            "laptop",
            "--port",
            "0",
        ]
        with Running(argv, typed=f"{code}\n") as laptop:
            page.get_by_role("button", name="Let it in").click(timeout=60_000)
            laptop.until_said("Joined the mesh of desk")
            expect(page.locator("#pair-open")).to_be_hidden()
        assert page.locator("#pair-code").inner_text() == ""


# -- an offer that stays open ----------------------------------------------------------------------


OPEN: dict[str, Any] = {"open": True, "label": "desk", "code": "123 456", "waiting": None, "admitted": None}
WAITING = {"id": "f" * 64, "name": "laptop", "address": "192.0.2.7"}


class OpenOffer(CannedNode):
    """A node whose offer nobody ends."""

    def __init__(self, page: Page, *, state: dict[str, Any]) -> None:
        self.state = state
        self.looks = 0
        self.fails = 0
        """So many of the next looks are refused."""
        super().__init__(page, {"pair": self._pair, "pair-answer": self._refuse, "events": self._silence})

    def _silence(self, _: Request) -> tuple[int, object]:
        return 200, ""

    def _pair(self, request: Request) -> tuple[int, object]:
        if request.method == "POST":
            self.state = OPEN
        elif self.fails:
            self.fails -= 1
            return 500, {"error": "the node is busy"}
        else:
            self.looks += 1
        return 200, self.state

    def _refuse(self, _: Request) -> tuple[int, object]:
        self.state = OPEN
        return 409, {"error": "no machine waits to be let in", "hint": "it may have given up"}

    def until_looked_again(self) -> None:
        looks = self.looks
        # The page's requests are answered while Playwright waits.
        for _ in range(300):
            self.page.wait_for_timeout(100)
            if self.looks >= looks + 2:
                break
        assert self.looks >= looks + 2
        expect(self.page.locator("#pair-code")).to_have_text("123 456")
        expect(self.page.locator("#pair-end")).to_be_visible()


@pytest.mark.parametrize("button", ["Let it in", "Cancel"])
def test_who_gave_up_leaves_the_offer_on_the_page(browser: Browser, button: str) -> None:
    with visit(browser, CannedNode.URL) as visited:
        node = OpenOffer(visited.page, state={"open": False})
        visited.page.click("#pair-begin")
        expect(visited.page.locator("#pair-open")).to_be_visible()
        node.state = {**OPEN, "waiting": WAITING}
        visited.page.get_by_role("button", name=button).click()
        expect(visited.page.locator("#invite-problem")).to_have_text(
            "no machine waits to be let in: it may have given up"
        )
        node.until_looked_again()


def test_one_look_that_fails_leaves_the_offer_on_the_page(browser: Browser) -> None:
    with visit(browser, CannedNode.URL) as visited:
        node = OpenOffer(visited.page, state={"open": False})
        visited.page.click("#pair-begin")
        node.until_looked_again()
        node.fails = 1
        expect(visited.page.locator("#invite-problem")).to_have_text("the node is busy")
        node.until_looked_again()


def test_a_page_that_is_opened_later_shows_the_open_offer(browser: Browser) -> None:
    with visit(browser, CannedNode.URL) as visited:
        node = OpenOffer(visited.page, state=OPEN)
        node.until_looked_again()
        assert visited.page.locator("#pair-begin").is_disabled()
        node.state = {**OPEN, "open": False, "code": None}
        expect(visited.page.locator("#pair-open")).to_be_hidden()
        assert visited.page.locator("#pair-begin").is_enabled()
