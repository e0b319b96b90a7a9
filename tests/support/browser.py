"""Pages as a person sees them: Debian's Chromium, told what to do by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

from tests.support.waiting import until

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000
"""For a mesh on a machine that others use, too; each wait ends as soon as its condition holds."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""A browser that talks to nobody but the page; without a sandbox, as tests may run as root."""
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 664}, "has_touch": True, "is_mobile": True}
expect.set_options(timeout=WAIT_MS)
SCREENSHOTS = Path("build/screenshots")


class Visit:
    """A page, and all that went wrong on it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        self.outside: list[str] = []
        self.bytes = 0
        self._origin = urlsplit(url).netloc
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._on_request)

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def _on_request(self, request: Request) -> None:
        where = urlsplit(request.url)
        if where.scheme not in ("data", "blob") and where.netloc != self._origin:
            self.outside.append(request.url)

    def open(self) -> Page:
        """The page, as soon as it shows a mesh."""
        self.page.goto(self.url)
        self.page.wait_for_selector("#memory-track li")
        return self.page

    def check(self) -> None:
        assert self.problems == []
        assert self.outside == []


@contextmanager
def chromium() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """A person who has never been there: a context of its own."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
    try:
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        yield Visit(context.new_page(), url)
    finally:
        context.close()


def _not_here(_: Request) -> tuple[int, object]:
    return 404, {"error": "not here"}


class CannedNode:
    """The console's page, of a node that answers what a test says and no more."""

    URL = "http://127.0.0.1:9/"
    STATIC = Path("src/mesh_llm/console/static")

    def __init__(self, page: Page, answers: Mapping[str, Callable[[Request], tuple[int, object]]]) -> None:
        """`answers`: status and document, by the path below /api."""
        self.page = page
        self._answers = {"session": lambda _: (200, {"token": "token"}), **answers}
        page.route("**/*", self._answer)
        page.goto(self.URL)

    def _answer(self, route: Route) -> None:
        path = urlsplit(route.request.url).path.removeprefix("/")
        if not path.startswith("api/"):
            route.fulfill(path=self.STATIC / (path or "index.html"))
            return
        answer = self._answers.get(path.removeprefix("api/"), _not_here)
        status, document = answer(route.request)
        if isinstance(document, str):
            route.fulfill(status=status, body=document, content_type="text/event-stream")
        else:
            route.fulfill(status=status, json=document)


def until_true(page: Page, expression: str) -> None:
    """Wait for a condition in the page. Playwright's own way is `eval`, which the page's policy forbids."""
    until(lambda: bool(page.evaluate(expression)), within_s=WAIT_MS / 1000, what=expression)


def until_copied(page: Page, text: str) -> None:
    """A button that was pressed has its text in the clipboard before long."""
    found: list[str] = []

    def is_there() -> bool:
        found.append(str(page.evaluate("navigator.clipboard.readText()")))
        return found[-1] == text

    try:
        until(is_there, within_s=WAIT_MS / 1000, what="the text is copied")
    except AssertionError:
        assert found[-1] == text
        raise


def keep_screenshot(page: Page, name: str, *, whole: bool = False) -> None:
    """For people to look at; the top of the page, unless the whole is wanted."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole, animations="disabled")
