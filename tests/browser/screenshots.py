"""`python -m tests.browser.screenshots`: the pictures in docs/, of a mesh of three on this machine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser

from mesh_llm.home import models_folder
from mesh_llm.models import catalog
from tests.browser.test_chat import ask, chat_of, enter, limited, until_answered
from tests.support.browser import chromium, visit
from tests.support.mesh import MeshProcesses
from tests.support.node import temporary_home

DOCS = Path("docs")
LARGEST_BYTES = 200_000
MEMORY = {"studio": "8GB", "mini": "4GB", "laptop": "2GB"}
"""Of this machine, as if it were three of different sizes."""
BEFORE = ("Name three rivers.", "What is a prime number?", "Tell me of a fox.")
"""What the plots show."""
SHOWN = "Explain in one short paragraph why the sky is blue."
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
        node = mesh.nodes[first]
        for question in BEFORE:
            messages = [{"role": "user", "content": question}]
            node.ask("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 160})
        url = str(node.status()["console"]["url"])
        for name, options in SHOTS.items():
            with visit(browser, url, reduced_motion="reduce", **options) as visited:
                _write(visited.open().screenshot(), DOCS / f"{name}.png")
        _chat(browser, chat_of(node))


def _chat(browser: Browser, url: str) -> None:
    with visit(browser, url, viewport={"width": 1100, "height": 700}, reduced_motion="reduce") as visited:
        page = enter(visited)
        limited(page, temperature=0, max_tokens=160)
        until_answered(ask(page, SHOWN))
        page.mouse.move(0, 0)
        _write(page.screenshot(), DOCS / "chat.png")


def _write(picture: bytes, path: Path) -> None:
    """In 256 colours: a page of flat ones loses nothing by it."""
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)
    size = path.stat().st_size
    assert size < LARGEST_BYTES, f"{path} has {size} bytes"
    print(f"{path}: {size // 1000} kB")


if __name__ == "__main__":
    main()
