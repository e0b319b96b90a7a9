"""What a split engine does when a worker dies, stalls or refuses, and what a worker does with bad clients.

A request fails with an error, no token follows a failure, the engine lives
and says which worker it was; a worker survives every client and frees what a
dead one held.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mesh_llm.defaults import ENGINE_VERSION
from mesh_llm.engine.supervisor import EngineState
from mesh_llm.engine.worker_process import WorkerProcess
from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import SplitPlan, split_engine, worker_spec
from tests.support import tiny_gguf
from tests.support.relayed_worker import HEADER, RelayedWorker, read
from tests.support.sampling import sampled
from tests.support.split import Client, client, lenders, over, plan_for, token_ids, until

FAST_S = 20.0
"""Within which a failure has to show, on a machine that is busy with something else."""
FAR_S = 0.025
"""One way between two of them: an answer takes its time, and whoever stands still is in the middle of it."""
LAYERS = (2, 2, 2)
PROMPT = token_ids(300)
WHOLE_CHARACTERS = [[3 + byte, False] for byte in range(0x80, 0x100)]
"""A token that is half a character would be kept back from a stream: these are never chosen."""
LONG: dict[str, Any] = {
    "n_predict": 150,
    "ignore_eos": True,
    "cache_prompt": False,
    "logit_bias": WHOLE_CHARACTERS,
}
SHORT: dict[str, Any] = {"n_predict": 8, "ignore_eos": True}
CLOSED = r"(the other side closed the link|the link is lost: (Connection reset by peer|Broken pipe))"

HELLO, RUN, ERROR = 1, 9, 0xFF
GREETING = struct.Struct("<16s64s2I32s4I")
MAGIC, PROTOCOL = 0x4853454D, 1
OTHER_ENGINE = "2020.1.1"


@pytest.fixture
async def plan(libraries: dict[str, Path], tmp_path: Path) -> SplitPlan:
    model = tiny_gguf.write(tmp_path / "model.gguf", "llama", layers=sum(LAYERS))
    return await plan_for(model, libraries, settings={"n_batch": 64, "n_ubatch": 32, "n_ctx_checkpoints": 0})


def kill(pid: int | None, number: signal.Signals = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, number)


async def assert_useless_but_alive(asking: Client, name: str) -> None:
    """The engine over a lost worker: it runs, tells which one, and fails requests at once."""
    supervisor = asking.engine.supervisor
    await until(lambda: name in supervisor.report.failed_links, within_s=FAST_S, what=f"{name} is reported")
    assert re.fullmatch(f"{name}: {CLOSED}", supervisor.report.failed_links[name])
    for _ in range(2):
        started = time.monotonic()
        status, document = await asking.post("/completion", {"prompt": PROMPT, "n_predict": 4})
        assert status == 500, document
        assert "content" not in document
        assert time.monotonic() - started < FAST_S
    assert supervisor.report.state is EngineState.READY
    assert supervisor.report.pid is not None
    assert psutil.pid_exists(supervisor.report.pid)


# -- a worker dies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", sampled(range(len(LAYERS)), 0))
async def test_killed_while_nobody_asks(victim: int, plan: SplitPlan) -> None:
    async with client(over(plan, *LAYERS)) as asking:
        await asking.complete(PROMPT, n_predict=2)
        kill(asking.engine.workers[victim].child.pid)
        await assert_useless_but_alive(asking, f"MESH{victim}")


@pytest.mark.parametrize("push", sampled([True, False], True))
@pytest.mark.parametrize("victim", sampled(range(len(LAYERS)), 0))
async def test_killed_while_a_prompt_isread(victim: int, push: bool, plan: SplitPlan) -> None:
    async with client(over(plan, *LAYERS, push=push)) as asking:
        pid = asking.engine.workers[victim].child.pid
        kill(pid, signal.SIGSTOP)  # whatever is sent now stays in the middle of the prompt
        events: list[dict[str, Any]] = []
        async for event in asking.events(PROMPT, return_progress=True, **LONG):
            if not events:
                kill(pid)
                killed = time.monotonic()
            events.append(event)
        assert time.monotonic() - killed < FAST_S
        assert "prompt_progress" in events[0]
        assert events[-1]["error"]["code"] == 500
        assert not [event for event in events if event.get("tokens_predicted")]
        await assert_useless_but_alive(asking, f"MESH{victim}")


@pytest.mark.parametrize("push", sampled([True, False], True))
@pytest.mark.parametrize("victim", sampled(range(len(LAYERS)), 0))
async def test_killed_while_it_answers(victim: int, push: bool, plan: SplitPlan) -> None:
    undisturbed = await _ask(plan, **LONG)
    async with client(over(plan, *LAYERS, push=push, delay_s=FAR_S)) as asking:
        tokens: list[int] = []
        error: dict[str, Any] | None = None
        killed: float | None = None
        async for event in asking.events(PROMPT, **LONG):
            assert error is None, "something follows the error"
            if error := event.get("error"):
                continue
            tokens += event["tokens"]
            if len(tokens) >= 5 and killed is None:
                kill(asking.engine.workers[victim].child.pid)
                killed = time.monotonic()
        assert killed is not None
        assert time.monotonic() - killed < FAST_S
        assert error is not None
        assert error["code"] == 500
        assert 5 <= len(tokens) < len(undisturbed)
        assert tuple(tokens) == undisturbed[: len(tokens)]
        await assert_useless_but_alive(asking, f"MESH{victim}")


class CutWorker(RelayedWorker):
    """A worker whose link ends after so many commands."""

    def __init__(self, worker: WorkerProcess, commands: int) -> None:
        super().__init__(worker)
        self.passed = 0
        self._commands = commands

    def pass_commands(self, host: socket.socket, worker: socket.socket) -> None:
        while self.passed < self._commands and (head := read(host, HEADER.size)):
            _, _, size = HEADER.unpack(head)
            worker.sendall(head + read(host, size))
            self.passed += 1


async def _outcome(plan: SplitPlan, worker: WorkerProcess) -> str | int:
    """Why an engine did not start, or how it answers one request."""
    body = {"prompt": token_ids(40), "n_predict": 2, "ignore_eos": True}
    try:
        async with client(plan, [worker]) as asking:
            status, _ = await asking.post("/completion", body)
            return status
    except EngineFailed as error:
        return error.message


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
async def test_cut_after_so_many_commands(step: int, plan: SplitPlan) -> None:
    """While the model loads the engine ends by itself, with the reason; later the request fails."""
    outcomes: list[str | int] = []
    async with lenders(*_specs(plan, 1)) as (worker,):
        for commands in range(0, 200, step):
            cut = CutWorker(worker, commands)
            started = time.monotonic()
            outcomes.append(await _outcome(over(plan, 6), cut))
            if outcomes[-1] == 200:
                break
            assert cut.passed == commands
            assert time.monotonic() - started < FAST_S
    reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(reasons) > 1
    for reason in reasons:
        assert re.fullmatch(rf"the engine (ended: |cannot use its workers \()MESH0: {CLOSED}\)?", reason)
    # No request was answered in part: each failed, until there were enough commands for a whole one.
    statuses = outcomes[len(reasons) :]
    assert statuses == [500] * (len(statuses) - 1) + [200]
    assert len(statuses) > 2


@pytest.mark.full
async def test_stopped_and_continued(plan: SplitPlan) -> None:
    few = LONG | {"n_predict": 50}
    undisturbed = await _ask(plan, **few)
    async with client(over(plan, *LAYERS, delay_s=FAR_S)) as asking:
        for worker in asking.engine.workers:
            stream = asking.events(PROMPT, **few)
            tokens = (await anext(stream))["tokens"]
            kill(worker.child.pid, signal.SIGSTOP)
            following = asyncio.ensure_future(anext(stream))
            while not (await asyncio.wait([following], timeout=1.0))[1]:
                tokens += following.result()["tokens"]
                following = asyncio.ensure_future(anext(stream))
            assert len(tokens) < len(undisturbed), "it went on without a worker"
            kill(worker.child.pid, signal.SIGCONT)
            tokens += (await following)["tokens"]
            async for event in stream:
                assert "error" not in event
                tokens += event["tokens"]
            assert tuple(tokens) == undisturbed
        assert asking.engine.supervisor.report.failed_links == {}


# -- a worker refuses -----------------------------------------------------------------------------------


def _specs(plan: SplitPlan, count: int, **changes: Any) -> list[Any]:
    folder = plan.facts.files[0].parent
    return [replace(worker_spec(plan, folder / f"{index}.sock"), **changes) for index in range(count)]


async def _start(plan: SplitPlan, *workers: WorkerProcess) -> None:
    async with client(plan, workers):
        pass


async def _refusal(plan: SplitPlan, **changes: Any) -> str:
    """Why an engine did not start over a worker with such a spec. It ended by itself, or the sentence
    would say by which signal; and the worker is none the worse for it."""
    async with lenders(*_specs(plan, 1, **changes)) as (worker,):
        with pytest.raises(EngineFailed) as caught:
            await _start(over(plan, 6), worker)
        assert psutil.pid_exists(worker.child.pid)
    return caught.value.message


async def test_refused_without_the_model(plan: SplitPlan) -> None:
    fingerprint = plan.facts.fingerprint
    assert await _refusal(plan, models={}) == (
        f"the engine cannot use its workers (MESH0: it has no copy of the model {fingerprint})"
    )


@pytest.mark.parametrize(
    ("fields", "flaw"),
    [
        ({"layers": 4}, "has no tensor blk.4.attn_norm.weight"),
        ({"layers": 6, "quantisation": "Q8_0"}, "has another blk.0.attn_q.weight"),
        ({"layers": 6, "feed_forward": 64}, "has another blk.0.ffn_gate.weight"),
    ],
    ids=["layers", "type", "shape"],
)
async def test_refused_with_another_file(
    fields: dict[str, Any], flaw: str, plan: SplitPlan, tmp_path: Path
) -> None:
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama", **fields)
    message = await _refusal(plan, models={plan.facts.fingerprint: [str(other)]})
    assert message == f"the engine cannot use its workers (MESH0: its copy of the model {flaw})"


@pytest.mark.parametrize("quota_bytes", sampled([0, 100_000, 850_000], 850_000))
async def test_refused_for_want_of_room(quota_bytes: int, plan: SplitPlan) -> None:
    """Too little for the cache, or enough for it and not for computing."""
    message = await _refusal(plan, quota_bytes=quota_bytes)
    assert message.startswith("the engine cannot use its workers (MESH0: it has no room for ")
    assert message.endswith(f" ({quota_bytes / 1e6:.1f} MB were free for this engine))")


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (signal.SIGKILL, "the worker was killed (SIGKILL)"),
        (signal.SIGSEGV, "the worker crashed (SIGSEGV)"),
        (signal.SIGSTOP, "the worker did not answer for 6 s, and was ended"),
    ],
)
async def test_the_cause_of_a_workers_death(number: signal.Signals, sentence: str, plan: SplitPlan) -> None:
    async with lenders(*_specs(plan, 1)) as (worker,):
        os.kill(worker.child.pid, number)
        assert worker.death is not None
        async with asyncio.timeout(FAST_S):
            assert await worker.death == sentence


async def test_a_worker_that_dies_before_it_reads_a_request(tmp_path: Path) -> None:
    """Its connections are reset then, not ended."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "worker.sock"))
        door.listen()
        anything: Any = None
        asked = asyncio.create_task(WorkerProcess(anything, tmp_path / "worker.sock").unload("model"))
        taken, _ = await asyncio.to_thread(door.accept)
        await asyncio.to_thread(taken.recv, 1, socket.MSG_PEEK)
        taken.close()
        with pytest.raises(EngineFailed, match="the worker ended in the middle of an answer"):
            await asked


