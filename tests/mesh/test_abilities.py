"""Models that make no text: found out by their files, and served by every node alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_gguf
from tests.support.mesh import HEAL_S, Agreed, MeshProcesses
from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.pictures import url
from tests.support.waiting import until

HIDDEN = 64
POOLING_LAST, POOLING_RANK = 3, 4
LONG = "ab" * 800
"""More tokens than the engine computes at once by itself."""


def test_embedding_model_embeds_by_itself_on_every_node(libraries: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_gguf.write(
        tmp_path / "embedder.gguf", "qwen3", hidden=HIDDEN, metadata={"pooling_type": POOLING_LAST}
    )
    body = {"input": ["a short text", "another one, which is longer", LONG], "model": "any"}
    with temporary_home() as folder, MeshProcesses(folder, model) as mesh:
        mesh.create("one")
        mesh.join("two")
        agreed = until(mesh.agreed, within_s=HEAL_S, what="both serve")
        replies = {name: node.ask("/v1/embeddings", body) for name, node in mesh.nodes.items()}
        host = mesh.nodes[agreed.host]
        host.until_said("makes embeddings")

    assert {reply.status for reply in replies.values()} == {200}, replies
    one, two = (reply.json()["data"] for reply in replies.values())
    assert [len(entry["embedding"]) for entry in one] == [HIDDEN] * 3
    assert one == two
    assert one[0]["embedding"] != one[1]["embedding"]


@pytest.mark.full
def test_reranker_reranks_by_itself(home: Path, libraries: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_gguf.write(
        tmp_path / "reranker.gguf",
        "qwen3",
        hidden=HIDDEN,
        metadata={"pooling_type": POOLING_RANK, "classifier.output_labels": ["yes", "no"]},
        tensors={"cls.output.weight": (2, HIDDEN)},
    )
    body = {"query": "what is a panda?", "documents": ["hi", "it is a bear", "the giant panda"], "top_n": 3}
    with NodeProcess(*SMALL, home=home, model=model) as node:
        node.until_ready()
        reply = node.ask("/v1/rerank", body)
        node.until_said("reranks")

    assert reply.status == 200, reply.body
    results: list[dict[str, Any]] = reply.json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 3


@pytest.mark.parametrize("architecture", ["bert", pytest.param("qwen3", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [False, True], ids=["embeddings", "ranks"])
def test_what_makes_no_text_is_split_like_any_other(
    architecture: str, ranks: bool, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """The first request through all stages is one that such a model answers; bert has no token to make."""
    more: dict[str, Any] = {"metadata": {"pooling_type": POOLING_LAST}} if architecture == "qwen3" else {}
    if ranks:
        more = {
            "metadata": {"pooling_type": POOLING_RANK, "classifier.output_labels": ["yes", "no"]},
            "tensors": {"cls.output.weight": (2, HIDDEN)},
        }
    model = tiny_gguf.write(tmp_path / "model.gguf", architecture, hidden=HIDDEN, **more)
    path = "/v1/embeddings"
    body: dict[str, Any] = {"input": ["a short text", "another one, which is longer"]}
    if ranks:
        path, body = "/v1/rerank", {"query": "a panda?", "documents": ["hi", "it is a bear"]}
    with temporary_home() as folder, MeshProcesses(folder, model) as mesh:
        one = mesh.create("one")
        one.until_ready()
        alone = one.ask(path, body)
    with temporary_home() as folder, MeshProcesses(folder, model) as mesh:
        mesh.create("one", "--split")
        mesh.join("two")

        def over_both() -> Agreed | None:
            agreed = mesh.agreed()
            return agreed if agreed is not None and len(agreed.stages) == 2 else None

        split = until(over_both, within_s=HEAL_S, what="both serve together")
        replies = [node.ask(path, body) for node in mesh.nodes.values()]

    assert split.workers
    assert alone.status == 200, alone.body
    assert [reply.status for reply in replies] == [200, 200], [reply.body for reply in replies]
    assert [_numbers(reply.json()) for reply in replies] == [_numbers(alone.json())] * 2


def _numbers(document: dict[str, Any]) -> Any:
    if "results" in document:
        return {result["index"]: result["relevance_score"] for result in document["results"]}
    return [entry["embedding"] for entry in document["data"]]


def test_projector_beside_the_model_lets_it_see_on_every_node(
    libraries: dict[str, Path], tmp_path: Path
) -> None:
    model = tiny_gguf.write(tmp_path / "seer-F32.gguf", "llama", hidden=HIDDEN)
    tiny_gguf.write_projector(tmp_path / "mmproj-seer-f16.gguf", hidden=HIDDEN)

    def body(*pictures: str) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
        content = [{"type": "text", "text": "what is this?"}, *parts]
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}

    with temporary_home() as folder, MeshProcesses(folder, model) as mesh:
        mesh.create("one")
        mesh.join("two")
        agreed = until(mesh.agreed, within_s=HEAL_S, what="both serve")
        mesh.nodes[agreed.host].until_said("mmproj-seer-f16.gguf beside it")
        counts = {}
        for name, node in mesh.nodes.items():
            replies = [node.ask("/v1/chat/completions", body(*urls)) for urls in ((), (url(0),), (url(255),))]
            assert [reply.status for reply in replies] == [200] * 3, [reply.body for reply in replies]
            counts[name] = [reply.json()["usage"]["prompt_tokens"] for reply in replies]

    assert counts["one"] == counts["two"]
    blind, *seeing = counts["one"]
    # Sixteen patches, and what marks them.
    assert all(count >= blind + 16 for count in seeing)


@pytest.mark.full
def test_one_model_answers_to_every_name(home: Path, libraries: dict[str, Path]) -> None:
    with temporary_home() as folder:
        model = tiny_gguf.write(folder / "tiny.gguf", "llama")
        with NodeProcess(*SMALL, "--alias", "mine", home=home, model=model) as node:
            node.until_ready()
            for asked in [{}, *({"model": name} for name in ("gpt-4o", "tiny", "", "a/b:c"))]:
                body = {**asked, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                reply = node.ask("/v1/chat/completions", body)
                assert reply.status == 200, reply.body
                assert reply.json()["usage"]["completion_tokens"] == 2
