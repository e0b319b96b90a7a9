"""What a mesh showed under load, as a document: measured beside predicted."""

from __future__ import annotations

from mesh_llm.bench.mesh_load import LoadFound, StepSeen
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series
from mesh_llm.results.samples import Sample
from mesh_llm.status_schema import Status


def document(found: LoadFound, *, command: str, facts: dict[str, str]) -> Document:
    prompts, streams = _by_size(found, "prompt"), _by_size(found, "streams")
    status = found.after
    return Document(
        name="mesh",
        title="This mesh under load",
        command=command,
        facts={**facts, **_facts(status)},
        tables=(
            *([_prompts(prompts)] if prompts else []),
            *([_streams(streams)] if streams else []),
            _predictions(found, prompts, streams),
            _nodes(status),
            *([_token(status)] if status.engine.token else []),
        ),
        plots=tuple(_plots(prompts, streams)),
        figures=tuple(_figures(prompts, streams)),
        notes=(*_NOTES, *(f"left out: {text}" for text in found.left_out)),
    )


def _by_size(found: LoadFound, kind: str) -> dict[int, list[StepSeen]]:
    sizes: dict[int, list[StepSeen]] = {}
    for step, seen in found.steps.items():
        if step.kind == kind:
            sizes.setdefault(step.size, []).append(seen)
    return dict(sorted(sizes.items()))


def _facts(status: Status) -> dict[str, str]:
    model, plan, engine = status.model, status.plan, status.engine
    assert model is not None and plan is not None
    hops, nodes = hops_per_token(status), len({stage.node for stage in plan.stages})
    size_mb = model.size_bytes / 1e6
    sent = sum(stage.bytes_per_token for stage in engine.stages)
    return {
        "model": f"{model.name}, {model.quantisation}, {size_mb:.0f} MB, {model.layers} layers",
        "context": f"{model.slots} slots of {model.context} tokens",
        "plan": f"{plan.mode}, {len(plan.stages)} stages on {nodes} nodes",
        "load": f"{engine.ready_s:.1f} s, {engine.weights_sent_bytes / 1e6:.1f} MB of weights sent, "
        f"{engine.weights_resident_bytes / 1e6:.0f} MB in memory",
        "links": f"{hops} hops and {sent:,} bytes for each token"
        if hops
        else "none: the model is on one node",
    }


def hops_per_token(status: Status) -> int:
    """Links that a token crosses; a stage that does not push to the next one goes by the host."""
    stages = status.engine.stages
    return len(stages) + 1 + sum(not stage.pushes for stage in stages) if stages else 0


def _firsts(seen: list[StepSeen]) -> Sample:
    return Sample.of([each.first_s for each in seen])


def _range(sample: Sample, digits: int) -> str:
    first, third = sample.quartiles
    return f"{sample.median:.{digits}f} ({first:.{digits}f}–{third:.{digits}f})"


def _error(measured: float, predicted: float | None) -> str:
    return f"{100 * (predicted - measured) / measured:+.0f} %" if predicted and measured else "–"


def _predicted_s(seen: list[StepSeen]) -> float | None:
    return _median([each.predicted_s for each in seen])


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value]
    return Sample.of(known).median if known else None


def _prompts(prompts: dict[int, list[StepSeen]]) -> ResultTable:
    rows = []
    for length, seen in prompts.items():
        sample, predicted = _firsts(seen), _predicted_s(seen)
        speed = Sample.of([each.prompt_tok_s for each in seen])
        rows.append(
            (
                f"{length:,}",
                f"{_range(sample, 2)} s",
                f"{_number(predicted)} s" if predicted else "–",
                _error(sample.median, predicted),
                f"{_range(speed, 0)} tok/s",
            )
        )
    return ResultTable(
        title="First token by prompt length",
        columns=("prompt tokens", "first token", "predicted", "error", "prefill"),
        rows=tuple(rows),
        note="medians and quartiles; prompts that no cache holds",
    )


def _streams(streams: dict[int, list[StepSeen]]) -> ResultTable:
    rows = []
    for count, seen in streams.items():
        total = Sample.of([each.tok_s for each in seen])
        gap = Sample.of([each.gap_s for each in seen])
        rows.append(
            (
                str(count),
                f"{_range(total, 1)} tok/s",
                f"{total.median / count:.1f} tok/s",
                f"{_range(_firsts(seen), 2)} s",
                f"{gap.median:.2f} s",
            )
        )
    return ResultTable(
        title="Streams at once",
        columns=("streams", "all together", "each", "first token", "longest gap"),
        rows=tuple(rows),
        note="more streams than slots wait for one; the first token is the median stream's",
    )


def _predictions(
    found: LoadFound, prompts: dict[int, list[StepSeen]], streams: dict[int, list[StepSeen]]
) -> ResultTable:
    plan = found.after.plan
    assert plan is not None
    rows = []
    if 1 in streams:
        decode = Sample.of([each.tok_s for each in streams[1]]).median
        likely = plan.predicted_tok_s_low, plan.predicted_tok_s_high
        rows.append(_row("decode, one stream", decode, plan.predicted_tok_s, "tok/s", likely))
    for length, seen in prompts.items():
        likely = (
            _median([each.predicted_low_s for each in seen]),
            _median([each.predicted_high_s for each in seen]),
        )
        rows.append(
            _row(f"first token, {length:,} tokens", _firsts(seen).median, _predicted_s(seen), "s", likely)
        )
    return ResultTable(
        title="Measured beside predicted",
        columns=("quantity", "measured", "predicted", "most likely", "error"),
        rows=tuple(rows),
        note="" if not prompts or any(map(_predicted_s, prompts.values())) else _NO_MODEL,
    )


