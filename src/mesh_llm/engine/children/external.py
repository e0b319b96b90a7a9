"""Child: a llama-server that the user built, run as the bundled engine is.

Speaks the same lines as `serve`. It stays in between because llama-server does
not notice when its node dies: this process does, and takes it along.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

from mesh_llm.defaults import ENGINE_LOG_VERBOSITY, ENGINE_VERSION, INSPECT_TIMEOUT_S
from mesh_llm.engine.process import die_of, run, spawn
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import EngineMissing, MeshError
from mesh_llm.mesh_settings import ENGINE_OPTIONS, given_options

_VERSION = re.compile(r"\bbuild (\d+)|version: (\d+) \(")
"""`version: 0.6.0-dev (build 11549, commit …)`; before that it was `version: 11549 (…)`."""
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_WANTED = ENGINE_VERSION.rsplit(".", 1)[1]


async def check_version(bin_dir: Path) -> None:
    """Refuse a llama-server of another build: backends and links only fit the same one."""
    program = bin_dir / "llama-server"
    if not os.access(program, os.X_OK):
        raise EngineMissing(
            f"there is no llama-server in {bin_dir}",
            hint="--bin-dir takes the folder that llama.cpp's build made, often build/bin",
        )
    finished = await run([program, "--version"], timeout_s=INSPECT_TIMEOUT_S)
    match = _VERSION.search("\n".join((*finished.output, *finished.errors)))
    found = match[1] or match[2] if match else None
    if found != _WANTED:
        raise EngineMissing(
            f"llama-server in {bin_dir} is build {found or 'unknown'}; this mesh-llm needs build {_WANTED}",
            hint=f"check out llama.cpp's tag b{_WANTED} and build it again",
        )


def arguments(spec: EngineSpec) -> list[str]:
    """An `EngineSpec` as llama-server's command line; the key travels in the environment."""
    argv = ["--model", spec.model, "--alias", spec.alias, "--host", "127.0.0.1", "--port", "0"]
    argv += ["--ctx-size", str(spec.context), "--parallel", str(spec.slots), "--threads", str(spec.threads)]
    for name, value in given_options(spec, ENGINE_OPTIONS).items():
        argv += [ENGINE_OPTIONS[name].flag] if value is True else [ENGINE_OPTIONS[name].flag, str(value)]
    argv += ["--device", ",".join(spec.devices) or "none", "--n-gpu-layers", str(spec.gpu_layers)]
    for pattern in spec.overrides:
        argv += ["--override-tensor", f"{pattern}=CPU"]
    argv += ["--cache-ram", str(spec.prompt_cache_mib), "--fit", "off", "--offline", "--no-ui"]
    argv += ["--metrics", "--slots", "--log-verbosity", str(ENGINE_LOG_VERBOSITY)]
    if spec.batch is not None:
        argv += ["--batch-size", str(spec.batch)]
    if spec.micro_batch is not None:
        argv += ["--ubatch-size", str(spec.micro_batch)]
    if spec.rerank:
        argv += ["--reranking"]
    elif spec.embeddings:
        argv += ["--embeddings"]
    if spec.mmproj is not None:
        argv += ["--mmproj", spec.mmproj]
    for adapter in spec.adapters:
        argv += ["--lora-scaled", f"{adapter.path}:{adapter.scale}"]
    return argv


async def serve(spec: EngineSpec) -> int:
    assert spec.bin_dir is not None
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    # Told to end, it ends llama-server first and reaps it; by its default it would leave that to init.
    loop.add_signal_handler(signal.SIGTERM, gone.set)
    # The node holds the other end of stdin; its end is ours.
    lifeline = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lifeline), sys.stdin)

    def on_log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if match := _LISTENING.search(line):
            event = {"event": "ready", "port": int(match[1]), "pid": os.getpid()}
            print(json.dumps(event), flush=True)

    async def watch() -> None:
        await lifeline.read()
        gone.set()

    async with spawn(
        [Path(spec.bin_dir) / "llama-server", *arguments(spec)],
        on_stdout=on_log,
        on_stderr=on_log,
        env={"LLAMA_API_KEY": spec.key},
        own_session=False,
    ) as child:
        tasks = [asyncio.create_task(work) for work in (watch(), gone.wait(), child.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        status = 75 if gone.is_set() else await child.wait()
    transport.close()
    return status


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = EngineSpec.from_line(sys.stdin.readline())
    try:
        status = asyncio.run(serve(spec))
    except MeshError as error:
        print(json.dumps({"event": "failed", "cause": error.message}), flush=True)
        raise SystemExit(1) from None
    if status < 0:
        # So that the node reads the same status as from the bundled engine.
        die_of(-status)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
