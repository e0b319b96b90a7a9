"""Nodes, stages and plans as people read them: the tables of `status`, `plan` and `demo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mesh_llm import status_schema as schema
from mesh_llm.cli.output import print_table

_SHORT_ID = 6

Names = Mapping[str, str]


def names_of(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Names of nodes by id; one that two nodes have gets the beginning of the id."""
    count = Counter(name for _, name in nodes)
    return {id: name if count[name] == 1 else f"{name} ({id[:_SHORT_ID]})" for id, name in nodes}


def members(mesh: schema.MeshStatus) -> dict[str, str]:
    return names_of([(node.id, node.name) for node in mesh.nodes])


def name(names: Names, id: str | None) -> str:
    return names.get(id, id[:8]) if id else "nobody"


def size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def milliseconds(rtt_ms: float | None) -> str:
    if rtt_ms is None:
        return "?"
    return f"{rtt_ms:.1f} ms" if rtt_ms < 10 else f"{rtt_ms:.0f} ms"


def throughput(bytes_per_s: float) -> str:
    """`850 B/s`, `12 kB/s`, `3.4 MB/s`."""
    if bytes_per_s < 999.5:
        return f"{bytes_per_s:.0f} B/s"
    if bytes_per_s < 999.5e3:
        return f"{bytes_per_s / 1e3:.0f} kB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s < 999.5e6 else f"{bytes_per_s / 1e9:.1f} GB/s"


def predicted_rate(plan: schema.PlanStatus | None) -> str:
    """`22.3 tok/s (17-28)`."""
    if plan is None or not plan.predicted_tok_s:
        return "not known"
    return rate(plan.predicted_tok_s) + _range(plan.predicted_tok_s_low, plan.predicted_tok_s_high)


def predicted_wait(plan: schema.PlanStatus) -> str:
    """`0.81 s (0.61-1.01)`."""
    low, high = plan.predicted_first_token_low_s, plan.predicted_first_token_high_s
    return f"{plan.predicted_first_token_s or 0.0:.2f} s{_range(low, high)}"


def _range(low: float | None, high: float | None) -> str:
    """Where the true one most likely lies; nothing where nobody has said."""
    if low is None or high is None or not high > low:
        return ""
    digits = 0 if low >= 10 else 1 if low >= 1 else 2
    return f" ({low:.{digits}f}-{high:.{digits}f})"


def rate(tok_s: float | None) -> str:
    return f"{tok_s:.1f} tok/s" if tok_s else "not known"


def model(status: schema.ModelStatus) -> str:
    if not status.layers:
        return status.name
    return f"{status.name}, {status.quantisation}, {status.layers} layers"


def context(status: schema.ModelStatus) -> str:
    slots = "1 slot" if status.slots == 1 else f"{status.slots} slots"
    return f"{slots} of {status.context} tokens"


def lanes(plan: schema.PlanStatus, engine: schema.EngineStatus) -> str:
    """`2 engines over the same stages, with 3 and 2 requests`; nothing where there is one, as usual."""
    if plan.lanes <= 1:
        return plan.lanes_reason and f"1: {plan.lanes_reason}"
    serving = [str(lane.requests) for lane in engine.lanes if lane.state == "ready"]
    told = f"{plan.lanes} engines over the same stages"
    told += f", with {' + '.join(serving)} requests" if serving else ""
    return f"{told}; {plan.lanes_reason}" if plan.lanes_reason else told


def speed(plan: schema.PlanStatus | None, engine: schema.EngineStatus) -> str:
    predicted = f"predicted {predicted_rate(plan)}"
    if not engine.decode_tok_s:
        return f"not measured yet, {predicted}"
    return f"{rate(engine.decode_tok_s)}, {predicted}; prompts {engine.prompt_tok_s:.0f} tok/s"


def first_token(status: schema.FirstTokenStatus) -> str:
    """`0.21 s for a prompt of 33 tokens, predicted 0.18 s`."""
    measured, predicted = _seconds(status.measured_s), _seconds(status.predicted_s)
    predicted += _range(status.predicted_low_s, status.predicted_high_s) if predicted else ""
    tokens = status.prompt_tokens
    prompt = f" for a prompt of {tokens} token{'' if tokens == 1 else 's'}" if tokens is not None else ""
    if not measured:
        return f"not measured yet, predicted {predicted}{prompt}" if predicted else "not measured yet"
    return f"{measured}{prompt}" + (f", predicted {predicted}" if predicted else "")


def _seconds(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count:.2f} s" if count < 10 else f"{count:.1f} s"


def layers(stage: schema.PlanStageStatus) -> str:
    return f"{stage.first}-{stage.last - 1}"


def lent_bytes(status: schema.Status) -> int:
    """Memory of this node that serving plans take."""
    return sum(node.lent_bytes for node in status.mesh.nodes if node.id == status.node.id)


