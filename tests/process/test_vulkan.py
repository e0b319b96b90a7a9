"""libggml-vulkan on a software driver (lavapipe): its arithmetic is that of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import lavapipe, tiny_gguf
from tests.support.lone_engine import lone_engine

# Mesa compiles every shader for the CPU first: a minute of CPU time for each test.
pytestmark = pytest.mark.full

CLOSE = {"F32": 0.05, "Q4_0": 0.2}
"""Logarithms of probabilities may differ so far. Seen were 0.007 and 0.062.

Shaders add in another order than the CPU does; for Q4_0 the CPU rounds activations to 8 bits besides.
"""


@pytest.fixture
def vulkan(libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The libraries with Vulkan's, and an environment in which that finds lavapipe."""
    if (driver := lavapipe.driver()) is None:
        pytest.skip("there is no lavapipe on this machine (apt install mesa-vulkan-drivers)")
    entry = lavapipe.library()
    if not entry.built:
        pytest.skip("libggml-vulkan was not built for lavapipe (python -m tests.support.lavapipe)")
    for name, value in lavapipe.environment(driver).items():
        monkeypatch.setenv(name, value)
    return {**libraries, "vulkan": entry.path}


@pytest.mark.parametrize("quantisation", CLOSE)
def test_a_model_on_vulkan_says_what_it_says_on_the_cpu(
    vulkan: dict[str, Path], libraries: dict[str, Path], tmp_path: Path, quantisation: str
) -> None:
    model = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", hidden=256, quantisation=quantisation)

    on_cpu = written(model, libraries, {})
    on_vulkan = written(model, vulkan, {"devices": ("Vulkan0",), "gpu_layers": 99})

    assert [token for token, _ in on_vulkan] == [token for token, _ in on_cpu]
    differences = [abs(one - other) for (_, one), (_, other) in zip(on_vulkan, on_cpu, strict=True)]
    assert max(differences) < CLOSE[quantisation]


def written(model: Path, libraries: dict[str, Path], changes: dict[str, Any]) -> list[tuple[str, float]]:
    """Tokens, each with the logarithm of its probability."""
    body = {"prompt": "a b c d e f g " * 20, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    with lone_engine(model, libraries, changes=changes) as engine:
        answer = engine.ask("/v1/completions", body).json()
    tokens = answer["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["logprob"]) for token in tokens]
