"""`mesh-llm bench`: measure a mesh, its links and its model."""

from __future__ import annotations

import click

from mesh_llm.cli.groups import ImportedVerbs

MODULES = {
    "mesh": "bench_mesh",
    "grid": "bench_grid",
    "transport": "bench_transport",
    "speculation": "bench_speculation",
    "compare": "bench_compare",
}


@click.group(cls=ImportedVerbs, modules=MODULES, default="mesh")
def bench() -> None:
    """Measure the running mesh (`bench mesh`, the default) or something else of this machine."""
