"""`mesh-llm plan`: who would compute what, how fast, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesh_llm.cli import tables
from mesh_llm.cli.config_file import Configured
from mesh_llm.cli.control import call
from mesh_llm.cli.options import json_option, options_named, planned
from mesh_llm.cli.output import print_json, print_table
from mesh_llm.cli.plan_machines import PlannedMachines, wanted
from mesh_llm.config import NodeConfig
from mesh_llm.errors import NodeNotRunning, UsageError
from mesh_llm.home import Home
from mesh_llm.mesh_settings import MESH_OPTIONS, given_options
from mesh_llm.status_schema import PlanStatus, from_document

PLAN_TIMEOUT_S = 60.0
"""For a running node's answer: it may have to read the header of a file on a hub."""

_OF_THE_MESH = (*(option.argument for option in MESH_OPTIONS.values()), "draft", "draft_max", "no_draft")
_OF_A_NODE = ("max_memory", "device", "gpu_layers", "cpu_moe", "n_cpu_moe", "override_tensor", "threads")


@click.command(cls=Configured)
@options_named("model", *_OF_THE_MESH, *_OF_A_NODE, "home", "debug")
@click.option(
    "--with",
    "machines",
    metavar="NAME=MEMORY[:KIND],...",
    help="plan for machines that are not there, such as desk=24GB:cuda,mac=16GB:metal,mini=32GB; kinds: cpu, "
    "metal, cuda, rocm, vulkan; main memory beside a GPU: desk=24GB:cuda+64GB; memory speed, where you know "
    "it: desk=24GB:cuda@900GB/s; here among them: this machine, or the mesh of its running node",
)
@click.option("--link", metavar="TIME", help="a round trip between the machines of --with (default: 1ms)")
@json_option
def plan(as_json: bool, machines: str | None, link: str | None, **options: Any) -> None:
    """Show the plan for a model and its predicted speed. Builds and serves nothing, and downloads no model.

    If a node is running on this home, the plan is for its mesh as it is now, beside the models
    that it serves; for one that it does not serve, as if every node had its file. Otherwise it is
    for this machine alone, which is measured with what the model is made of: a second or two,
    after its first start.
    A model that is not here is known from the catalog, or a few MB of its file, the header, are read.
    """
    config = NodeConfig(**planned(options))
    if config.more_models:
        raise UsageError("mesh-llm plan takes one --model", hint="ask once for each of them")
    asked = wanted(machines, link)
    document = asyncio.run(_planned(config, options) if asked is None else _supposing(config, asked))
    if as_json:
        print_json(document)
    else:
        show(document)


async def _supposing(config: NodeConfig, asked: PlannedMachines) -> dict[str, Any]:
    # Here: both bring the engine along.
    from mesh_llm.cli.inventory import members
    from mesh_llm.report import what_if

    _, nodes = await members(Home(config.home)) if asked.here else ("", ())
    document = await what_if.supposing(
        config, asked.machines, rtt_s=asked.rtt_s, here=asked.here, members=nodes
    )
    return {"scope": "machines", **document}


async def _planned(config: NodeConfig, options: dict[str, Any]) -> dict[str, Any]:
    try:
        document = await call(
            Home(config.home), "POST", "/api/plan", _wishes(config), within_s=PLAN_TIMEOUT_S
        )
    except NodeNotRunning:
        # Here: the planner of a machine brings the engine along, and a running node needs none of it.
        from mesh_llm.report import what_if

        return {"scope": "machine", **await what_if.alone(config)}
    for option in _OF_A_NODE:
        source = click.get_current_context().get_parameter_source(option)
        # In the file it is for the node that runs, and counts there already.
        if options[option] not in (None, False, ()) and source is not ParameterSource.DEFAULT_MAP:
            flag = option.replace("_", "-")
            raise UsageError(
                f"--{flag} is an option of each node, and a node is running on {config.home}",
                hint=f"start that node with --{flag}, or plan for this machine alone with another --home",
            )
    return {"scope": "mesh", **document}


def _wishes(config: NodeConfig) -> dict[str, Any]:
    return {
        "model": _from_anywhere(config.model),
        "draft": _from_anywhere(config.draft),
        "draft_max": config.draft_max,
        "no_draft": config.no_draft or None,
        **given_options(config),
    }


