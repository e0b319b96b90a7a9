"""Several models, a replica and lanes, as people and Prometheus are shown them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support import tiny_gguf
from tests.support.browser import visit
from tests.support.command import mesh_llm
from tests.support.joining import lab, write_model
from tests.support.series import Scrape
from tests.support.waiting import until


@pytest.mark.full
def test_status_page_and_metrics_show_models_replicas_and_lanes(browser: Browser, tmp_path: Path) -> None:
    coder = tiny_gguf.write(tmp_path / "coder.gguf", "qwen3", layers=8)
    with lab(write_model(tmp_path / "models")) as nodes:
        options = ("--model", coder, "--split", "--lanes", "2", "--replicas", "1-2", "--no-draft")
        owner = nodes.create("owner", *options, "--console", "0")
        nodes.join("worker", owner, models=nodes.folder / "empty")

        def seen() -> bool:
            status = owner.status()
            lanes = [lane["state"] for lane in status["engine"]["lanes"]]
            engines = Scrape(owner.ask("/metrics").body).of("mesh_llm_engine_lanes", "model")
            return lanes == ["ready", "ready"] and engines == {"tiny": 2, "coder": 2}

        until(seen, within_s=90, what="both models are served, each by two engines")

        told = mesh_llm("status", "--home", owner.home).stdout
        assert re.search(r"^lanes +2 engines over the same stages, with 0 \+ 0 requests$", told, re.MULTILINE)
        rows = [line.split() for line in told.splitlines()]
        assert [row[0] for row in rows if row and row[0] in ("tiny", "coder") and "serving" in row] == [
            "tiny",
            "coder",
        ]

        assert all("owner (2 lanes)" in " ".join(row) for row in rows if row and row[0] in ("tiny", "coder"))

        series = Scrape(owner.ask("/metrics").body)
        assert series.of("mesh_llm_model_serving", "model") == {"tiny": 1, "coder": 1}
        assert series.of("mesh_llm_model_replicas", "model") == {"tiny": 1, "coder": 1}
        assert series.of("mesh_llm_model_replicas_wanted", "model") == {"tiny": 1, "coder": 1}
        assert series.of("mesh_llm_model_lanes", "model") == {"tiny": 2, "coder": 2}

        with visit(browser, str(owner.status()["console"]["url"])) as visited:
            page = visited.open()
            expect(page.locator("#models-list li strong")).to_have_text(["tiny", "coder"])
            expect(page.locator("#models-list li span")).to_have_text(
                [
                    "serving, 1 of 1 replicas on owner (2 lanes), the default one",
                    "serving, 1 of 1 replicas on owner (2 lanes)",
                ]
            )
            facts = page.locator("#model-facts")
            expect(facts).to_contain_text("Replicas1 of 1: owner (2 lanes)")
            expect(facts).to_contain_text("Lanes2 engines over the same stages, with 0 + 0 requests")
            visited.check()
