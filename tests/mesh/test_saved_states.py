"""A mesh that serves a hybrid model split goes on from a checkpoint when the end of a text has changed."""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny_gguf
from tests.support.mesh import MeshProcesses


def test_the_beginning_of_a_text_is_used_again(libraries: dict[str, Path], home: Path) -> None:
    model = tiny_gguf.write(home / "hybrid.gguf", "lfm2", layers=6)
    text = "The keeper wrote in her book every evening: the wind, and which ships had passed. "
    with MeshProcesses(home / "nodes", model) as mesh:
        mesh.create("one", "--split")
        mesh.join("two")
        serving = mesh.serving()
        assert {name for name, _, _ in serving.stages} == {"one", "two"}

        cached = []
        for end in ("On the first day", "On the second day", "Then a storm came"):
            reply = mesh.nodes["one"].ask("/v1/completions", {"prompt": text * 3 + end, "max_tokens": 4})
            assert reply.status == 200, reply.body
            cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert min(cached[1:]) > 50, cached
