"""Predicted memory against the engine's own account of it, for every family of architectures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.models.facts import model_facts
from mesh_llm.planning.fit import CacheSettings, checkpoint_bytes, memory_need
from mesh_llm.types import ModelFacts
from tests.support import tiny_gguf
from tests.support.engine_report import engine_report
from tests.support.sampling import sampled

MIB = 1 << 20
ROUNDING = MIB / 100
"""The log gives hundredths of a MiB."""
TINY = 8 * MIB
"""Below this, fixed overheads are larger than what is predicted."""

SETTINGS = [CacheSettings(context=512, slots=1), CacheSettings(context=4000, slots=3)]


def facts_of(path: Path) -> ModelFacts:
    child = subprocess.run(
        [sys.executable, "-m", "mesh_llm.engine.children.gguf"],
        input=json.dumps({"paths": [str(path)], "fingerprint": True}) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return model_facts(json.loads(child.stdout))


def assert_predicted(path: Path, settings: CacheSettings) -> None:
    facts = facts_of(path)
    whole = memory_need(facts, settings)
    # The engine makes checkpoints when it reads prompts, not when it loads.
    need = replace(whole, cache_bytes=whole.cache_bytes - checkpoint_bytes(facts.layers, settings))
    report = engine_report(
        path,
        context=settings.context,
        slots=settings.slots,
        type_k=settings.type_k,
        type_v=settings.type_v,
        flash_attention=settings.flash_attention,
    )
    assert abs(need.cache_bytes - report.cache_bytes) <= ROUNDING * report.cache_lines
    assert abs(need.weight_bytes - report.weight_bytes) <= ROUNDING * report.weight_lines
    error = need.total_bytes - report.total_bytes
    assert abs(error) <= max(report.total_bytes / 10, TINY)
    # Too little is worse than too much: that is a crash in the middle of loading.
    assert need.compute_bytes >= report.compute_bytes - max(report.total_bytes / 20, MIB / 2)


@pytest.mark.parametrize("settings", sampled(SETTINGS, SETTINGS[1]), ids=["one-slot", "three-slots"])
@pytest.mark.parametrize("architecture", tiny_gguf.ARCHITECTURES)
def test_tiny_models(architecture: str, settings: CacheSettings, tmp_path: Path) -> None:
    assert_predicted(tiny_gguf.write(tmp_path / "tiny.gguf", architecture), settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=["one-slot", "three-slots"])
def test_a_real_model(smollm2: Path, settings: CacheSettings) -> None:
    assert_predicted(smollm2, settings)


@pytest.mark.parametrize(
    "kind",
    sampled(["f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"], "f32", "q8_0", "iq4_nl"),
)
def test_cache_types(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "qwen3")

    assert_predicted(path, CacheSettings(context=1024, slots=2, type_k=kind, type_v=kind))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_without_flash_attention(architecture: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)

    assert_predicted(path, CacheSettings(context=2048, slots=2, flash_attention=False))


def test_shards_need_what_the_whole_needs(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", quantisation="Q8_0")
    shards = tiny_gguf.write_shards(tmp_path / "split.gguf", 3, "llama", quantisation="Q8_0")

    assert [shard.name for shard in shards] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert facts_of(shards[0]).weight_bytes == facts_of(whole).weight_bytes
    assert_predicted(shards[0], SETTINGS[0])
