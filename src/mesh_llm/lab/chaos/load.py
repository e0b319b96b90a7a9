"""Clients of a mesh: each asks one question after the other, and writes down what it heard, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from mesh_llm.lab.chaos.mesh import CLIENT, ChaosMesh
from mesh_llm.lab.chaos.questions import ChaosQuestion, is_same
from mesh_llm.lab.chaos.records import ChaosLog
from mesh_llm.lab.chaos.schedule import NODES

PATIENCE_S = 60
"""That a client is willing to wait for the mesh to serve (`Prefer: wait`)."""
LIMIT_S = 200.0
"""Without a word, more than any answer may take: who hears nothing by then has been forgotten."""
THINK_S = (0.05, 1.0)
AT_NODES = 0.35
"""Of the questions go to a node; the others to the lite client."""
LEAVES = 0.1
"""Of the clients leave in the middle of an answer."""


@dataclass(slots=True)
class Heard:
    """One answer, as a client heard it. Times are those of the run's log."""

    began_s: float
    ended_s: float = 0.0
    outcome: str = ""
    """`done`, `left`, `refused` (with a status, before any word), `error` (after words) or `broken`."""
    status: int = 0
    pieces: list[str] = field(default_factory=list)
    pieces_s: list[float] = field(default_factory=list)
    seams: list[int] = field(default_factory=list)
    """How many pieces had come each time that another engine went on."""
    resumed: int = 0
    """As the head of the answer says: engines before the one that began it."""
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ClientLoad:
    """Several clients, until told to stop."""

    def __init__(self, mesh: ChaosMesh, log: ChaosLog, questions: Mapping[str, ChaosQuestion]) -> None:
        self._mesh = mesh
        self._log = log
        self._questions = dict(questions)
        self._stopping = asyncio.Event()
        self._count = 0

    async def references(self) -> list[str]:
        """The answers that nothing happens to. Questions that this model has no answer to are left out."""
        missing = []
        for name, question in list(self._questions.items()):
            heard = await self.ask(CLIENT, question)
            if heard.outcome != "done":
                missing.append(f"{question.form}: {heard.status} {heard.error[:80]}")
                del self._questions[name]
                continue
            self._log.write(
                "reference", question=name, text=heard.text, took_s=round(heard.ended_s - heard.began_s, 3)
            )
        return missing

    def stop(self) -> None:
        """Nobody asks anything more; answers under way are heard out."""
        self._stopping.set()

    async def run(self, number: int, seed: int) -> None:
        """One client."""
        random = Random(f"{seed} {number}")
        while not self._stopping.is_set():
            name = random.choice(sorted(self._questions))
            at_node = random.random() < AT_NODES
            leaves_at = random.randint(1, 20) if random.random() < LEAVES else None
            via = self._via(random, at_node)
            heard = await self.ask(via, self._questions[name], leaves_at=leaves_at)
            self._write(number, via, name, heard)
            await asyncio.sleep(random.uniform(*THINK_S))

    def _via(self, random: Random, at_node: bool) -> str:
        wanted = random.choice(NODES)
        member = self._mesh.members.get(wanted)
        return wanted if at_node and member is not None and member.is_ready else CLIENT

    def _write(self, number: int, via: str, name: str, heard: Heard) -> None:
        self._count += 1
        self._log.write(
            "answer",
            at=heard.began_s,
            number=self._count,
            client=number,
            via=via,
            question=name,
            form=self._questions[name].form,
            ended=heard.ended_s,
            outcome=heard.outcome,
            status=heard.status,
            text=heard.text,
            pieces=heard.pieces_s,
            seams=heard.seams,
            resumed=heard.resumed,
            error=heard.error,
        )

    async def check(self) -> list[str]:
        """One question of each kind through the client; what was wrong."""
        wrong = []
        expected = {
            each["question"]: each["text"] for each in self._log.records if each["kind"] == "reference"
        }
        for name, question in self._questions.items():
            heard = await self.ask(CLIENT, question)
            if heard.outcome != "done" or not is_same(question.form, heard.text, expected[name]):
                wrong.append(f"{name}: {heard.outcome} {heard.error or heard.text[:80]}")
        return wrong

    async def ask(self, via: str, question: ChaosQuestion, *, leaves_at: int | None = None) -> Heard:
        heard = Heard(began_s=self._log.now_s())
        member = self._mesh.members.get(via)
        try:
            if member is None:
                raise aiohttp.ClientConnectionError(f"{via} is not there")
            async with asyncio.timeout(LIMIT_S) as limit:
                await self._hear(member.url, question, heard, leaves_at, limit)
        except TimeoutError:
            heard.outcome, heard.error = "silent", f"nothing more within {LIMIT_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            # After an error in a stream, that it breaks off is meant so: nobody is to take it for whole.
            heard.outcome, heard.error = ("error", heard.error) if heard.error else ("broken", repr(error))
        heard.ended_s = self._log.now_s()
        return heard

    async def _hear(
        self,
        url: str,
        question: ChaosQuestion,
        heard: Heard,
        leaves_at: int | None,
        limit: asyncio.Timeout,
    ) -> None:
        headers = {"Prefer": f"wait={PATIENCE_S}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url + question.path, json=question.body, headers=headers) as answer,
        ):
            heard.status = answer.status
            heard.resumed = int(answer.headers.get("x-mesh-llm-resumed", 0))
            if answer.status != 200:
                heard.outcome, heard.error = "refused", (await answer.text())[:300]
            elif not question.streams:
                heard.pieces = [_whole_text(await answer.json())]
                heard.pieces_s, heard.outcome = [self._log.now_s()], "done"
            else:
                await self._hear_stream(answer, heard, leaves_at, limit)

    async def _hear_stream(
        self,
        answer: aiohttp.ClientResponse,
        heard: Heard,
        leaves_at: int | None,
        limit: asyncio.Timeout,
    ) -> None:
        heard.outcome = "broken"
        async for line in answer.content:
            if line.startswith(b": mesh-llm resumed"):
                heard.seams.append(len(heard.pieces))
            elif line.startswith(b"data: [DONE]"):
                heard.outcome = "error" if heard.error else "done"
            elif line.startswith(b"data: {"):
                data = json.loads(line[6:])
                if "error" in data:
                    heard.outcome, heard.error = "error", json.dumps(data["error"])[:300]
                if piece := _piece(data):
                    heard.pieces.append(piece)
                    heard.pieces_s.append(self._log.now_s())
                    limit.reschedule(asyncio.get_running_loop().time() + LIMIT_S)
                if leaves_at is not None and len(heard.pieces) >= leaves_at:
                    heard.outcome = "left"
                    return


def _piece(data: dict[str, Any]) -> str:
    found = ""
    for choice in data.get("choices", ()):
        delta = choice.get("delta") or {}
        found += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            found += (function.get("name") or "") + (function.get("arguments") or "")
    return found


def _whole_text(document: dict[str, Any]) -> str:
    """What has to be the same each time: no ids and no times."""
    if "choices" in document:
        return str(document["choices"][0]["message"]["content"])
    if "data" in document:
        return json.dumps([each["embedding"] for each in document["data"]])
    return json.dumps(document.get("tokens"))