def _from_anywhere(name: str | None) -> str | None:
    """The running node stands in another folder."""
    return str(Path(name).absolute()) if name is not None and Path(name).is_file() else name


def show(document: dict[str, Any]) -> None:
    names = tables.names_of([(node["id"], node["name"]) for node in document["nodes"]])
    plan, other = from_document(PlanStatus, document["plan"]), document["alternative"]
    print_table([*_model_rows(document, names), *_plan_rows(plan, names)])
    _show_stages(plan, [stage.get("link") for stage in document["plan"]["stages"]], names)
    _show_predictions(plan, other, names)
    tables.print_excluded(plan, names)


def _model_rows(document: dict[str, Any], names: tables.Names) -> list[tuple[str, str]]:
    model = document["model"]
    rows = [
        (
            "model",
            f"{model['name']}, {model['quantisation']}, {tables.size(model['size_bytes'])}, "
            f"{model['layers']} layers",
        )
    ]
    if document["scope"] == "machine":
        rows.append(("over", "this machine alone: no node runs on this home"))
    elif document["scope"] == "machines":
        rows.append(("over", f"machines that are not all there: {', '.join(names.values())}"))
    else:
        count = len(document["nodes"])
        rows.append(("over", f"the mesh as it is now, {'1 node' if count == 1 else f'{count} nodes'}"))
    if document["assumed"]:
        without = ", ".join(tables.name(names, id) for id in document["assumed"])
        rows.append(("assumed", f"every node had the file; not there yet: {without}"))
    if model["context"]:
        rows.append(("context", f"{model['slots']} x {model['context']} tokens"))
    if draft := model["draft"]:
        size = f", {tables.size(draft['weight_bytes'])}" if draft["weight_bytes"] else ""
        note = "" if draft["fits"] else "; left out, because there is no memory for it"
        note = f"; {draft['off']}" if draft.get("off") else note
        rows.append(("draft", f"{draft['name']}{size}{note}"))
    rows += [("note", text) for text in document["notes"]]
    return rows


def _plan_rows(plan: PlanStatus, names: tables.Names) -> list[tuple[str, str]]:
    need, have = tables.size(plan.need_bytes), tables.size(plan.have_bytes)
    rows = [
        ("plan", tables.how_planned(plan, names)),
        ("why", plan.reason),
        ("memory", f"{need} needed, {have} available"),
    ]
    missing = plan.need_bytes - plan.have_bytes
    if plan.mode == "waiting" and missing > 0:
        rows.append(("missing", f"{tables.size(missing)}: more machines, or a smaller quantisation"))
    return rows


def _show_stages(plan: PlanStatus, links: list[dict[str, Any] | None], names: tables.Names) -> None:
    if not plan.stages:
        return
    rows = []
    for stage, found in zip(plan.stages, links, strict=False):
        link = found or {"kind": None, "rtt_ms": None}
        rows.append(
            (
                tables.place(stage, names),
                tables.layers(stage),
                tables.share(stage),
                tables.size(stage.weight_bytes),
                tables.size(stage.need_bytes),
                link["kind"] or "?",
                tables.milliseconds(link["rtt_ms"]),
            )
        )
    print()
    print_table(rows, headers=("node", "layers", "share", "weights", "memory", "link", "rtt"))
    print(tables.head_note(plan, names))


def _show_predictions(plan: PlanStatus, other: dict[str, Any] | None, names: tables.Names) -> None:
    if plan.mode == "waiting":
        return
    rows = [_prediction("chosen", plan, names)]
    if other is not None and other["plan"] is not None:
        rows.append(_prediction("instead", from_document(PlanStatus, other["plan"]), names))
    print()
    print_table(rows, headers=("", "plan", "speed", "first token"))
    if other is not None and other["plan"] is None:
        print(f"no {other['mode']} plan: {other['reason']}")
    if not plan.predicted_tok_s:
        print("A speed is predicted once every node of the plan has measured its own, at its first start")


def _prediction(which: str, plan: PlanStatus, names: tables.Names) -> tuple[str, ...]:
    first = plan.predicted_first_token_s
    return (
        which,
        tables.how_planned(plan, names),
        tables.predicted_rate(plan),
        f"{tables.predicted_wait(plan)} after a prompt of 512 tokens" if first is not None else "not known",
    )