class FakeWorker(WorkerProcess):
    """Greets as an engine of another version would."""

    def __init__(self) -> None:
        self._answering: asyncio.Task[None] | None = None

    async def serve(self, link: socket.socket) -> None:
        self._answering = asyncio.create_task(asyncio.to_thread(self._answer, link))

    @staticmethod
    def _answer(link: socket.socket) -> None:
        with link:
            greeting = read(link, HEADER.size + GREETING.size)
            _, ticket, _ = HEADER.unpack(greeting[: HEADER.size])
            answer = _greeting(OTHER_ENGINE) + bytes(8 + 24 + 192)
            link.sendall(HEADER.pack(0x80 | HELLO, ticket, len(answer)) + answer)
            link.recv(1)


async def test_a_worker_with_another_engine(plan: SplitPlan) -> None:
    with pytest.raises(EngineFailed) as caught:
        async with split_engine(over(plan, 6), [FakeWorker()]):
            pass
    assert caught.value.message == (
        f"the engine ended: MESH0: it runs engine {OTHER_ENGINE}, this machine {ENGINE_VERSION}; "
        "links need the same one"
    )


# -- bad clients ----------------------------------------------------------------------------------------


def _greeting(engine: str) -> bytes:
    return GREETING.pack(bytes(16), bytes(64), MAGIC, PROTOCOL, engine.encode(), 0, 0, 0, 0)


