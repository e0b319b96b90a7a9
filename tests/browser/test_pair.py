"""Pairing from the page: a code is shown, somebody agrees, and a machine is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.support.browser import visit
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
