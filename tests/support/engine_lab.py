"""Tiny models of every architecture, and what engines alone and over workers answer with them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mesh_llm.engine.spec import EngineSpec
from mesh_llm.types import Setting
from tests.support import tiny_gguf
from tests.support.architectures import COMMON, MIXTURE, VOCABULARY, Metadata

KEY = "key"
IMAGE = "<image>"
"""Stands in a text for an image."""
_GLOBAL_KEYS = ("xielu.", "tokenizer.")
"""Metadata whose keys do not begin with the architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """One model file."""

    path: Path
    layers: int
    has_head: bool
    """False where the embedding is the head, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What an engine said to each request, and what that took."""

    said: tuple[Any, ...]
    """Tokens, the log-probabilities of the likeliest, how much of the prompt was kept; or an error."""
    costs: tuple[Cost, ...]
    frames: Counter[str]
    """That the host sent, from the start on."""
    declined: list[Any]
    """Ops that workers left to the host."""
    waits: tuple[int, int]
    """Round trips that the host waited to hear what workers compute: of weights, and of nodes of graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one request: one-way trips that had to wait for each other, and runs of each worker."""

    hops: int
    runs: dict[str, int]

    def per_token(self, first: Cost, tokens: int) -> tuple[float, dict[str, float]]:
        """What each further token took, by an answer that has so many more than `first`."""
        return (self.hops - first.hops) / tokens, {
            name: (count - first.runs.get(name, 0)) / tokens for name, count in self.runs.items()
        }


class EngineLab:
    def __init__(self, child: subprocess.Popen[str], libraries: dict[str, Path], folder: Path) -> None:
        self._child = child
        self._libraries = libraries
        self._folder = folder

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        log = self._folder / "engine.log"
        log.unlink(missing_ok=True)
        self._child.stdin.write(json.dumps({**job, "log": str(log)}) + "\n")
        self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        if "failure" in answer:
            complaints = [
                line for line in log.read_text(errors="replace").splitlines() if _is_complaint(line)
            ]
            raise AssertionError("\n".join([answer["failure"], *complaints[-5:]]))
        return answer

    def write(self, architecture: str, metadata: Metadata, *, omitted: Sequence[str] = ()) -> Tiny:
        """A model with random weights in the shapes that the engine's loader wants."""
        shapes = self.shapes(architecture, metadata)
        wanted = {name: shape for name, shape in shapes.items() if not any(part in name for part in omitted)}
        weights = {name: random_values(name, shape) for name, shape in wanted.items()}
        return self.write_weights(architecture, metadata, weights)

    def shapes(self, architecture: str, metadata: Metadata) -> dict[str, tuple[int, ...]]:
        """Of the tensors that the engine's loader wants, in numpy's order."""
        bare = self._folder / "metadata.gguf"
        tiny_gguf.finish(_head(bare, architecture, COMMON | metadata))
        shapes = self.ask({"kind": "shapes", "path": str(bare)})["shapes"]
        return {name: tuple(reversed(shape)) for name, shape in shapes.items()}

    def write_weights(
        self, architecture: str, metadata: Metadata, weights: dict[str, Any], *, stem: str | None = None
    ) -> Tiny:
        path = self._folder / f"{stem or architecture}.gguf"
        writer = _head(path, architecture, COMMON | metadata)
        for name, values in weights.items():
            writer.add_tensor(name, values)
        tiny_gguf.finish(writer)
        layers = (COMMON | metadata)["block_count"]
        return Tiny(path=path, layers=layers, has_head="output.weight" in weights)

    def answers(
        self,
        tiny: Tiny,
        requests: Sequence[dict[str, Any]],
        *workers: int,
        settings: dict[str, Setting] | None = None,
        poison: bool = True,
        in_main_memory: str = "",
        lacks: str | None = None,
        slots: int = 1,
        **fields: Any,
    ) -> Answers:
        """Alone, or with so many layers on each worker, the rest on the host. `poison`: see `WorkerSpec`.

        `in_main_memory`: a pattern for weights that workers keep there. `lacks`: an op that they do not know,
        so that they are asked about all others.
        """
        trace = self._folder / "trace"
        trace.unlink(missing_ok=True)
        spec = EngineSpec(
            model=str(tiny.path),
            alias=tiny.path.stem,
            context=COMMON["context_length"],
            slots=slots,
            threads=1,
            key=KEY,
            libraries={name: str(path) for name, path in self._libraries.items()},
            files=(str(tiny.path),),
            fingerprint=tiny.path.stem,
            head_tied=not tiny.has_head,
            trace=str(trace) if workers else None,
            # Alone the engine saves states, which cuts prompts in other places.
            settings={"n_ctx_checkpoints": 0} | (settings or {}),
            **fields,
        )
        job = {"kind": "answer", "spec": asdict(spec), "workers": workers, "poison": poison}
        job |= {"in_main_memory": in_main_memory, "lacks": lacks}
        answer = self.ask({**job, "requests": list(requests)})
        return Answers(
            said=tuple(_said(each) for each in answer["answers"]),
            costs=tuple(_costs(trace)) if workers else (),
            frames=_frames(trace) if workers else Counter(),
            declined=answer["declined"],
            waits=_waits(trace) if workers else (0, 0),
        )


