"""Weights on workers: read ahead, kept, dropped; what crosses links, and what the host leaves alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mesh_llm.engine.worker_process import WorkerProcess
from mesh_llm.errors import EngineFailed
from mesh_llm.lab.split import SplitPlan, worker_spec
from mesh_llm.types import StageCounters
from tests.support import tiny_gguf
from tests.support.sampling import sampled
from tests.support.split import Client, client, lenders, over, plan_for, token_ids, until

LAYERS = 6
ASKED = {"n_predict": 20, "cache_prompt": False, "ignore_eos": True}
REPORTED_S = 30.0
"""Stages are reported about once a second, where nothing else wants the machine."""


@pytest.fixture
async def plan(libraries: dict[str, Path], tmp_path: Path) -> SplitPlan:
    return await plan_for(tiny_gguf.write(tmp_path / "model.gguf", "llama", layers=LAYERS), libraries)


def layer_bytes(plan: SplitPlan) -> int:
    return sum(layer.weight_bytes for layer in plan.facts.layers)


async def stages(asking: Client, *, after: int = 0) -> dict[str, StageCounters]:
    """What the workers have done, once all of them have done more than `after` runs and are idle."""
    supervisor = asking.engine.supervisor

    def settled() -> bool:
        found = supervisor.report.stages.values()
        return bool(found) and all(stage.runs > after and not stage.in_flight for stage in found)

    await until(settled, within_s=REPORTED_S, what="a report of the stages")
    return supervisor.report.stages


async def answered(
    asking: Client, prompt: list[int], runs: int = ASKED["n_predict"]
) -> tuple[dict[str, StageCounters], dict[str, StageCounters]]:
    """What the workers have done before an answer, and with it: so many runs each, at least."""
    before = await stages(asking)
    await asking.complete(prompt, **ASKED)
    supervisor = asking.engine.supervisor

    def is_whole() -> bool:
        # A report may have come in the middle of it, when some stages had done more of it than others.
        found = supervisor.report.stages
        return all(found[name].runs >= old.runs + runs for name, old in before.items()) and not any(
            stage.in_flight for stage in found.values()
        )

    await until(is_whole, within_s=REPORTED_S, what=f"a report of {runs} runs more")
    return before, supervisor.report.stages


async def worked(
    asking: Client, prompt: list[int], runs: int = ASKED["n_predict"]
) -> dict[str, StageCounters]:
    """What one answer took, stage by stage."""
    before, after = await answered(asking, prompt, runs)
    return {
        name: StageCounters(
            **{
                field: getattr(stage, field) - getattr(old, field)
                for field in StageCounters.__dataclass_fields__
            }
        )
        for (name, stage), old in zip(after.items(), before.values(), strict=True)
    }


ARCHITECTURES = sampled(tiny_gguf.ARCHITECTURES, "llama", "gemma3", "lfm2")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_one_run_per_stage_and_token(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """More would mean that something goes back to the host in between: a hop for every token."""
    model = tiny_gguf.write(tmp_path / "model.gguf", architecture, layers=LAYERS)
    plan = await plan_for(model, libraries)
    async with client(over(plan, 2, 2)) as asking:
        for stage in (await worked(asking, token_ids(5))).values():
            assert stage.runs == ASKED["n_predict"]
            assert stage.compute_ns > 0
            assert stage.weight_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_one_run_per_stage_and_micro_batch(
    architecture: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Most micro-batches of a prompt have no outputs; their last layer stays where it is all the same."""
    model = tiny_gguf.write(tmp_path / "model.gguf", architecture, layers=LAYERS)
    plan = await plan_for(model, libraries, settings={"n_batch": 64, "n_ubatch": 32})
    async with client(over(plan, 2, 2)) as asking:
        runs = 2 + 2 + 1 + ASKED["n_predict"] - 1
        for stage in (await worked(asking, token_ids(64 + 64 + 20), runs)).values():
            assert stage.runs == runs


async def test_bytes_per_token(smollm2: Path, libraries: dict[str, Path]) -> None:
    """An activation and little else reaches a worker for each token, whatever the context."""
    plan = await plan_for(smollm2, libraries, context=4096)
    activation = 4 * plan.facts.hidden
    async with client(over(plan, 10, 10, 10)) as asking:
        await worked(asking, token_ids(5))
        for name, stage in (await worked(asking, token_ids(5))).items():
            # The prompt is five tokens more than the answer's.
            tokens = stage.runs + 4
            assert stage.worker_in_bytes <= tokens * (activation + 1024), name
            assert stage.worker_out_bytes <= tokens * (activation + 1024), name


@pytest.mark.parametrize("head_on_worker", [False, True])
async def test_what_comes_back_is_logits_or_an_activation(head_on_worker: bool, plan: SplitPlan) -> None:
    logits = 4 * plan.facts.vocabulary
    async with client(over(plan, LAYERS, head_on_worker=head_on_worker)) as asking:
        (stage,) = (await worked(asking, token_ids(5))).values()
        assert (stage.received_bytes >= stage.runs * logits) is head_on_worker


