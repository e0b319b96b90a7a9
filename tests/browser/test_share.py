"""A guest's address in a phone's browser: the key gets to the chat's settings, and stays nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.joining import JoiningNode, lab, write_model

SETTINGS = "LlamaUi.config"
"""Where llama.cpp's page keeps them."""


@pytest.fixture(scope="module")
def node(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoiningNode]:
    with lab(write_model(tmp_path_factory.mktemp("models") / "models")) as nodes:
        yield nodes.create("one")


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
