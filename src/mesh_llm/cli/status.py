"""`mesh-llm status`: what the running node knows, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from mesh_llm import status_schema as schema
from mesh_llm.cli import tables
from mesh_llm.cli.control import call, running_home
from mesh_llm.cli.live import Live
from mesh_llm.cli.node_events import follow
from mesh_llm.cli.options import debug_option, home_option, json_option
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.terminal import Terminal, is_live
from mesh_llm.home import Home
from mesh_llm.tasks import cancelled

STATUS_WATCH_S = 1.0
"""Between two looks of `status --watch`: what a person can follow."""


@click.command()
@click.option(
    "--watch", is_flag=True, help="refresh every second until q or Ctrl-C; in a pipe, print every change"
)
@click.option("--layers", is_flag=True, help="show which layer is on which node")
@home_option
@json_option
@debug_option
def status(watch: bool, layers: bool, home: Path | None, as_json: bool, debug: bool) -> None:
    """Show what the running node knows: nodes, roles, links, plan, memory and speed."""
    where = running_home(home)
    if watch and is_live() and not as_json:
        with Terminal() as terminal:
            raise SystemExit(asyncio.run(_watch_live(where, terminal, layers=layers)))
    if watch:
        asyncio.run(_watch(where, layers=layers, as_json=as_json))
        return
    document = asyncio.run(call(where, "GET", "/api/status"))
    if as_json:
        print_json(document)
    else:
        show(schema.from_document(schema.Status, document), layers=layers)


async def _watch(home: Home, *, layers: bool, as_json: bool) -> None:
    count = 0
    async for document in _changes(home):
        if as_json:
            print(json.dumps(document), flush=True)
            continue
        if count:
            print()
        show(schema.from_document(schema.Status, document), layers=layers)
        sys.stdout.flush()
        count += 1


async def _watch_live(home: Home, terminal: Terminal, *, layers: bool) -> int:
    """The same picture as in the node's own terminal, until `q`, a signal, or the node's end."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, 128 + number)
    live = Live(terminal, on_quit=lambda: end(0), layers=layers)
    looking = asyncio.create_task(live.run(lambda: call(home, "GET", "/api/status")), name="live view")
    hearing = asyncio.create_task(follow(home, live), name="events")
    try:
        await asyncio.wait((looking, ended), return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            # Raises: the node is gone.
            await looking
        return ended.result()
    finally:
        await cancelled(looking)
        await cancelled(hearing)
        terminal.leave(keep=True)


async def _changes(home: Home) -> AsyncIterator[dict[str, Any]]:
    """The status, where it says something new. Ends with the node."""
    last = None
    while True:
        document = await call(home, "GET", "/api/status")
        settled = _settled(schema.from_document(schema.Status, document))
        if settled != last:
            last = settled
            yield document
        await asyncio.sleep(STATUS_WATCH_S)


def _settled(status: schema.Status) -> list[Any]:
    """What does not change by itself from one second to the next, as delays and speeds do."""
    plan, engine = status.plan, status.engine
    return [
        status.node,
        [
            (each.id, each.name, each.role, each.state, each.reason, each.link.kind)
            for each in status.mesh.nodes
        ],
        plan and (plan.epoch, plan.mode, plan.host, plan.stages, [each.node for each in plan.excluded]),
        (engine.state, engine.restarts),
    ]


def show(status: schema.Status, *, layers: bool = False) -> None:
    names = tables.members(status.mesh)
    plan = status.plan
    print_table(_summary(status, names))
    print()
    print_table(
        [_node_row(node, names) for node in status.mesh.nodes],
        headers=("node", "role", "state", "memory", "lent", "link", "rtt", "traffic", "via"),
    )
    if len(status.models) > 1 or any(model.replicas_most > 1 for model in status.models):
        print()
        rows, headers = tables.served_models(status.models, names)
        print_table(rows, headers=headers)
    if plan and plan.stages:
        print()
        if layers:
            print_table(tables.layer_rows(plan, names), headers=("layer", "node"))
        else:
            _show_stages(plan, status.engine, names)
    if plan:
        tables.print_excluded(plan, names)
    if status.api.keys:
        print()
        print_table([tables.key_usage(key) for key in status.api.keys], headers=tables.KEY_USAGE)
    if lacking := [node for node in status.mesh.nodes if node.lacks]:
        print()
        rows = [(names[node.id], ", ".join(node.lacks)) for node in lacking]
        print_table(rows, headers=("node", "lacks"))


def _summary(status: schema.Status, names: tables.Names) -> list[tuple[str, str]]:
    node, plan, engine = status.node, status.plan, status.engine
    state = f"{node.state}: {node.reason}" if node.reason else node.state
    rows = [("node", f"{names.get(node.id, node.name)} ({node.role})"), ("state", state)]
    if model := status.model:
        rows.append(("model", tables.model(model)))
        if model.context:
            rows.append(("context", tables.context(model)))
        if model.adapters:
            rows.append(("lora", ", ".join(model.adapters)))
        if drafts := tables.drafts(model.draft):
            rows.append(("drafts", drafts))
    if plan:
        rows += [("plan", tables.how_planned(plan, names)), ("why", plan.reason)]
        if lanes := tables.lanes(plan, engine):
            rows.append(("lanes", lanes))
        need, have = tables.size(plan.need_bytes), tables.size(plan.have_bytes)
        rows.append(("memory", f"{need} needed, {have} available"))
    if node.role != "client":
        rows.append(("lends", tables.lends(status)))
    if engine.state == "ready":
        rows.append(("engine", f"ready in {engine.ready_s:.1f} s, restarts: {engine.restarts}"))
        sent, resident = engine.weights_sent_bytes, engine.weights_resident_bytes
        rows.append(("weights", f"{tables.size(resident)} in memory, {tables.size(sent)} sent over links"))
        rows.append(("speed", tables.speed(plan, engine)))
        rows.append(("first token", tables.first_token(status.api.first_token)))
        if engine.token:
            rows.append(("token", engine.token.sentence))
        rows += [("warning", warning) for warning in engine.warnings]
    rows.append(("api", status.api.url or "not open yet"))
    if status.api.shared_url:
        rows.append(("shared", f"with the local network, at {status.api.shared_url}"))
    return rows


def _node_row(node: schema.MemberStatus, names: tables.Names) -> tuple[str, ...]:
    link = node.link
    return (
        names[node.id],
        node.role,
        node.state if node.standing == "alive" else node.standing,
        tables.size(node.memory_bytes),
        tables.size(node.lent_bytes) if node.lent_bytes else "-",
        link.kind,
        tables.milliseconds(link.rtt_ms) if link.kind != "self" else "-",
        tables.throughput(link.bytes_per_s) if link.kind != "self" else "-",
        ", ".join(link.via) or "-",
    )


def _show_stages(plan: schema.PlanStatus, engine: schema.EngineStatus, names: tables.Names) -> None:
    """With what the links of a split have shown, per token."""
    seen = {(stage.node, stage.device): stage for stage in engine.stages}
    rows = [_stage_row(stage, seen.get((stage.node, stage.device)), names) for stage in plan.stages]
    headers = ("stage", "layers", "share", "weights", "memory", "link", "computes", "waits", "bytes/token")
    # Alone there are no links to tell anything of.
    columns = len(headers) if seen else 5
    print_table([row[:columns] for row in rows], headers=headers[:columns])


def _stage_row(
    stage: schema.PlanStageStatus, seen: schema.EngineStageStatus | None, names: tables.Names
) -> tuple[str, ...]:
    row = (
        tables.place(stage, names),
        tables.layers(stage),
        tables.share(stage),
        tables.size(stage.weight_bytes),
        tables.size(stage.need_bytes),
    )
    if seen is None:
        return (*row, "self", "-", "-", "-")
    compute, wait = tables.milliseconds(seen.compute_ms), tables.milliseconds(seen.wait_ms)
    kind = seen.link or "-"
    link = kind if seen.pushes else f"{kind}, by the host"
    return (*row, link, compute, wait, str(seen.bytes_per_token))
