"""`python -m tests.browser.screenshots`: the pictures in docs/, of a mesh of three on this machine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect

from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from tests.support.browser import chromium, visit
from tests.support.mesh import MeshProcesses
from tests.support.node import temporary_home

DOCS = Path("docs")
LARGEST_BYTES = 200_000
MEMORY = {"studio": "8GB", "mini": "4GB", "laptop": "2GB"}
"""Of this machine, as if it were three of different sizes."""
BEFORE = ("Name three rivers.", "What is a prime number?", "Tell me of a fox.")
SHOWN = (
    "Explain in one short paragraph why the sky is blue.",
    "Write a Python function that adds two numbers.",
)
SHOTS: dict[str, dict[str, Any]] = {
    "console-light": {"viewport": {"width": 1440, "height": 1240}, "color_scheme": "light"},
    "console-dark": {"viewport": {"width": 1440, "height": 1240}, "color_scheme": "dark"},
    "console-phone": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "light",
        "device_scale_factor": 2,
        "is_mobile": True,
        "has_touch": True,
    },
}


def main() -> None:
    model = models_folder() / catalog.load().find("smollm2").files[0]
    with temporary_home() as folder, MeshProcesses(folder, model) as mesh, chromium() as browser:
        first, *others = MEMORY
        mesh.create(first, "--split", "--console", "0", "--max-memory", MEMORY[first])
        for name in others:
            mesh.join(name, "--max-memory", MEMORY[name])
        mesh.serving(within_s=90)
        url = str(mesh.nodes[first].status()["console"]["url"])
        # What is asked on the first page is what the plots of all show.
        for name, options in SHOTS.items():
            _shoot(browser, url, name, options)


def _shoot(browser: Browser, url: str, name: str, options: dict[str, Any]) -> None:
    with visit(browser, url, reduced_motion="reduce", **options) as visited:
        page = visited.open()
        page.click("#settings summary")
        page.fill("#set-temperature", "0")
        page.fill("#set-max_tokens", "160")
        page.click("#settings summary")
        for question in BEFORE:
            _ask(page, question, 1)
            page.click("#chat-new")
        for number, question in enumerate(SHOWN, 1):
            _ask(page, question, number)
        page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
        page.evaluate("document.activeElement.blur()")
        _write(page.screenshot(), DOCS / f"{name}.png")


def _ask(page: Page, question: str, number: int) -> None:
    """The answer is the `number`th of its conversation."""
    expect(page.locator(".turn.leaving")).to_have_count(0)
    page.fill("#chat-text", question)
    page.click("#chat-send")
    expect(page.locator(".answer:not(.open)")).to_have_count(number)


def _write(picture: bytes, path: Path) -> None:
    """In 256 colours: a page of flat ones loses nothing by it."""
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)
    size = path.stat().st_size
    assert size < LARGEST_BYTES, f"{path} has {size} bytes"
    print(f"{path}: {size // 1000} kB")


if __name__ == "__main__":
    main()
