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
from mesh_llm.engine import machine
from mesh_llm.engine.inspect import describe
from mesh_llm.engine.library import find_wheel
from mesh_llm.engine.speed import known_speed
from mesh_llm.home import cache_folder


@click.group()
def engine() -> None:
    """The engine of this machine."""


@engine.command()
@json_option
@debug_option
def info(as_json: bool, debug: bool) -> None:
    """Version, devices with memory and speed, CPU features, and which libraries are native.

    A speed is shown once a node has measured it.
    """
    document = asyncio.run(_describe())
    if as_json:
        print_json(document)
        return
    rows = [("engine", f"{document['version']} (llama.cpp build {document['build']})")]
    rows.append(("wheel", document["wheel"]))
    for device in document["devices"]:
        free, total = device["free_bytes"] / 1e9, device["total_bytes"] / 1e9
        rows.append(
            ("device", f"{device['name']}: {device['description']}, {free:.1f} of {total:.1f} GB free")
        )
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
        rows.append((f"ggml-{name}", library["path"] or library["instead"]))
    print_table(rows)


async def _describe() -> dict[str, Any]:
    wheel = find_wheel()
    built = builder.at_hand()
    described = await describe(built.libraries)
    libraries: dict[str, dict[str, Any]] = {
        name: {"native": True, "path": str(path)} for name, path in built.libraries.items()
    }
    for name, why in built.missing.items():
        instead = "the wheel's own code is used" if name == "cpu" else "no links to other machines"
        libraries[name] = {"native": False, "path": None, "instead": f"{why.message}; {instead}"}
    return {
        "version": wheel.version,
        "build": wheel.build_number,
        "wheel": str(wheel.module),
        "devices": [
            {**device, "speed": _speed(built.libraries, device["name"])} for device in described["devices"]
        ],
        "cpu_features": described["cpu_features"],
        "libraries": libraries,
    }


def _speed(libraries: dict[str, Path], device: str) -> dict[str, float] | None:
    """As a node has measured it with as many threads as it uses by itself."""
    speed = known_speed(libraries, device, machine.threads(), cache=cache_folder() / "speed")
    return dataclasses.asdict(speed) if speed is not None else None


@engine.command()
@click.option("--force", is_flag=True, help="build again what is there already")
@json_option
@debug_option
def build(force: bool, as_json: bool, debug: bool) -> None:
    """Build the native libraries for this machine (a minute, once)."""
    with Output() as output:
        built = asyncio.run(builder.ensure(builder.STANDARD, output.progress, retry=True, force=force))
    if built.missing:
        raise next(iter(built.missing.values()))
    if as_json:
        print_json({name: str(path) for name, path in built.libraries.items()})
    else:
        print_table([(f"ggml-{name}", str(path)) for name, path in built.libraries.items()])
