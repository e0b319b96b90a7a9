"""Runs the steps of a Containerfile as they stand, where there is no container builder.

Each stage is an overlay over the root of this machine, in a mount and a network namespace of its own, so that
nothing is left behind. The system's Python stands in for that of the base image, and packages of Debian
count as installed. The finished image then runs as its user, with a read-only root.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

EMPTY = ("opt", "root", "home", "tmp", "models", "work", "var/lib/mesh-llm")
"""Folders that a base image does not have, or has nothing in."""

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin"
"""While an image is built."""


@dataclass(slots=True)
class Stage:
    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> dict[str, Stage]:
    """The stages by their names, with `ARG` filled in."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    lines = re.sub(r"\\\n", " ", text).splitlines()
    for line in (line.strip() for line in lines if line.strip() and not line.startswith("#")):
        instruction, _, rest = line.partition(" ")
        rest = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], rest)
        if instruction == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif instruction == "FROM":
            parent, _, name = rest.partition(" AS ")
            stages[name] = Stage(name=name, parent=parent)
        else:
            list(stages.values())[-1].steps.append((instruction, rest))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it builds on, the base first."""
    stage = stages[name]
    above = lineage(stages, stage.parent) if stage.parent in stages else []
    return [*above, stage]


def settings(stages: dict[str, Stage], name: str, instruction: str) -> list[str]:
    return [rest for stage in lineage(stages, name) for step, rest in stage.steps if step == instruction]


def health_check(stages: dict[str, Stage], name: str) -> list[str]:
    command: list[str] = json.loads(settings(stages, name, "HEALTHCHECK")[-1].partition("CMD ")[2])
    return command


def entry_point(stages: dict[str, Stage], name: str) -> list[str]:
    command: list[str] = json.loads(settings(stages, name, "ENTRYPOINT")[-1])
    return command


def script(
    text: str, target: str, *, bundle: Path, models: Path, arguments: list[str], secrets: dict[str, str]
) -> str:
    """A shell script, for `unshare -mn`: builds `target`, runs it until it is healthy, stops it."""
    stages = parse(text)
    lines = [_PREPARE]
    for name in _needed(stages, target):
        lines += _build(stages, name, bundle)
    variables = " ".join(settings(stages, target, "ENV"))
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in secrets.items())
    user = settings(stages, target, "USER")[-1]
    run = f"chroot --userspec={user} $S/{target}/root env -i {variables} {given}"
    check = shlex.join(health_check(stages, target))
    start = shlex.join([*entry_point(stages, target), *arguments])
    return "\n".join([*lines, _RUN.format(target=target, run=run, check=check, start=start, models=models)])


def _needed(stages: dict[str, Stage], target: str) -> list[str]:
    """In the order in which they stand."""
    wanted = {stage.name for stage in lineage(stages, target)}
    for source in re.findall(r"--from=(\S+)", " ".join(settings(stages, target, "COPY"))):
        wanted |= set(_needed(stages, source))
    return [name for name in stages if name in wanted]


_PREPARE = """
set -eu
S=$1
mount -t tmpfs scratch "$S"
"""


def _build(stages: dict[str, Stage], name: str, bundle: Path) -> list[str]:
    stage, folder = stages[name], f"$S/{name}"
    lower = f"$(cat $S/{stage.parent}/lower)" if stage.parent in stages else "/"
    lines = [f"mkdir -p {folder}/upper {folder}/work {folder}/root"]
    if stage.parent not in stages:
        for empty in EMPTY:
            lines.append(f"mkdir -p {folder}/upper/{empty}")
            opaque = "import os, sys; os.setxattr(sys.argv[1], 'trusted.overlay.opaque', b'y')"
            lines.append(f"/usr/bin/python3 -c {shlex.quote(opaque)} {folder}/upper/{empty}")
        lines.append(f"chmod 1777 {folder}/upper/tmp; mkdir -p {folder}/upper/usr/local/bin")
        lines.append(f"ln -s /usr/bin/python3 {folder}/upper/usr/local/bin/python")
    overlay = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
    lines += [
        f"mount -t overlay overlay -o {overlay} {folder}/root",
        f"echo {folder}/upper:{lower} > {folder}/lower",
        f"mount --rbind /dev {folder}/root/dev; mount --bind /proc {folder}/root/proc",
    ]
    for instruction, rest in stage.steps:
        if instruction == "RUN" and not rest.startswith("apt-get "):
            inner = f"chroot {folder}/root env -i HOME=/root PATH={PATH}"
            lines.append(f"{inner} sh -c {shlex.quote(rest)}")
        elif instruction == "ADD":
            into = rest.split()[-1]
            lines.append(
                f"mkdir -p {folder}/root{into}; tar xzf {shlex.quote(str(bundle))} -C {folder}/root{into}"
            )
        elif instruction == "COPY":
            source, path, into = rest.removeprefix("--from=").split()
            lines.append(f"mkdir -p {folder}/root{into}; cp -a $S/{source}/root{path}/. {folder}/root{into}/")
    return lines


_RUN = """
ip link set lo up
R=$S/{target}/root
for folder in models var/lib/mesh-llm tmp; do
    mount -t tmpfs volume "$R/$folder"
    chmod 1777 "$R/$folder"
done
cp -a {models}/. "$R/models/"
chmod -R a+rX "$R/models"
mount -o remount,ro,bind "$R"
{run} {start} & node=$!
trap 'kill $node 2>/dev/null || true' EXIT
tries=0
until {run} {check} >/dev/null 2>"$R/tmp/health"; do
    kill -0 $node || {{ echo "it ended before it was healthy" >&2; exit 1; }}
    tries=$((tries + 1))
    [ $tries -lt 120 ] || {{ cat "$R/tmp/health" >&2; exit 1; }}
    sleep 1
done
echo healthy
kill $node
status=0
wait $node || status=$?
echo "ended with $status"
"""
