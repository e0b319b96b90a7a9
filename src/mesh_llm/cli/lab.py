"""`mesh-llm lab`: slow links, faults and whole networks, on one machine."""

from __future__ import annotations

import click

from mesh_llm.cli.groups import ImportedVerbs

MODULES = {
    "delay": "lab_delay",
    "chaos": "lab_chaos",
    "simulate": "lab_simulate",
}


@click.group(cls=ImportedVerbs, modules=MODULES)
def lab() -> None:
    """Try slow links, faults and large meshes on this machine alone."""
