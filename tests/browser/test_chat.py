"""The chat: llama.cpp's own page, at the address that every node prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser.conftest import console_of
from tests.support import tiny_gguf
from tests.support.browser import PHONE, Visit, until_true, visit
from tests.support.command import mesh_llm
from tests.support.joining import JoiningNode, lab, said, write_model
from tests.support.mesh import MeshProcesses
from tests.support.node import NodeProcess, temporary_home

LONG = "Write a long story about a fox who travels around the world."
EXPECTED = ("status of 400", "[ToolsStore]", "probeServerStream")
"""What the page says of `/tools` and `/v1/streams`, which are refused; it goes on without them."""
NOT_OURS = {
    ("nested-interactive", '<div class="relative" role="button"'),
    ("nested-interactive", '<button class="w-full" data-slot="tooltip-trigger"'),
}
"""What of llama.cpp's page breaks which rule: the field with its buttons, and the menu's on a phone. Its
scripts make them anew with every change, so nothing that we add would stay."""


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
    # Within one that explains it, as long as it is not enabled.
    page.get_by_role("button", name="Send").last.click()
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
    """So many characters of the last answer, without what stands below it."""
    text = "[...document.querySelectorAll('[aria-label^=Assistant]')].at(-1)?.innerText ?? ''"
    until_true(page, f"({text}).split('SmolLM2')[0].length > {count}")


def choose(page: Page, model: str, *, before: str) -> None:
    """In the field's menu, which is a sheet on a phone."""
    page.get_by_role("button", name=before).last.click()
    page.get_by_text(model, exact=True).last.click()


def accessible(page: Page) -> None:
    """All but what is not ours."""
    found = [
        (rule["id"], node["html"])
        for rule in Axe().run(page).response["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
    known = [
        each for each in found if any(each[0] == rule and each[1].startswith(html) for rule, html in NOT_OURS)
    ]
    assert [each for each in found if each not in known] == []


def check(visited: Visit, *also: str) -> None:
    expected = (*EXPECTED, *also)
    assert [each for each in visited.problems if not any(known in each for known in expected)] == []
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
        accessible(page)
        limited(page, max_tokens=24)
        until_answered(ask(page, "Why is the sky blue?"))
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
        accessible(page)
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


@pytest.mark.full
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
            choose(page, "other", before="tiny")
            with page.expect_request("**/v1/chat/completions") as asked:
                until_answered(ask(page, "four five"))
            assert (asked.value.post_data_json or {})["model"] == "other"
            check(visited)


@pytest.mark.parametrize(
    ("rights", "code"),
    [pytest.param((), "may_not_manage", id="asks"), pytest.param(("--manage",), "not_owner", id="manages")],
)
def test_a_key_loads_a_model_by_choosing_it(
    browser: Browser, tmp_path: Path, rights: tuple[str, ...], code: str
) -> None:
    """Through a lite client, which may not unload it: nor may a guest anywhere."""
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", seed=1)
    with lab(write_model(tmp_path / "models")) as nodes:
        node = nodes.create("both")
        assert mesh_llm("load", str(other), "--on-demand", "--home", node.home).status == 0
        token = node.token(role="client")
        client = nodes.start("guest", "--client", "--api-key", "opensesame", "--join", token).until_ready()
        client.until(partial(knows, client, 2), what="it knows both")
        key = said(mesh_llm("keys", "add", "phone", *rights, "--json", "--home", client.home))["key"]
        with visit(browser, chat_of(client)) as visited:
            page = unlocked(visited, key)
            with page.expect_response("**/models/load") as answered:
                choose(page, "other", before="tiny")
            assert answered.value.status == 200
            expect(page.get_by_text("Model loaded: other")).to_be_visible()
            assert state_of(client, "other") == "loaded"
            limited(page, max_tokens=8)
            with page.expect_request("**/v1/chat/completions") as asked:
                until_answered(ask(page, "one two three"))
            assert (asked.value.post_data_json or {})["model"] == "other"
            check(visited, "status of 401", "this API needs a key")
        authorized = {"Authorization": f"Bearer {key}"}
        refused = client.ask("/models/unload", {"model": "other"}, headers=authorized)
        assert (refused.status, refused.json()["error"]["code"]) == (403, code)


def unlocked(visited: Visit, key: str) -> Page:
    page = visited.page
    page.goto(visited.url)
    page.get_by_role("button", name="Enter API Key").click()
    page.fill("#api-key-input", key)
    page.press("#api-key-input", "Enter")
    expect(page.get_by_role("button", name="tiny").last).to_be_visible()
    return page


def knows(node: NodeProcess, models: int) -> bool:
    return len(node.status()["models"]) == models


def state_of(node: JoiningNode, model: str) -> str:
    answer = node.ask("/models", headers={"Authorization": "Bearer opensesame"})
    return next(str(each["status"]["value"]) for each in answer.json()["data"] if each["id"] == model)


@pytest.mark.full
def test_everywhere_at_once(browser: Browser, whole: MeshProcesses, tmp_path: Path) -> None:
    """On the host, a worker, a lite client and a phone with a guest's key: it chats, switches models, and
    goes on when a node is lost."""
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", seed=1)
    agreed = whole.serving()
    host, (lost, kept) = whole.nodes[agreed.host], sorted(agreed.workers, key=lambda name: name == "one")
    assert mesh_llm("load", str(other), "--on-demand", "--home", whole.nodes["one"].home).status == 0
    shared = said(mesh_llm("share", "--listen", "127.0.0.1", "--port", "0", "--json", "--home", host.home))
    with lite_client(whole, tmp_path / "none") as guest, ExitStack() as visits:
        nodes = (host, whole.nodes[kept], guest)
        for node in nodes:
            node.until(partial(knows, node, 2), what="it knows both")
        # What a person does who has compared the fingerprint.
        phone = visits.enter_context(visit(browser, shared["url"], **PHONE, ignore_https_errors=True))
        seen = [phone, *(visits.enter_context(visit(browser, chat_of(node))) for node in nodes)]
        for visited in seen[1:]:
            page = enter(visited)
            limited(page, max_tokens=16)
            until_answered(ask(page, "Why is the sky blue?"))
        limited(enter(phone), max_tokens=1000, ignore_eos=True)
        answer = ask(phone.page, LONG)
        until_written(phone.page, 40)
        before = written(answer)
        whole.kill(lost)
        until_written(phone.page, len(before) + 60)
        assert written(answer).startswith(before)
        phone.page.get_by_role("button", name="Stop", exact=True).click()
        until_answered(answer)
        # The phone's guest may only ask, and loads it all the same.
        for visited in (phone, *seen[1:]):
            choose(visited.page, "other", before="SmolLM2")
            limited(visited.page, max_tokens=16)
            with visited.page.expect_request("**/v1/chat/completions") as asked:
                until_answered(ask(visited.page, "one two three"))
            assert (asked.value.post_data_json or {})["model"] == "other"
            # Of the phone's service worker: browsers take no certificate for those on a person's word.
            check(visited, "SSL certificate error")
    assert mesh_llm("unload", "other", "--home", whole.nodes["one"].home).status == 0
