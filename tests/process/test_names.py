"""Names of models as people type them, through the real command: what they mean, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.home import cache_folder
from tests.support.command import Ended, mesh_llm
from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.sampling import first


class Stores:
    """A person's home folder, in which every program has put its models."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self.models = folder / ".models"
        self.hub = folder / ".cache" / "huggingface" / "hub"
        self.lmstudio = folder / ".lmstudio" / "models"
        self.ollama = folder / ".ollama" / "models"
        self.models.mkdir()

    @property
    def env(self) -> Mapping[str, str]:
        # Named one by one: the machine's own settings must not lead elsewhere.
        return {
            "HOME": str(self.folder),
            "MESH_LLM_CACHE": str(cache_folder()),
            "MESH_LLM_MODELS": str(self.models),
            "HF_HUB_CACHE": str(self.hub),
            "OLLAMA_MODELS": str(self.ollama),
        }

    def put(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._model, path)
        return path

    def put_hub(self, repo: str, file: str) -> Path:
        """As huggingface_hub lays it out: a link in a snapshot, to a blob without a name."""
        place = self.hub / f"models--{repo.replace('/', '--')}"
        blob = self.put(place / "blobs" / hashlib.sha256(file.encode()).hexdigest())
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("abc")
        link = place / "snapshots" / "abc" / file
        link.parent.mkdir(parents=True)
        link.symlink_to(blob)
        return link

    def put_ollama(self, name: str, tag: str) -> Path:
        digest = hashlib.sha256(self._model.read_bytes()).hexdigest()
        blob = self.put(self.ollama / "blobs" / f"sha256-{digest}")
        manifest = self.ollama / "manifests" / "registry.ollama.ai" / "library" / name / tag
        manifest.parent.mkdir(parents=True)
        layer = {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": f"sha256:{digest}",
            "size": blob.stat().st_size,
        }
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
        return blob


@pytest.fixture
def stores(tmp_path: Path, tiny_model: Path) -> Stores:
    return Stores(tmp_path, tiny_model)


def plan(stores: Stores, home: Path, model: str) -> Ended:
    ended = mesh_llm(
        "plan", "--home", home, "--model", model, "--json", *SMALL, env=stores.env, cwd=stores.folder
    )
    assert "Traceback" not in ended.stderr
    return ended


def planned(stores: Stores, home: Path, model: str) -> dict[str, Any]:
    ended = plan(stores, home, model)
    assert ended.status == 0, ended.stderr
    found = json.loads(ended.stdout)["model"]
    assert isinstance(found, dict)
    return found


def refused(stores: Stores, home: Path, model: str) -> tuple[int, str]:
    """By the planner and by a node alike, before it has opened anything."""
    ended = plan(stores, home, model)
    node = mesh_llm("--home", home, "--model", model, "--port", "0", env=stores.env, cwd=stores.folder)

    assert (node.status, node.stderr) == (ended.status, ended.stderr)
    assert ended.stdout == node.stdout == ""
    assert ended.stderr.count("\n") == ended.stderr.count("Error: ") + ended.stderr.count("Hint: ")
    return ended.status, ended.stderr


def test_a_model_of_every_store_has_a_name(stores: Stores, home: Path) -> None:
    stores.put(stores.models / "Own-Tiny-Q4_0.gguf")
    stores.put(stores.lmstudio / "somebody" / "Studio-GGUF" / "Studio-Tiny-Q4_0.gguf")
    stores.put_hub("somebody/Hub-GGUF", "Hub-Tiny-Q4_0.gguf")
    stores.put_ollama("llama9", "1b")

    for model, name in (
        ("own-tiny-q4_0", "Own-Tiny-Q4_0"),
        ("OWN-Tiny-Q4_0.gguf", "Own-Tiny-Q4_0"),
        (".models/Own-Tiny-Q4_0.gguf", "Own-Tiny-Q4_0"),
        ("studio-tiny", "Studio-Tiny-Q4_0"),
        ("hf:somebody/Hub-GGUF:Q4_0", "Hub-Tiny-Q4_0"),
        ("hub-tiny-q4_0", "Hub-Tiny-Q4_0"),
        ("llama9:1b", "llama9:1b"),
        ("ollama:llama9:1b", "llama9:1b"),
    ):
        assert planned(stores, home, model)["name"] == name, model