async def _say(worker: WorkerProcess, data: bytes, *, hang_up: bool = False) -> bytes:
    """What a worker answers to a client that sends `data`, until it closes the link."""
    here, there = socket.socketpair()
    here.settimeout(FAST_S)
    await worker.serve(there)

    def converse() -> bytes:
        with here:
            here.sendall(data)
            if hang_up:
                here.shutdown(socket.SHUT_WR)
            return read(here, 1 << 20)

    return await asyncio.to_thread(converse)


def _error(answer: bytes) -> str:
    kind, _, size = HEADER.unpack(answer[: HEADER.size])
    assert kind == ERROR
    assert len(answer) == HEADER.size + size
    return answer[HEADER.size :].decode()


@pytest.fixture
async def worker(plan: SplitPlan) -> AsyncIterator[WorkerProcess]:
    """A worker that is as it was when its clients have left, and still serves."""
    alone = await _ask(plan, **SHORT)
    async with lenders(*_specs(plan, 1)) as (worker_process,):
        process = psutil.Process(worker_process.child.pid)
        threads, descriptors = process.num_threads(), process.num_fds()
        yield worker_process
        await until(
            lambda: (process.num_threads(), process.num_fds()) == (threads, descriptors),
            within_s=FAST_S,
            what="threads and descriptors of its sessions are gone",
        )
        assert await _ask(over(plan, 6), worker_process, **SHORT) == alone


