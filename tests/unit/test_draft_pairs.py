"""Which small model guesses ahead for which large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.models import catalog
from mesh_llm.models.draft_pairs import paired, wanted_draft
from mesh_llm.models.stores import LocalModel, Store

CATALOG = catalog.load()
SMALL, LARGE = 1, 100


def local(name: str, size_bytes: int, store: Store = Store.MODELS, *, missing: bool = False) -> LocalModel:
    path = Path("/stores") / store / (f"{name}.gguf" if store is not Store.OLLAMA else f"sha256-{len(name)}")
    return LocalModel(
        name=name,
        path=path,
        files=(path,),
        size_bytes=size_bytes,
        store=store,
        missing=("x-00002-of-00002.gguf",) if missing else (),
    )


DRAFT = local("Qwen2.5-0.5B-Instruct-Q4_K_M", SMALL)


@pytest.mark.parametrize(
    "model",
    [
        local("Qwen2.5-32B-Instruct-Q4_K_M", LARGE),
        local("qwen2.5-32b-instruct-q4_k_m", LARGE, Store.HUB),
        local("Qwen2.5-32B-Instruct-Q8_0", LARGE, Store.LMSTUDIO),
        local("Qwen2.5-Coder-32B-Instruct-Q4_K_M", LARGE),
        local("ollama:qwen2.5:32b", LARGE, Store.OLLAMA),
    ],
    ids=lambda model: model.name,
)
def test_a_model_of_the_catalog_has_its_draft(model: LocalModel) -> None:
    assert paired(model.path, CATALOG, [model, local("Other", SMALL), DRAFT]) == DRAFT


def test_a_model_that_no_store_lists_is_known_by_its_file() -> None:
    assert paired(Path("/data/Qwen2.5-7B-Instruct-Q4_K_M.gguf"), CATALOG, [DRAFT]) == DRAFT
    shard = Path("/data/Qwen2.5-72B-Instruct-Q8_0-00001-of-00002.gguf")
    assert paired(shard, CATALOG, [DRAFT]) == DRAFT


def test_the_draft_may_be_in_any_store_and_of_any_quantisation() -> None:
    model = local("Qwen3-32B-Q4_K_M", LARGE)
    exact = local("Qwen3-0.6B-Q4_K_M", 3, Store.HUB)
    coarse, fine = local("Qwen3-0.6B-Q2_K", 2), local("Qwen_Qwen3-0.6B-Q8_0", 5)

    assert paired(model.path, CATALOG, [model, fine, coarse, exact]) == exact
    assert paired(model.path, CATALOG, [model, fine, coarse]) == coarse
    assert paired(model.path, CATALOG, [model, fine]) == fine


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (local("Qwen2.5-32B-Instruct-Q4_K_M", LARGE), []),
        (local("Qwen2.5-32B-Instruct-Q4_K_M", LARGE), [local("Qwen3-0.6B-Q4_K_M", SMALL)]),
        (local("Qwen2.5-32B-Instruct-Q4_K_M", LARGE), [local(DRAFT.name, SMALL, missing=True)]),
        (local("Qwen2.5-32B-Instruct-Q4_K_M", LARGE), [local(DRAFT.name, LARGE + 1)]),
        (local("GLM-4.7-Flash-Q4_K_M", LARGE), [DRAFT]),
        (local("Somebody-7B-Q4_K_M", LARGE), [DRAFT]),
        (DRAFT, [DRAFT]),
    ],
    ids=[
        "not here",
        "another's",
        "in part",
        "larger than the model",
        "none listed",
        "unknown model",
        "itself",
    ],
)
def test_no_draft(model: LocalModel, found: list[LocalModel]) -> None:
    assert paired(model.path, CATALOG, [model, *found]) is None


def test_what_is_downloaded_beside_a_model() -> None:
    assert wanted_draft(CATALOG.find("Qwen2.5-32B"), CATALOG) == CATALOG.find("Qwen2.5-0.5B")
    assert wanted_draft(CATALOG.find("GLM-4.7-Flash"), CATALOG) is None


def test_a_persons_own_pair(tmp_path: Path) -> None:
    own = tmp_path / "catalog.toml"
    own.write_text(
        '[large]\nrepo = "me/large"\nfiles = ["Large-Q4_0.gguf"]\ndraft = "small"\n'
        '[small]\nrepo = "me/small"\nfiles = ["Small-Q4_0.gguf"]\n'
    )
    small = local("Small-Q4_0", SMALL)

    assert paired(Path("Large-Q4_0.gguf"), catalog.load(own), [small]) == small
