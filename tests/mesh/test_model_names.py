"""One model, called by different names on different nodes: it is told by its contents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.joining import Lab, lab, write_model


@pytest.fixture
def nodes(tmp_path: Path, libraries: dict[str, Path]) -> Iterator[Lab]:
    """A file that is called as one of twenty gigabytes on the hub."""
    with lab(write_model(tmp_path / "models", name="Qwen2.5-32B-Instruct-Q4_K_M.gguf")) as nodes:
        yield nodes


@pytest.mark.full
def test_a_model_of_the_catalog_comes_from_a_peer_before_the_hub(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.start("one", "--model", "32b", "--split", "--hosting", "prefer").until_ready()
    two = nodes.join("two", one, "--model", "Qwen2.5-32B", models=tmp_path / "two")

    two.until_plan(("one", 0, 15), ("two", 15, 30))
    assert one.status()["model"]["name"] == "Qwen2.5-32B-Instruct-Q4_K_M"
    assert [path.read_bytes() for path in (tmp_path / "two").iterdir()] == [nodes.model.read_bytes()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("glm-flash", "only owners of the mesh can set --model; it is Qwen2.5-32B"),
        (
            "hf:somebody/Something-GGUF:Q4_0",
            "the mesh serves Qwen2.5-32B-Instruct-Q4_K_M, but --model is hf:somebody/Something-GGUF:Q4_0",
        ),
    ],
)
def test_whoever_joins_does_not_bring_another(nodes: Lab, tmp_path: Path, model: str, message: str) -> None:
    one = nodes.start("one", "--model", "32b").until_ready()

    two = nodes.start("two", "--join", one.token(), "--model", model, models=tmp_path / "two")

    ended = two.wait(within_s=60)
    assert ended.status == 1
    assert f"Error: {message}\n" in ended.stderr
    assert not (tmp_path / "two").exists() or list((tmp_path / "two").iterdir()) == []


@pytest.mark.full
def test_a_file_that_is_called_as_another_model(nodes: Lab, tmp_path: Path) -> None:
    """Nobody downloads GLM for it."""
    own = write_model(tmp_path / "own", name="glm-flash.gguf", seed=5)
    one = nodes.start("one", "--model", own, "--split", "--hosting", "prefer").until_ready()
    two = nodes.join("two", one, models=tmp_path / "two")

    two.until_plan(("one", 0, 15), ("two", 15, 30))
    assert [path.read_bytes() for path in (tmp_path / "two").iterdir()] == [own.read_bytes()]
