"""What can be done from the page: invite, copy, stop; and what it says when its node is gone."""

from __future__ import annotations

import io
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zxingcpp
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from mesh_llm.agents.snippets import snippets
from tests.browser.test_chat import ask, chat_of, limited, until_answered
from tests.support.browser import until_copied, visit
from tests.support.joining import JoiningNode, Lab, lab, write_model
from tests.support.ports import spare_port


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(write_model(tmp_path_factory.mktemp("models"))) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def node(nodes: Lab) -> JoiningNode:
    return nodes.create("solo", "--console", "0")


@pytest.fixture
def page(browser: Browser, node: JoiningNode) -> Iterator[Page]:
    with visit(browser, console_of(node)) as visited:
        yield visited.open()
        visited.check()


def console_of(node: JoiningNode) -> str:
    return str(node.status()["console"]["url"])


def make_invite(page: Page, role: str) -> str:
    page.select_option("#invite-role", role)
    page.click("#invite-form button")
    return page.locator("#invite-token code").inner_text()


def read_qr(page: Page) -> str:
    picture = Image.open(io.BytesIO(page.locator(".qr").screenshot()))
    (found,) = zxingcpp.read_barcodes(picture, zxingcpp.BarcodeFormats([zxingcpp.BarcodeFormat.QRCode]))
    return str(found.text)


def test_an_invite_is_made_copied_scanned_used_and_revoked(page: Page, nodes: Lab, node: JoiningNode) -> None:
    assert "mesh1-" not in page.content(), "nothing secret before it is asked for"
    token = make_invite(page, "client")
    page.get_by_role("button", name="Copy the invite token").click()
    until_copied(page, token)
    page.get_by_role("button", name="Copy the command to join").click()
    until_copied(page, f"mesh-llm --client --join {token}")
    assert read_qr(page) == token

    guest = nodes.start("guest", "--client", "--join", token)
    expect(page.locator("#nodes-rows")).to_contain_text("guest")
    guest.until_ready()

    page.click("#invite-hide")
    assert "mesh1-" not in page.content()
    page.click("#invites-box summary")
    page.locator("#invites-list li", has_text="client, open").get_by_role("button").click()
    page.click("#confirm-no")
    expect(page.locator("#nodes-rows")).to_contain_text("guest")
    page.locator("#invites-list li", has_text="client, open").get_by_role("button").click()
    page.click("#confirm-yes")
    expect(page.locator("#invites-list li", has_text="client, open")).to_have_count(0)
    expect(page.locator("#nodes-rows tr:not(.leaving)")).to_have_count(1)


def test_a_lite_client_shows_no_memory_of_its_own_and_offers_no_invites(
    browser: Browser, nodes: Lab, node: JoiningNode
) -> None:
    client = nodes.start("asker", "--join", node.token(role="client"), "--client", "--console", "0")
    client.until_ready()
    try:
        with visit(browser, console_of(client)) as visited:
            page = visited.open()
            expect(page.locator("#mesh-summary")).to_contain_text("1 node and 1 client")
            expect(page.locator("#memory-track li")).to_have_count(1)
            expect(page.locator("#invite")).to_be_hidden()
            expect(page.locator("#invite-link")).to_be_hidden()
            visited.check()
    finally:
        client.stop()


def test_commands_for_agents_carry_the_port_and_the_model(page: Page, node: JoiningNode) -> None:
    url = node.url.replace("127.0.0.1", "localhost")
    tabs = page.get_by_role("tablist", name="Programs").get_by_role("tab")
    expect(tabs.first).to_have_text("pi")
    known = {recipe["title"]: recipe for recipe in snippets(url, "tiny", 512)}
    assert tabs.all_inner_texts() == list(known)
    for title, recipe in known.items():
        page.get_by_role("tab", name=title, exact=True).click()
        page.get_by_role("button", name=f"Copy the command for {title}", exact=True).click()
        until_copied(page, recipe["command"])
        if recipe["snippet"]:
            page.get_by_role("button", name=f"Copy the snippet for {title}", exact=True).click()
            until_copied(page, recipe["snippet"])
    assert known["pi"]["command"] == "pi --provider mesh --model tiny"
    assert url in known["goose"]["command"]
    page.get_by_role("tab", name="curl").click()
    page.get_by_role("tab", name="curl").press("ArrowRight")
    expect(page.get_by_role("tab", name="openai-python")).to_be_focused()


