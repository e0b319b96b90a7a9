"""A guest's address in a phone's browser: the key gets to the chat's settings, and stays nowhere else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.browser.test_manage import read_qr
from tests.support.browser import visit
from tests.support.joining import JoiningNode, lab, write_model

SETTINGS = "LlamaUi.config"
"""Where llama.cpp's page keeps them."""


@pytest.fixture(scope="module")
def node(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoiningNode]:
    with lab(write_model(tmp_path_factory.mktemp("models") / "models")) as nodes:
        yield nodes.create("one", "--console", "0")


def test_a_guests_address(browser: Browser, node: JoiningNode) -> None:
    made = node.control("/api/share", {"listen": "127.0.0.1", "port": 0})
    shared, _, _ = made["url"].partition("/share")
    # What a person does who has compared the fingerprint.
    context = browser.new_context(ignore_https_errors=True, viewport={"width": 390, "height": 664})
    try:
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{shared}/share")
        expect(page.get_by_role("status")).to_contain_text("There is no key in this address")
        page.evaluate("([name, kept]) => localStorage.setItem(name, kept)", [SETTINGS, '{"theme": "dark"}'])
        page.goto("about:blank")

        page.goto(made["url"])
        page.wait_for_url(lambda url: url.split("#")[0] == f"{shared}/")
        assert made["key"] not in page.url
        page.goto(f"{shared}/share")
        kept = json.loads(page.evaluate("name => localStorage.getItem(name)", SETTINGS))
        assert (kept["apiKey"], kept["theme"]) == (made["key"], "dark")
        assert not [url for url in asked if made["key"] in url.partition("#")[0]]
        # A damaged key is not kept.
        page.goto(f"{shared}/share#key=mk-x")
        page.reload()
        expect(page.get_by_role("status")).to_contain_text("There is no key")
    finally:
        context.close()
        node.control("/api/stop-sharing", {"revoke": True})


def test_guests_on_the_page(browser: Browser, node: JoiningNode) -> None:
    # Opened here, on loopback: the page would take the address on the local network.
    node.control("/api/share", {"listen": "127.0.0.1", "port": 0, "name": "anna"})
    with visit(browser, str(node.status()["console"]["url"])) as visited:
        page = visited.open()
        expect(page.locator("#guest-where")).to_contain_text("Shared at https://127.0.0.1:")
        assert "mk-" not in page.content(), "nothing secret before it is asked for"
        page.fill("#guest-name", "bert")
        page.fill("#guest-requests", "50")
        page.fill("#guest-tokens", "20000")
        page.select_option("#guest-lifetime", label="an hour")
        page.click("#guest-form button")
        url = page.locator("#guest-url code").inner_text()
        assert read_qr(page) == url
        page.click("#keys-box summary")
        expect(page.locator("#keys-list li")).to_have_count(2)
        expect(page.locator("#keys-list li", has_text="anna")).to_contain_text("today 0 requests, 0 tokens")
        limits = "today 0 of 50 requests, 0 of 20\u202f000 tokens"
        expect(page.locator("#keys-list li", has_text="bert")).to_contain_text(limits)
        bert = next(key for key in node.status()["api"]["keys"] if key["name"] == "bert")
        assert (bert["requests_per_day"], bert["tokens_per_day"]) == (50, 20_000)
        assert 3000 < bert["expires"] - time.time() <= 3600
        page.fill("#guest-name", "bert")
        page.click("#guest-form button")
        expect(page.locator("#guest-problem")).to_contain_text("there is a key named bert already")
        found = Axe().run(page).response["violations"]
        assert [rule["id"] for rule in found if rule["impact"] in ("serious", "critical")] == []
        page.click("#guest-hide")
        assert "mk-" not in page.content()
        page.get_by_role("button", name="Revoke the key anna").click()
        page.click("#confirm-yes")
        expect(page.locator("#keys-list li:not(.leaving)")).to_have_count(1)
        page.click("#guest-stop")
        page.click("#confirm-yes")
        expect(page.locator("#guest-shared")).to_be_hidden()
        expect(page.locator("#keys-list li:not(.leaving)")).to_have_count(0)
    assert node.status()["api"]["shared_url"] is None