async def _ask(plan: SplitPlan, *workers: WorkerProcess, **options: Any) -> tuple[int, ...]:
    async with client(plan, workers) as asking:
        return (await asking.complete(PROMPT, **options)).tokens


async def test_a_client_with_another_engine(worker: WorkerProcess) -> None:
    hello = _greeting(OTHER_ENGINE)
    answer = await _say(worker, HEADER.pack(HELLO, 1, len(hello)) + hello)
    sentence = f"it runs engine {OTHER_ENGINE}, this worker {ENGINE_VERSION}; links need the same one"
    assert _error(answer) == sentence
    await until(lambda: worker.faults, within_s=FAST_S, what="the worker tells its node")
    assert worker.faults == [sentence]


async def test_clients_that_send_nonsense(worker: WorkerProcess) -> None:
    noise = random.Random(7)
    assert _error(await _say(worker, HEADER.pack(RUN, 1, 0))) == "the first command has to be HELLO"
    assert _error(await _say(worker, HEADER.pack(HELLO, 1, 3) + b"abc")) == "a command is too short"
    assert await _say(worker, HEADER.pack(HELLO, 1, 1 << 60)) == b"", "a frame beyond all limits"
    for cut in (0, 1, HEADER.size, HEADER.size + 10):
        whole = HEADER.pack(HELLO, 1, GREETING.size) + _greeting(ENGINE_VERSION)
        assert await _say(worker, whole[:cut], hang_up=True) == b"", f"cut after {cut} bytes"
    for _ in range(20):
        await _say(worker, noise.randbytes(noise.randrange(1, 5000)), hang_up=True)


# -- several engines, one after the other and at once -----------------------------------------------


async def test_two_engines_on_the_same_workers(plan: SplitPlan) -> None:
    alone = await _ask(plan, **SHORT)
    split = over(plan, 3, 2)
    async with (
        lenders(*_specs(plan, 2)) as workers,
        client(split, workers) as one,
        client(split, workers) as other,
    ):
        options = {"n_predict": 8, "ignore_eos": True, "cache_prompt": False}
        answers = await asyncio.gather(*(each.complete(PROMPT, **options) for each in [one, other] * 5))
        assert {answer.tokens for answer in answers} == {alone}


async def test_an_engine_that_dies_leaves_room_and_weights(plan: SplitPlan, tmp_path: Path) -> None:
    model = tiny_gguf.write(
        tmp_path / "q4.gguf", "llama", layers=6, hidden=256, feed_forward=1024, quantisation="Q4_0"
    )
    facts = (await plan_for(model, plan.libraries)).facts
    plan = over(replace(plan, facts=facts, context=4096), 6)
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    # Room for one engine's cache and computing, not for two.
    [spec] = _specs(plan, 1, models={facts.fingerprint: [str(copy)]}, quota_bytes=12_000_000)
    async with lenders(spec) as (worker,):
        process = psutil.Process(worker.child.pid)
        async with client(plan, [worker]) as first:
            answer = await first.complete(PROMPT, n_predict=8, ignore_eos=True)
            with pytest.raises(EngineFailed, match="MESH0: it has no room for"):
                await _start(plan, worker)
            kill(first.engine.supervisor.report.pid)
            await until(
                lambda: first.engine.supervisor.report.state is EngineState.FAILED,
                within_s=FAST_S,
                what="the death of the engine is known",
            )
        # Whoever comes next finds the weights where they are: the file is not even there any more.
        copy.unlink()
        read_before = process.io_counters().read_chars
        async with _retrying(plan, worker) as second:
            assert await second.complete(PROMPT, n_predict=8, ignore_eos=True) == answer
        read = process.io_counters().read_chars - read_before
        memory = process.memory_full_info()
        print(
            f"worker: {read / 1e6:.2f} MB read for a second engine over {facts.size_bytes / 1e6:.1f} MB of "
            f"weights; {memory.uss / 1e6:.0f} MB of its own, {memory.rss / 1e6:.0f} MB resident"
        )
        assert worker.faults == [] or "link" in worker.faults[0]
    # Only what travelled over the link: activations and masks.
    assert read < facts.size_bytes


@asynccontextmanager
async def _retrying(plan: SplitPlan, worker: WorkerProcess) -> AsyncIterator[Client]:
    """An engine over a worker that may need a moment to notice that its last client is dead."""
    deadline = time.monotonic() + FAST_S
    while True:
        try:
            async with client(plan, [worker]) as asking:
                yield asking
                return
        except EngineFailed as error:
            if "no room" not in error.message or time.monotonic() > deadline:
                raise