def lends(status: schema.Status) -> str:
    """`436 MB of 22.4 GB`, or why nothing."""
    node, lent = status.node, lent_bytes(status)
    memory = sum(each.memory_bytes for each in status.mesh.nodes if each.id == node.id)
    when = f" (--lend {node.lend})" if node.lend not in ("", "always") else ""
    if lent:
        still = f", until others have taken over: {node.paused}" if node.paused else ""
        return f"{size(lent)} of {size(memory)}{still or when}"
    if node.resting:
        return f"nothing: {node.paused or 'the model was unloaded here'}{when}"
    return f"nothing at present, up to {size(memory)}{when}"


def drafts(draft: schema.DraftStatus | None) -> str:
    """`by Qwen2.5-0.5B and the text: 312 of 400 tokens accepted, last 8 at once, 2.10 x as fast`."""
    if draft is None:
        return ""
    by = f"{draft.name} and the text" if draft.name else "the text"
    off = f"; {draft.off}" if draft.off else ""
    if not draft.drafted:
        return f"by {by}, none yet{off}"
    gain = f", {draft.gain:.2f} x as fast" if draft.gain else ""
    right = f"{draft.accepted} of {draft.drafted} tokens accepted"
    return f"by {by}: {right}, last {draft.depth} at once{gain}{off}"


def place(stage: schema.PlanStageStatus, names: Names) -> str:
    """`desk`, or `desk CUDA1` where it lends several devices."""
    return " ".join([name(names, stage.node), *([stage.device] if stage.device else [])])


def share(stage: schema.PlanStageStatus) -> str:
    return f"{100 * stage.share:.0f} %"


def served_models(
    models: Sequence[schema.ServedModelStatus], names: Names
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Rows and headers, with priorities where owners have set any."""
    headers = ("model", "state", "host", "context", "slots", "on")
    return with_priorities(models, [_served_model(each, names) for each in models], headers)


def with_priorities(
    models: Sequence[schema.ServedModelStatus], rows: list[tuple[str, ...]], headers: tuple[str, ...]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """One more column, the second, unless all are 0."""
    if not any(model.priority for model in models):
        return rows, headers
    ranked = [(row[0], str(model.priority), *row[1:]) for model, row in zip(models, rows, strict=True)]
    return ranked, (headers[0], "priority", *headers[1:])


def _served_model(model: schema.ServedModelStatus, names: Names) -> tuple[str, ...]:
    state = f"{model.state}: {model.reason}" if model.reason else model.state
    nodes = dict.fromkeys(node for each in model.replicas for node in each.nodes) or model.nodes
    return (
        f"{model.name} (default)" if model.default else model.name,
        state,
        ", ".join(_host(each, names) for each in model.replicas) or names.get(model.host or "", "–"),
        str(model.context or "–"),
        str(model.slots or "–"),
        ", ".join(names.get(node, node[:8]) for node in nodes) or "–",
    )


def _host(replica: schema.ReplicaStatus, names: Names) -> str:
    """`desk`, or `desk (2 lanes)`."""
    lanes = f" ({replica.lanes} lanes)" if replica.lanes > 1 else ""
    return names.get(replica.host, "–") + lanes


def how_planned(plan: schema.PlanStatus, names: Names) -> str:
    """`split over 3 nodes, hosted by desk`."""
    host = name(names, plan.host)
    count = len({stage.node for stage in plan.stages} | {plan.host})
    match plan.mode:
        case "split":
            return f"split over {count} nodes, hosted by {host}"
        case "solo":
            return f"solo on {host}"
        case _:
            return "waiting"


def print_excluded(plan: schema.PlanStatus, names: Names) -> None:
    if plan.excluded:
        print()
        rows = [(name(names, entry.node), entry.reason) for entry in plan.excluded]
        print_table(rows, headers=("left out", "because"))


def head_note(plan: schema.PlanStatus, names: Names) -> str:
    """Where the parts are that belong to no layer."""
    head = plan.stages[-1].node if plan.head_on_worker else plan.host
    return f"embedding on {name(names, plan.host)}, head on {name(names, head)}"


def layer_rows(plan: schema.PlanStatus, names: Names) -> list[tuple[str, str]]:
    """Which layer is where, with the parts that are none."""
    head = plan.stages[-1].node if plan.head_on_worker and plan.stages else plan.host
    rows = [("embedding", name(names, plan.host))]
    for stage in plan.stages:
        rows += [(str(layer), place(stage, names)) for layer in range(stage.first, stage.last)]
    return [*rows, ("head", name(names, head))]


KEY_USAGE = ("key", "requests today", "tokens today", "requests", "prompt tokens", "answer tokens")


def key_usage(key: schema.KeyStatus) -> tuple[str, ...]:
    tokens = key.prompt_tokens_today + key.completion_tokens_today
    return (
        key.name,
        _of(key.requests_today, key.requests_per_day),
        _of(tokens, key.tokens_per_day),
        *(f"{figure:,}" for figure in (key.requests, key.prompt_tokens, key.completion_tokens)),
    )


def _of(used: int, limit: int | None) -> str:
    return f"{used:,}" if limit is None else f"{used:,} of {limit:,}"
