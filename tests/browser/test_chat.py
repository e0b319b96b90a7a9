"""The chat: llama.cpp's own page, at the address that every node prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser.conftest import console_of
from tests.support import tiny_gguf
from tests.support.browser import PHONE, Visit, until_true, visit
from tests.support.command import mesh_llm
from tests.support.joining import JoiningNode, lab, write_model
from tests.support.mesh import MeshProcesses
from tests.support.node import NodeProcess, temporary_home

LONG = "Write a long story about a fox who travels around the world."
EXPECTED = ("status of 400", "[ToolsStore]", "probeServerStream")
"""What the page says of `/tools` and `/v1/streams`, which are refused; it goes on without them."""
NOT_OURS = {"color-contrast", "nested-interactive"}
"""Rules that llama.cpp's page itself breaks."""


def chat_of(node: NodeProcess) -> str:
    return node.url.replace("127.0.0.1", "localhost")


def enter(visited: Visit) -> Page:
    """The page, as soon as it knows the model."""
    visited.page.goto(visited.url)
    expect(visited.page.locator("textarea").first).to_be_visible()
    return visited.page


def ask(page: Page, question: str) -> Locator:
    """The answer that comes."""
    page.locator("textarea").first.fill(question)
    page.get_by_role("button", name="Send").click()
    return page.get_by_role("group", name="Assistant message").last


def limited(page: Page, **fields: Any) -> None:
    """What the page asks for has these fields as well: small models do not always find an end."""

    def go_on(route: Route) -> None:
        route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), **fields}))

    page.route("**/v1/chat/completions", go_on)


def until_answered(answer: Locator) -> None:
    """It says how fast it was, and can be asked again."""
    expect(answer).to_contain_text("t/s")
    expect(answer.page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)


def written(answer: Locator) -> str:
    """Its first line, which is all of it so far, or enough."""
    return answer.inner_text().split("\n")[0]


def until_written(page: Page, count: int) -> None:
    """So many characters, without what stands below an answer."""
    text = "document.querySelector('[aria-label^=Assistant]')?.innerText ?? ''"
    until_true(page, f"({text}).split('SmolLM2')[0].length > {count}")


def check(visited: Visit) -> None:
    assert [each for each in visited.problems if not any(known in each for known in EXPECTED)] == []
    assert visited.outside == []


@contextmanager
def lite_client(mesh: MeshProcesses, models: Path) -> Iterator[JoiningNode]:
    made = mesh_llm("invite", "--role", "client", "--json", "--home", mesh.nodes["one"].home)
    joining = ("--client", "--join", json.loads(made.stdout)["token"])
    with temporary_home() as home, JoiningNode(*joining, home=home, name="guest", models=models) as node:
        yield node.until_ready()


def test_every_node_has_it(browser: Browser, whole: MeshProcesses, tmp_path: Path) -> None:
    """Whether it hosts, works or neither; at the size of a screen and of a phone."""
    agreed = whole.serving()
    with lite_client(whole, tmp_path) as guest:
        chats(browser, whole.nodes[agreed.host])
        chats(browser, whole.nodes[agreed.workers[0]], color_scheme="dark")
        chats(browser, guest, **PHONE)


def chats(browser: Browser, node: NodeProcess, **options: Any) -> None:
    with visit(browser, chat_of(node), **options) as visited:
        page = enter(visited)
        limited(page, max_tokens=24)
        until_answered(ask(page, "Why is the sky blue?"))
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
        violations = Axe().run(page).response["violations"]
        assert {rule["id"] for rule in violations if rule["impact"] in ("serious", "critical")} <= NOT_OURS
        check(visited)


def test_an_answer_goes_on_without_a_lost_worker(browser: Browser, whole: MeshProcesses) -> None:
    """And the console says within seconds who was lost."""
    lost = next(name for name in whole.serving().workers if name != "one")
    with (
        visit(browser, chat_of(whole.nodes["one"])) as chatting,
        visit(browser, console_of(whole)) as watching,
    ):
        console = watching.open()
        page = enter(chatting)
        limited(page, max_tokens=1500, ignore_eos=True)
        answer = ask(page, LONG)
        until_written(page, 40)
        before = written(answer)
        whole.kill(lost)
        expect(console.locator("#notice")).to_contain_text(lost)
        expect(console.locator("#events-list")).to_contain_text(f"{lost} was lost")
        expect(console.locator("#events-list")).to_contain_text("An answer continues with the engine of")
        assert "the engine was stopped" not in console.locator("#events-list").inner_text()
        state = console.locator(f"#nodes-rows tr[data-node={lost}]:not(.leaving)", has_text="serving")
        expect(state).to_have_count(0)
        until_written(page, len(written(answer)) + 100)
        assert written(answer).startswith(before)
        page.get_by_role("button", name="Stop", exact=True).click()
        until_answered(answer)
        check(chatting)
        watching.check()


def test_models_are_switched_where_there_are_two(browser: Browser, tmp_path: Path) -> None:
    """Through a lite client; the second one is loaded when it is chosen."""
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", seed=1)
    with lab(write_model(tmp_path / "models")) as nodes:
        node = nodes.create("both", "--console", "0")
        assert mesh_llm("load", str(other), "--on-demand", "--home", node.home).status == 0
        client = nodes.start("guest", "--client", "--join", node.token(role="client")).until_ready()
        client.until(lambda: b'"other"' in client.ask("/models").body, what="both are listed")
        with visit(browser, str(node.status()["console"]["url"])) as watching:
            expect(watching.open().locator("#models-list li")).to_have_count(2)
        with visit(browser, chat_of(client)) as visited:
            page = enter(visited)
            limited(page, max_tokens=8)
            until_answered(ask(page, "one two three"))
            page.get_by_role("button", name="tiny").last.click()
            page.get_by_role("menu").get_by_text("other", exact=True).last.click()
            with page.expect_request("**/v1/chat/completions") as asked:
                until_answered(ask(page, "four five"))
            assert (asked.value.post_data_json or {})["model"] == "other"
            check(visited)