@pytest.mark.full
def test_a_catalog_name_means_the_file_that_is_here(stores: Stores, home: Path) -> None:
    stores.put_hub("bartowski/Qwen2.5-32B-Instruct-GGUF", "Qwen2.5-32B-Instruct-Q4_K_M.gguf")

    for model in ("32b", "Qwen2.5-32B", "Qwen2.5-32B-Instruct-Q4_K_M.gguf"):
        assert planned(stores, home, model)["name"] == "Qwen2.5-32B-Instruct-Q4_K_M"


@pytest.mark.full
def test_ones_own_catalog(stores: Stores, home: Path) -> None:
    stores.put(stores.models / "Mine-Q4_0.gguf")
    (home / "catalog.toml").write_text(
        '[favourite]\naliases = ["32b"]\nrepo = "me/Mine-GGUF"\nfiles = ["Mine-Q4_0.gguf"]\n'
    )

    assert planned(stores, home, "favourite")["name"] == "Mine-Q4_0"
    assert planned(stores, home, "32B")["name"] == "Mine-Q4_0"


def test_a_mistake_in_ones_own_catalog(stores: Stores, home: Path) -> None:
    (home / "catalog.toml").write_text('[mine]\nrepo = "me/mine"\nfiles = ["mine.gguf"]\nlayers = "many"\n')

    assert refused(stores, home, "mine") == (
        1,
        f"Error: {home}/catalog.toml, entry mine, field layers: it has to be a whole number above 0\n",
    )


def test_an_ambiguous_name(stores: Stores, home: Path) -> None:
    stores.put(stores.models / "Mine-7B-Q4_0.gguf")
    stores.put(stores.lmstudio / "me" / "Mine-GGUF" / "Mine-7B-Q8_0.gguf")

    assert refused(stores, home, "mine-7b") == (
        1,
        "Error: mine-7b could be Mine-7B-Q4_0 (models, Q4_0) or Mine-7B-Q8_0 (lmstudio, Q8_0)\n"
        "Hint: name one of them in full, or by its path\n",
    )


@pytest.mark.parametrize(
    ("model", "status", "words"),
    first(
        3,
        [
            (
                "mime-7b-q4_0",
                1,
                "Error: mime-7b-q4_0 is neither a file nor a model that mesh-llm knows by name\n"
                "Hint: did you mean Mine-7B-Q4_0?\n",
            ),
            (
                "qwen-2.5-33b",
                1,
                "Error: qwen-2.5-33b is neither a file nor a model that mesh-llm knows by name\n"
                "Hint: did you mean Qwen2.5-32B, Qwen2.5-7B or Qwen2.5-72B?\n",
            ),
            (
                "ollama:nobody",
                1,
                "Error: ollama:nobody is not in Ollama's store on this machine\n"
                "Hint: ollama pull nobody downloads it\n",
            ),
            (
                "hf:nobody",
                2,
                "Error: hf:nobody is not of the form hf:OWNER/REPO[:FILE|QUANT]\n"
                "Hint: such as hf:unsloth/GLM-4.7-Flash-GGUF:Q4_K_M\n",
            ),
            (
                "https://example.org/x.bin",
                2,
                "Error: https://example.org/x.bin is not the URL of a .gguf file\n"
                "Hint: models on Hugging Face can be named as hf:OWNER/REPO[:FILE|QUANT], too\n",
            ),
        ],
    ),
)
def test_names_that_mean_nothing(stores: Stores, home: Path, model: str, status: int, words: str) -> None:
    stores.put(stores.models / "Mine-7B-Q4_0.gguf")

    assert refused(stores, home, model) == (status, words)


def test_nothing_is_downloaded_for_a_plan(stores: Stores, home: Path) -> None:
    assert planned(stores, home, "glm-flash")["layers"] == 47
    assert list(stores.models.iterdir()) == []


@pytest.mark.full
def test_a_node_serves_a_model_of_ollamas_by_its_name(stores: Stores) -> None:
    stores.put_ollama("llama9", "1b")

    with (
        temporary_home() as home,
        NodeProcess(*SMALL, home=home, model="llama9:1b", env=stores.env) as node,
    ):
        status = node.until_ready().status()

        assert status["model"]["name"] == "llama9:1b"
        plan_of_it = mesh_llm("plan", "--home", home, "--model", "ollama:llama9:1b", "--json", env=stores.env)
    assert json.loads(plan_of_it.stdout)["model"]["name"] == "llama9:1b"