async def test_weights_sent_are_counted(plan: SplitPlan) -> None:
    layers = layer_bytes(plan)
    async with client(over(plan, LAYERS, by_reference=False)) as asking:
        await asking.complete(token_ids(5), **ASKED)
        (stage,) = (await stages(asking)).values()
        assert layers <= stage.weight_bytes <= layers + plan.facts.head_bytes + 4096
        assert stage.sent_bytes > stage.weight_bytes


async def test_a_trace_names_every_frame(plan: SplitPlan, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with client(over(plan, 3, 3, trace=trace)) as asking:
        _, found = await answered(asking, token_ids(5))
        runs = {name: stage.runs for name, stage in found.items()}
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for link, count in runs.items():
        assert (
            sum(line["link"] == link and line["frame"] == "RUN" and line["sent"] for line in lines) == count
        )
        assert sum(line["link"] == link and line["frame"] == "done" for line in lines) == count
    assert not [line for line in lines if line["frame"] == "?"]
    worker = [json.loads(line) for line in Path(f"{trace}.0").read_text().splitlines()]
    assert [line["frame"] for line in worker][:2] == ["HELLO", "hello"]
    assert sum(line["frame"] == "DELIVER" and line["sent"] for line in worker) == runs["MESH0"]
    assert trace.stat().st_mode & 0o077 == 0


async def test_prepared_ahead_and_unloaded(plan: SplitPlan, tmp_path: Path) -> None:
    fingerprint = plan.facts.fingerprint
    seen: list[tuple[int, int]] = []
    async with lenders(worker_spec(plan, tmp_path / "w.sock")) as (worker,):
        held = await worker.prepare(fingerprint, (0, LAYERS), lambda *sizes: seen.append(sizes))
        assert held == layer_bytes(plan)
        assert seen == sorted(seen)
        assert seen[-1] == (held, held)
        async with client(over(plan, LAYERS), [worker]) as asking:
            await asking.complete(token_ids(5), **ASKED)
            assert await worker.unload(fingerprint) >= held  # in use
        assert await worker.unload(fingerprint) == 0
        with pytest.raises(EngineFailed, match=r"^the worker refused: it has no copy of the model nothing$"):
            await worker.prepare("nothing", (0, 1))


async def test_no_room_to_prepare(plan: SplitPlan, tmp_path: Path) -> None:
    spec = replace(worker_spec(plan, tmp_path / "w.sock"), quota_bytes=1000)
    async with lenders(spec) as (worker,):
        with pytest.raises(EngineFailed, match="it has no room for"):
            await worker.prepare(plan.facts.fingerprint, (0, LAYERS))


async def test_models_take_turns_where_there_is_room_for_one(
    plan: SplitPlan, libraries: dict[str, Path], tmp_path: Path
) -> None:
    """Weights that nobody uses make room for others, and are read again when they are wanted."""
    other = await plan_for(tiny_gguf.write(tmp_path / "other.gguf", "qwen3", layers=LAYERS), libraries)
    files = [str(file) for file in other.facts.files]
    one_model = int(1.2 * max(layer_bytes(plan), layer_bytes(other)))
    spec = replace(worker_spec(plan, tmp_path / "w.sock"), quota_bytes=one_model + (4 << 20))
    async with lenders(spec) as (worker,):
        await worker.add_model(other.facts.fingerprint, files)
        answers = [await _answers(each, worker) for each in (plan, other, plan, other)]
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0] != answers[1]


async def _answers(plan: SplitPlan, worker: WorkerProcess) -> tuple[int, ...]:
    async with client(over(plan, LAYERS), [worker]) as asking:
        return (await asking.complete(token_ids(9), **ASKED)).tokens


async def test_the_host_leaves_other_layers_unread(smollm2: Path, libraries: dict[str, Path]) -> None:
    plan = await plan_for(smollm2, libraries)
    async with client(plan) as asking:
        await asking.complete(token_ids(5), **ASKED)
        whole = _file_bytes(asking, smollm2)
    async with client(over(plan, 15, 15)) as asking:
        await asking.complete(token_ids(5), **ASKED)
        part = _file_bytes(asking, smollm2)
    elsewhere = layer_bytes(plan)
    assert whole.mapped > 0.9 * smollm2.stat().st_size
    # The kernel maps a little around what is touched.
    assert part.mapped < smollm2.stat().st_size - 0.9 * elsewhere
    # Nor does it read them in other ways.
    assert part.read < whole.read + elsewhere / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBytes:
    """What an engine has of a model's file: mapped in its memory, and read by calls (of all files)."""

    mapped: int
    read: int


def _file_bytes(asking: Client, model: Path) -> FileBytes:
    process = Path(f"/proc/{asking.engine.supervisor.report.pid}")
    mapped, inside = 0, False
    for line in (process / "smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            inside = rest.endswith(str(model))
        elif inside and name == "Rss:":
            mapped += 1024 * int(rest.split()[0])
    read = next(line for line in (process / "io").read_text().splitlines() if line.startswith("rchar"))
    return FileBytes(mapped=mapped, read=int(read.split()[1]))
