"""`mesh-llm engine info | build`."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import click

from mesh_llm.cli.options import debug_option, json_option
from mesh_llm.cli.output import Output, print_json, print_table
from mesh_llm.engine import build as builder
from mesh_llm.engine import cuda_toolkit, gpus, machine, prebuilt
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.speed import known_speed
from mesh_llm.errors import UsageError
from mesh_llm.home import cache_folder
from mesh_llm.third_party import texts_missing

_INSTEAD = {"cpu": "the wheel's own code is used", "mesh": "no links to other machines"}
_NO_GPU = "its GPUs are not used"


@click.group()
def engine() -> None:
    """The engine of this machine."""


@engine.command()
@json_option
@debug_option
def info(as_json: bool, debug: bool) -> None:
    """Show version, devices with memory and speed, CPU features, native libraries, and unused GPUs.

    A speed is shown once a node has measured it.
    """
    document = asyncio.run(_describe())
    if as_json:
        print_json(document)
        return
    rows = [("engine", f"{document['version']} (llama.cpp build {document['build']})")]
    rows.append(("wheel", document["wheel"]))
    for device in document["devices"]:
        rows.append(("device", f"{device['name']}: {device['description']}, {machine.memory_text(device)}"))
        if speed := device["speed"]:
            read, flops, attention = (
                speed[name] / 1e9 for name in ("read_bytes_per_s", "flops_per_s", "attention_per_s")
            )
            rows.append(
                (
                    "speed",
                    f"{device['name']}: reads {read:.1f} GB/s, multiplies {flops:,.0f} GFLOP/s, "
                    f"attends {attention:,.0f} GFLOP/s",
                )
            )
    rows.append(("CPU code", " ".join(document["cpu_features"])))
    for name, library in document["libraries"].items():
        rows.append((f"ggml-{name}", _origin(name, library)))
    rows += [("missing", sentence) for sentence in document["features_off"]]
    for idle in document["idle_gpus"]:
        count = f"{idle['count']} × " if idle["count"] > 1 else ""
        rows.append(("idle GPU", f"{count}{idle['name']}: {idle['command']}"))
    print_table(rows)


def _origin(name: str, library: dict[str, Any]) -> str:
    if not library["native"]:
        return str(library["instead"])
    better = "; mesh-llm engine build compiles one for this very processor" if name == "cpu" else ""
    return f"{library['path']}{f' (came with the package{better})' if library['prebuilt'] else ''}"


async def _describe() -> dict[str, Any]:
    wheel = find_wheel()
    built = await builder.ready()
    described = await describe(built.libraries)
    libraries: dict[str, dict[str, Any]] = {
        name: {"native": True, "path": str(path), "prebuilt": prebuilt.of_package(path)}
        for name, path in built.libraries.items()
    }
    instead = {
        **{name: f"{why.message}; {_INSTEAD.get(name, _NO_GPU)}" for name, why in built.missing.items()},
        **{name: gpus.broken_text(name, why) for name, why in described["unusable"].items()},
    }
    for name, text in instead.items():
        libraries[name] = {"native": False, "path": None, "instead": text}
    usable = {name: path for name, path in built.libraries.items() if name not in instead}
    return {
        "version": wheel.version,
        "build": wheel.build_number,
        "wheel": str(wheel.module),
        "devices": [{**device, "speed": _speed(usable, device["name"])} for device in described["devices"]],
        "cpu_features": described["cpu_features"],
        "libraries": libraries,
        "features_off": [*described["features_off"], *texts_missing(wheel.module)],
        "gpu_kinds": [name for name in usable if name in gpus.KINDS],
        "idle_gpus": [
            {**dataclasses.asdict(idle), "command": idle.command} for idle in gpus.idle(gpus.found(), usable)
        ],
    }


def _speed(libraries: dict[str, Path], device: str) -> dict[str, float] | None:
    """As a node has measured it with as many threads as it uses by itself."""
    speed = known_speed(libraries, device, machine.threads(), cache=cache_folder() / "speed")
    figures = ("read_bytes_per_s", "flops_per_s", "attention_per_s")
    return {name: getattr(speed, name) for name in figures} if speed is not None else None


@engine.command()
@click.option("--cuda", is_flag=True, help="also build for NVIDIA GPUs, now and from now on")
@click.option("--vulkan", is_flag=True, help="the same with Vulkan, for GPUs of any maker")
@click.option("--hip", is_flag=True, help="the same for AMD GPUs, with ROCm")
@click.option("--no-gpu", is_flag=True, help="remove the libraries that were built for GPUs")
@click.option("--drop-toolkit", is_flag=True, help="then remove the CUDA compiler that was fetched (0.3 GB)")
@click.option("--force", is_flag=True, help="rebuild what is there already")
@json_option
@debug_option
def build(
    cuda: bool,
    vulkan: bool,
    hip: bool,
    no_gpu: bool,
    drop_toolkit: bool,
    force: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Build the native libraries for this machine: takes a minute, for a GPU many minutes.

    Without an option: those for the CPU and links, and those for GPUs that were asked for before.
    Where there is no CUDA toolkit, --cuda fetches one from the Python index (0.5 GB).
    """
    asked = [kind for kind, given in (("cuda", cuda), ("vulkan", vulkan), ("hip", hip)) if given]
    if len(asked) + no_gpu > 1:
        named = ", ".join([*(gpus.KINDS[kind].option for kind in asked), *(["--no-gpu"] if no_gpu else [])])
        raise UsageError(f"{named}: choose one at a time", hint="what was built before is kept")
    if no_gpu:
        builder.drop_gpus()
    with Output() as output:
        built = asyncio.run(builder.rebuild(output.progress, gpu=next(iter(asked), None), force=force))
    if built.missing:
        raise next(iter(built.missing.values()))
    if drop_toolkit:
        cuda_toolkit.drop_compiler()
    if as_json:
        print_json({name: str(path) for name, path in built.libraries.items()})
    else:
        print_table([(f"ggml-{name}", str(path)) for name, path in built.libraries.items()])