def test_a_lost_node_is_told_and_found_again(browser: Browser, nodes: Lab) -> None:
    port = str(spare_port(socket.SOCK_STREAM))
    node = nodes.create("comes-and-goes", "--console", port)
    with visit(browser, console_of(node)) as visited:
        page = visited.open()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        node.signal(signal.SIGKILL)
        node.process.wait(30)
        expect(page.locator("#lost-text")).to_contain_text("Connection to the node lost")
        expect(page.locator("#lost-text")).to_contain_text("Trying again in")
        nodes.create("comes-and-goes", "--console", port)
        assert len(asked) < 20, "it waits longer each time"
        # The page may be faster, and then has no such button any more.
        with suppress(PlaywrightTimeout):
            page.click("#retry", timeout=1000)
        expect(page.locator("#lost")).to_be_hidden()
        expect(page.locator("#node-state")).to_have_text("serving")
        make_invite(page, "node")
        assert visited.outside == []


def test_a_key_is_asked_for(browser: Browser, nodes: Lab) -> None:
    node = nodes.create("locked", "--console", "0", "--api-key", "opensesame")
    with visit(browser, console_of(node)) as visited:
        page = visited.page
        page.goto(visited.url)
        page.fill("#key-field", "wrong")
        page.press("#key-field", "Enter")
        expect(page.locator("#key-wrong")).to_be_visible()
        page.fill("#key-field", "opensesame")
        page.press("#key-field", "Enter")
        page.wait_for_selector("#memory-track li")
        assert "opensesame" not in page.content()
        expect(page.locator("#agents-panels")).to_contain_text("$MESH_LLM_API_KEY")
        make_invite(page, "client")
    with visit(browser, chat_of(node)) as visited:
        page = visited.page
        page.goto(visited.url)
        page.get_by_role("button", name="Enter API Key").click()
        page.fill("#api-key-input", "opensesame")
        page.press("#api-key-input", "Enter")
        page.get_by_role("button", name="Send").wait_for()
        limited(page, max_tokens=8)
        until_answered(ask(page, "one two three"))
        assert visited.outside == []


def test_the_model_is_unloaded_and_loaded_again(page: Page, browser: Browser, node: JoiningNode) -> None:
    page.click("#node-unload")
    page.click("#confirm-no")
    assert not node.status()["node"]["resting"]
    page.click("#node-unload")
    page.click("#confirm-yes")
    expect(page.locator("#node-load")).to_be_visible()
    expect(page.locator("#node-unload")).to_be_hidden()
    assert node.status()["node"]["resting"]
    with visit(browser, chat_of(node)) as visited:
        chat = visited.page
        chat.goto(visited.url)
        expect(chat.get_by_role("status")).to_have_text("This node is waiting: the model was unloaded here.")
        page.click("#node-load")
        expect(page.locator("#node-unload")).to_be_visible()
        expect(page.locator("#node-state")).to_have_text("serving")
        # By itself.
        expect(chat.locator("textarea").first).to_be_visible()


def test_stop_asks_first(browser: Browser, nodes: Lab) -> None:
    node = nodes.create("ends", "--console", "0")
    with visit(browser, console_of(node)) as visited:
        page = visited.open()
        page.click("#node-stop")
        page.keyboard.press("Escape")
        expect(page.locator("#confirm-dialog")).to_be_hidden()
        assert node.running
        page.click("#node-stop")
        page.click("#confirm-yes")
        expect(page.locator("#lost-text")).to_contain_text("The node is stopping.")
        assert node.wait().status == 0