@contextmanager
def engine_lab(libraries: dict[str, Path], folder: Path) -> Iterator[EngineLab]:
    needed: dict[str, Path] = {name: libraries[name] for name in ("mesh", "cpu") if name in libraries}
    command = [sys.executable, "-m", "tests.support.forked_engine"]
    # Each engine has another word for where an image is in a text, unless it is told one.
    environment = os.environ | {"LLAMA_MEDIA_MARKER": IMAGE}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps({name: str(path) for name, path in needed.items()}) + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["ready"]
        try:
            yield EngineLab(child, needed, folder)
        finally:
            child.stdin.close()
            child.wait(timeout=30)


def completion(
    prompt: Sequence[int] | Sequence[list[int]] | dict[str, Any], tokens: int, **options: Any
) -> dict[str, Any]:
    once = {"temperature": 0, "n_probs": 20, "return_tokens": True, "ignore_eos": True, "cache_prompt": False}
    return {
        "path": "/completion",
        "body": once | {"prompt": prompt, "n_predict": tokens} | options,
    }


def seeing(text: str, images: Sequence[bytes], tokens: int, **options: Any) -> dict[str, Any]:
    """A text with `IMAGE` for each of the images in it."""
    data = [base64.b64encode(image).decode() for image in images]
    return completion({"prompt_string": text, "multimodal_data": data}, tokens, **options)


def embedding(prompt: Sequence[int]) -> dict[str, Any]:
    return {"path": "/embedding", "body": {"content": list(prompt)}}


def _head(path: Path, architecture: str, metadata: Metadata) -> Any:
    writer: Any = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    for key, value in metadata.items():
        name = key if key.startswith(_GLOBAL_KEYS) else f"{architecture}.{key}"
        tiny_gguf.add_value(writer, name, value)
    tiny_gguf.add_byte_tokenizer(writer, VOCABULARY)
    writer.add_chat_template(tiny_gguf.CHAT_TEMPLATE)
    return writer


def random_values(name: str, shape: tuple[int, ...]) -> Any:
    if "tid2eid" in name:  # experts by token, each at most once
        tokens, used = shape
        return (np.arange(tokens)[:, None] + np.arange(used)).astype(np.int32) % MIXTURE["expert_count"]
    values = tiny_gguf.values(name, shape, 0)
    # Logits of spread 1 come in near-ties.
    return values * np.float32(4) if name == "output.weight" else values


def _said(answer: dict[str, Any]) -> Any:
    if answer["status"] != 200:
        return answer
    body = answer["body"]
    if isinstance(body, list):
        return [_said({**answer, "body": each}) for each in body]
    if "tokens" not in body:
        return body
    chances = [
        [(top["id"], top["logprob"]) for top in place["top_logprobs"]]
        for place in body.get("completion_probabilities", ())
    ]
    return body["tokens"], chances, body["timings"]["cache_n"]


def _is_complaint(line: str) -> bool:
    return any(word in line for word in ("error", "Error", "ASSERT", "Traceback", "refuse"))


def _frames(trace: Path) -> Counter[str]:
    frames = map(json.loads, trace.read_text().splitlines())
    return Counter(frame["frame"] for frame in frames if frame.get("sent"))


def _waits(trace: Path) -> tuple[int, int]:
    """Until weights are attached, and until a graph is sent. A question after an answer begins another."""
    waits, has_waited = [0], True
    for line in trace.read_text().splitlines():
        frame = json.loads(line)["frame"]
        if frame == "GRAPH":
            break
        if frame == "ATTACH" and len(waits) == 1:
            waits.append(0)
            has_waited = True
        elif frame == "SUPPORTS":
            waits[-1] += has_waited
            has_waited = False
        elif frame == "supports":
            has_waited = True
    of_weights, of_graphs = waits
    return of_weights, of_graphs


def _costs(trace: Path) -> Iterator[Cost]:
    """By the frames on the engine's links, request by request."""
    clock = _Clock()
    with trace.open() as lines:
        for line in lines:
            clock.take(json.loads(line))
    yield from clock.costs


class _Clock:
    """Counts trips instead of seconds: a frame arrives one later than it was sent, and after those before."""

    def __init__(self) -> None:
        self.costs: list[Cost] = []
        self._host = 0
        self._workers: dict[str, int] = {}
        self._pushed: list[int] = []
        self._began = 0

    def take(self, frame: dict[str, Any]) -> None:
        if frame["frame"] == "request":
            self.costs.append(Cost(hops=0, runs={}))
            self._began = self._host
        elif frame["sent"]:
            self._send(frame["link"], frame["frame"])
        elif frame["frame"] in ("data", "supports", "size"):  # somebody has waited for it
            self._host = max(self._host, self._workers[frame["link"]] + 1)
            self._note()

    def _send(self, link: str, frame: str) -> None:
        self._workers[link] = max(self._workers.get(link, 0), self._host + 1)
        if frame == "PUSH":
            self._pushed.append(self._workers[link] + 1)
        elif frame == "RECV":
            self._workers[link] = max(self._workers[link], self._pushed.pop(0))
        elif frame == "RUN":
            self._note(link)

    def _note(self, link: str | None = None) -> None:
        if self.costs:
            runs = self.costs[-1].runs
            if link is not None:
                runs = runs | {link: runs.get(link, 0) + 1}
            self.costs[-1] = Cost(hops=self._host - self._began, runs=runs)
