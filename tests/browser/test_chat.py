"""The chat: streamed, stopped, resumed, several turns, and nothing in an answer but text."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, Request, Route, expect

from tests.support import tiny_gguf
from tests.support.browser import Visit, until_copied, until_true, visit
from tests.support.mesh import MeshProcesses
from tests.support.node import NodeProcess, temporary_home

LONG = "Write a long story about a fox who travels around the world."
HOSTILE = """# A <b>title</b>

<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 2">
<iframe src="javascript:parent.pwned = 3"></iframe>

[click](javascript:window.pwned=4) [data](data:text/html,<script>window.pwned=5</script>)
![picture](https://elsewhere.example/picture.png) <https://elsewhere.example/\"onmouseover=\"pwned=6>

```html
<script>window.pwned = 7</script>
```

| a<img src=x onerror="window.pwned=8"> | b |
|---|---|
| <style>body{display:none}</style> | 2 |
"""


def answered(page: Page, text: str, *, thought: str = "") -> None:
    """The next answer is `text`: what a model writes is up to the test."""
    deltas = [{"reasoning_content": thought}] if thought else []
    deltas += [{"content": text[at : at + 7]} for at in range(0, len(text), 7)]
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])

    def fulfil(route: Route) -> None:
        route.fulfill(status=200, headers={"Content-Type": "text/event-stream"}, body=body)

    page.route("**/v1/chat/completions", fulfil, times=1)


def does_not_end(page: Page) -> None:
    """The next answer goes on until it is stopped, or has as many tokens as it may."""

    def go_on(route: Route) -> None:
        route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "ignore_eos": True}))

    page.route("**/v1/chat/completions", go_on, times=1)


def ask(page: Page, question: str) -> None:
    page.fill("#chat-text", question)
    page.press("#chat-text", "Enter")


def until_answered(page: Page, count: int = 1) -> None:
    expect(page.locator(".answer:not(.open)")).to_have_count(count)


def choose(page: Page, **settings: Any) -> None:
    page.click("#settings summary")
    for name, value in settings.items():
        page.fill(f"#set-{name}", str(value))
    page.click("#settings summary")


def written(page: Page) -> str:
    return page.locator(".answer-text").last.inner_text()


def test_an_answer_streams_and_stops(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()
    choose(page, max_tokens=1500, temperature=0)
    does_not_end(page)
    ask(page, LONG)
    until_true(page, "document.querySelector('.answer-text')?.textContent.length > 40")
    expect(page.locator(".answer.open")).to_have_count(1)
    first = written(page)
    until_true(page, f"document.querySelector('.answer-text').textContent.length > {len(first) + 20}")
    page.click("#chat-stop")
    until_answered(page)
    expect(page.locator(".answer-note")).to_have_text("Stopped.")
    expect(page.locator(".stats")).to_contain_text("tok/s · first token after")
    expect(page.locator("#chat-send")).to_be_visible()
    visited.check()


def test_several_turns_survive_a_reload(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()
    sent: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if request.url.endswith("/completions"):
            sent.append(request.post_data_json or {})

    page.on("request", note)
    page.click("#settings summary")
    page.fill("#system-prompt", "You are terse.")
    page.fill("#set-temperature", "0")
    page.fill("#set-max_tokens", "12")
    page.click("#settings summary")
    ask(page, "Say one word.")
    until_answered(page, 1)
    said = written(page)
    ask(page, "And another.")
    until_answered(page, 2)
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[1]["messages"][0]["content"] == "You are terse."
    assert (sent[1]["temperature"], sent[1]["max_tokens"]) == (0, 12)
    page.reload()
    expect(page.locator(".question")).to_have_count(2)
    assert page.locator(".answer-text").first.inner_text() == said
    page.click("#chat-new")
    expect(page.locator(".question")).to_have_count(0)
    page.select_option("#chat-choice", label="Say one word.")
    expect(page.locator(".question")).to_have_count(2)
    visited.check()


def test_a_stream_survives_the_death_of_a_worker(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()
    choose(page, max_tokens=1500, temperature=0)
    does_not_end(page)
    ask(page, LONG)
    until_true(page, "document.querySelector('.answer-text')?.textContent.length > 60")
    before = written(page)
    whole.kill(next(name for name in whole.serving().workers if name != "one"))
    expect(page.locator(".resumed li").first).to_contain_text("Resumed after a failure")
    until_true(page, f"document.querySelector('.answer-text').textContent.length > {len(before) + 60}")
    assert written(page).startswith(before[:-2].rstrip())
    page.click("#chat-stop")
    until_answered(page)
    expect(page.locator(".answer-error")).to_be_hidden()
    visited.check()


def test_a_picture_goes_with_the_question(
    browser: Browser, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """To a model that sees: a tiny one, with a projector beside it."""
    model = tiny_gguf.write(tmp_path / "seer-F32.gguf", "llama", hidden=64)
    tiny_gguf.write_projector(tmp_path / "mmproj-seer-f16.gguf", hidden=64)
    picture = tmp_path / "red.png"
    Image.new("RGB", (2000, 1000), "red").save(picture)
    options = ("--ctx-size", "512", "--parallel", "1", "--console", "0")
    with temporary_home() as home, NodeProcess(*options, home=home, model=model) as node:
        url = str(node.until_ready().status()["console"]["url"])
        with visit(browser, url) as visited:
            page = visited.open()
            choose(page, max_tokens=8, temperature=0)
            page.set_input_files("#chat-file", picture)
            expect(page.locator("#chat-images img")).to_have_count(1)
            with page.expect_request("**/v1/chat/completions") as asked:
                ask(page, "What is this?")
            until_answered(page)
            [message] = (asked.value.post_data_json or {})["messages"]
            assert [part["type"] for part in message["content"]] == ["text", "image_url"]
            sent = message["content"][1]["image_url"]["url"]
            with Image.open(BytesIO(base64.b64decode(sent.partition(",")[2]))) as seen:
                # Made smaller on the page.
                assert (seen.size, seen.convert("RGB").getpixel((9, 9))) == ((1536, 768), (255, 0, 0))
            expect(page.locator(".answer-error")).to_be_hidden()
            expect(page.locator(".question img")).to_have_count(1)
            expect(page.locator("#chat-images img")).to_have_count(0)
            visited.check()


def test_html_in_an_answer_is_text(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()
    answered(page, HOSTILE, thought="<img src=x onerror='window.pwned = 9'>")
    ask(page, "<b>break it</b>")
    until_answered(page)
    answer = page.locator(".answer")
    for tag in ("script", "iframe", "img", "style", "b"):
        assert answer.locator(tag).count() == 0, tag
    addresses = answer.locator("a").evaluate_all("links => links.map((link) => link.protocol)")
    assert set(addresses) == {"https:"}
    assert page.evaluate("window.pwned") is None
    assert "<script>window.pwned = 1</script>" in answer.inner_text()
    assert page.locator(".question b").count() == 0
    assert page.locator(".thoughts").inner_text().startswith("Reasoning")
    visited.check()


def test_markdown_is_drawn_and_code_is_copied(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()
    code = "def twice(n):\n    return 2 * n  # <&>"
    text = (
        "## Head\n\nSome *em*, **strong**, ~~gone~~ and `code`.\nNext line.\n\n- a\n- b\n  1. c\n  2. d\n\n"
        f"```python\n{code}\n```\n\n| x | y |\n|---|--:|\n| 1 | 2 |\n\n> said\n\n---\n\n"
        "snake_case_name, 2 * 3 * 4"
    )
    answered(page, text)
    ask(page, "Show me.")
    until_answered(page)
    prose = page.locator(".answer-text")
    for selector, inner in {
        "h5": "Head",
        "em": "em",
        "strong": "strong",
        "del": "gone",
        "p > code": "code",
        "ul > li ol > li:nth-child(2)": "d",
        "td.right": "2",
        "blockquote": "said",
        "pre > code": code,
    }.items():
        assert prose.locator(selector).inner_text() == inner
    assert prose.locator("hr").count() == 1
    assert prose.locator("p").last.inner_text() == "snake_case_name, 2 * 3 * 4"
    prose.get_by_role("button", name="Copy this code").click()
    until_copied(page, code)
    page.get_by_role("button", name="Copy the answer").click()
    until_copied(page, text)
    visited.check()


def test_an_answer_that_fails_says_why(visited: Visit, whole: MeshProcesses) -> None:
    page = visited.open()

    def refuse(route: Route) -> None:
        error = {"error": {"message": "the queue is full", "type": "server_error", "code": 429}}
        route.fulfill(status=429, json=error)

    page.route("**/v1/chat/completions", refuse, times=1)
    ask(page, "Anything.")
    until_answered(page)
    expect(page.locator(".answer-error")).to_have_text("Failed: the queue is full")
    answered(page, "Now it works.")
    page.click("text=Ask again")
    expect(page.locator(".answer-text")).to_have_text("Now it works.")
    assert visited.outside == []