def _row(
    name: str, measured: float, predicted: float | None, unit: str, likely: tuple[float | None, float | None]
) -> tuple[str, ...]:
    told = f"{_number(predicted)} {unit}" if predicted else "–"
    low, high = likely
    between = f"{_number(low)}–{_number(high)} {unit}" if low and high else "–"
    return name, f"{_number(measured)} {unit}", told, between, _error(measured, predicted)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _nodes(status: Status) -> ResultTable:
    plan = status.plan
    assert plan is not None
    members = {node.id: node for node in status.mesh.nodes}
    seen = {(stage.node, stage.device): stage for stage in status.engine.stages}
    rows = []
    for stage in plan.stages:
        member, link = members.get(stage.node), seen.get((stage.node, stage.device))
        rtt_ms = member.link.rtt_ms if member else None
        rows.append(
            (
                " ".join(
                    [member.name if member else stage.node[:8], *([stage.device] if stage.device else [])]
                ),
                f"{stage.first}-{stage.last - 1}",
                f"{stage.need_bytes / 1e6:.0f} MB",
                f"{member.memory_bytes / 1e6:.0f} MB" if member else "–",
                (link.link or "–") if link else "self",
                f"{rtt_ms:.1f} ms" if link and rtt_ms is not None else "–",
                f"{link.bytes_per_token:,}" if link else "–",
                f"{link.compute_ms:.1f} ms" if link else "–",
            )
        )
    columns = ("node", "layers", "planned memory", "of", "link", "rtt", "bytes/token", "computes")
    return ResultTable(title="Nodes", columns=columns, rows=tuple(rows))


def _token(status: Status) -> ResultTable:
    token = status.engine.token
    assert token is not None
    names = {node.id: node.name for node in status.mesh.nodes}
    rows = tuple(
        (
            part.kind,
            names.get(part.node or "", "–"),
            f"{part.ms:.2f} ms",
            f"{100 * part.ms / token.total_ms:.0f} %" if token.total_ms else "–",
        )
        for part in token.parts
        if part.ms
    )
    return ResultTable(
        title="Where a token's time goes",
        columns=("part", "node", "time", "share"),
        rows=rows,
        note=token.sentence,
    )


def _figures(prompts: dict[int, list[StepSeen]], streams: dict[int, list[StepSeen]]) -> list[Figure]:
    found = []
    for length, seen in prompts.items():
        firsts = tuple(each.first_s for each in seen)
        speeds = tuple(each.prompt_tok_s for each in seen)
        name = f"{length} tokens"
        found.append(Figure(name=f"first token, {name}", unit="s", values=firsts, higher_is_better=False))
        found.append(Figure(name=f"prefill, {name}", unit="tok/s", values=speeds, higher_is_better=True))
    for count, seen in streams.items():
        values = tuple(each.tok_s for each in seen)
        found.append(
            Figure(name=f"decode, streams: {count}", unit="tok/s", values=values, higher_is_better=True)
        )
    return found


def _plots(prompts: dict[int, list[StepSeen]], streams: dict[int, list[StepSeen]]) -> list[Plot]:
    found = []
    if len(prompts) > 1:
        curves = [_series("measured", {each: _firsts(seen) for each, seen in prompts.items()})]
        told = {length: predicted for length, seen in prompts.items() if (predicted := _predicted_s(seen))}
        if told:
            curves.append(Series(label="predicted", x=tuple(map(float, told)), y=tuple(told.values())))
        found.append(
            Plot(
                title="First token by prompt length",
                x_label="prompt, tokens",
                y_label="s",
                series=tuple(curves),
                x_log=True,
                y_log=True,
            )
        )
    if len(streams) > 1:
        totals = {count: Sample.of([each.tok_s for each in seen]) for count, seen in streams.items()}
        found.append(
            Plot(
                title="Streams at once",
                x_label="streams",
                y_label="tok/s, all together",
                series=(_series("decode", totals),),
                x_log=True,
            )
        )
    return found


def _series(label: str, samples: dict[int, Sample]) -> Series:
    return Series(
        label=label,
        x=tuple(map(float, samples)),
        y=tuple(sample.median for sample in samples.values()),
        low=tuple(sample.quartiles[0] for sample in samples.values()),
        high=tuple(sample.quartiles[1] for sample in samples.values()),
    )


_NO_MODEL = (
    "the node that was asked does not have the model, and cannot predict first tokens: ask one that has"
)
_NOTES = (
    "asked through the API of the node on this machine, beside whatever other clients asked meanwhile",
    "every prompt begins with words of its own and is read anew (cache_prompt: false); temperature 0",
    "error: predicted less measured, as a share of what was measured",
)
