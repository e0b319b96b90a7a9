"""Child: llama-server over one model, on a loopback port of its own.

1. reads one JSON line from stdin (`EngineSpec`); stdin then stays open, and its
   end means that the node is gone: the child ends, too, within a second;
2. loads the engine, its native libraries and the model;
3. prints one JSON line: `{"event": "ready", "port", "pid"}` or
   `{"event": "failed", "cause"}`; what the engine itself has to say goes to
   stderr;
4. prints `{"event": "link_failed", "name", "cause"}` for each worker that no
   longer works, at any time: requests fail then, and the engine lives on;
5. prints `{"event": "features_off", "sentences"}` where this engine lacks what our library builds on;
6. prints `{"event": "declined", "ops"}` where workers leave ops of their layers to the host;
7. prints `{"event": "stages", "stages"}` about once a second while workers
   compute: what each of them has done so far; and `{"event": "speculation", …}`
   while tokens are drafted.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mesh_llm.defaults import ENGINE_LOG_VERBOSITY, ENGINE_STAGES_S
from mesh_llm.engine.library import Engine, MeshLibrary
from mesh_llm.engine.spec import DraftSpec, EngineSpec, LinkSpec, StatesSpec
from mesh_llm.errors import EngineFailed, MeshError
from mesh_llm.mesh_settings import ENGINE_OPTIONS, given_options
from mesh_llm.third_party import features_off
from mesh_llm.types import Device, DeviceKind, SpeculationCounters, StageCounters

Report = Callable[[dict[str, Any]], None]

_ORPHANED = 75
_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 0.1
_STATES_OFF = (
    "saved states are off, a split model reads a text again where only its end has changed, "
    "or its slot was taken: the mesh-llm of a worker is too old to keep them"
)


def main() -> None:
    # A terminal's Ctrl-C is for the node, which drains first; the node then ends us with TERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = separate_stdout()
    spec = EngineSpec.from_line(sys.stdin.readline())
    serve_until_stopped(lambda: start(spec, report), report)


def serve_until_stopped(start: Callable[[], Any], report: Report) -> NoReturn:
    """Start a server, say where it listens or why it does not, and leave the rest to its threads."""
    try:
        server = start()
    except (MeshError, OSError, RuntimeError, ValueError) as error:
        report({"event": "failed", "cause": str(error)})
        # The engine's log says more, and is written by a thread that this end does not wait for.
        time.sleep(_LAST_WORDS_S)
        os._exit(1)
    port = urlsplit(server.listening_address).port
    report({"event": "ready", "port": port, "pid": os.getpid()})
    while True:
        signal.pause()


def separate_stdout() -> Report:
    """Keep stdout for our own lines: native code that prints to it lands in stderr instead."""
    ours = os.dup(1)
    os.dup2(2, 1)

    def report(event: dict[str, Any]) -> None:
        os.write(ours, json.dumps(event).encode() + b"\n")

    return report


def start(spec: EngineSpec, report: Report) -> Any:
    drafting, paced = spec.draft.depth > 0, spec.pace is not None
    engine, mesh = load_guarded(spec.library_paths(), overriding=bool(spec.links) or drafting or paced)
    if mesh is None:
        if spec.links:
            raise EngineFailed("the plan has links, but libggml-mesh is not built on this machine")
        return _serve(without_saved_drafts(without_eagle3(spec)), engine, directed=False)
    if off := features_off(symbol for symbol in mesh.engine_symbols() if symbol.name):
        report({"event": "features_off", "sentences": off})
    if spec.trace is not None:
        mesh.trace(spec.trace)
    if spec.pace is not None:
        mesh.pace(usual=spec.pace.usual, fewest=spec.pace.fewest, seconds=spec.pace.seconds)
    if spec.draft.head_depth > 0 and not keep_head(mesh, spec):
        spec = replace(spec, draft=replace(spec.draft, head_depth=0))
    if not mesh.can_replace("EAGLE3 head"):
        spec = without_eagle3(spec)
    draft = spec.draft
    directed = drafting and mesh.speculate(
        model_depth=draft.model_depth or draft.head_depth, text_depth=draft.text_depth
    )
    if not directed:
        spec = without_saved_drafts(spec)
    server = _serve_linked(spec, engine, mesh, report, directed=directed)
    if spec.links or directed:
        threading.Thread(target=watch, args=(mesh, spec, report), name="watch", daemon=True).start()
    return server


def _serve_linked(
    spec: EngineSpec, engine: Engine, mesh: MeshLibrary, report: Report, *, directed: bool
) -> Any:
    if not spec.links:
        return _serve(spec, engine, directed=directed)
    open_links(mesh, spec)
    if spec.states is not None and not keep_states(mesh, spec, spec.states, report):
        spec = replace(without_saved_drafts(spec), states=None)
    try:
        server = _serve(spec, engine, directed=directed)
    finally:
        # The engine says no more than that it failed; or that it did not, where a worker was lost at the end.
        failed = report_failures(mesh, dict(enumerate(spec.links)), report)
    if failed:
        raise EngineFailed("a worker was lost while the model was loading")
    # The engine has asked about every node of its largest graphs by now.
    if declined := [op for index, link in enumerate(spec.links) for op in mesh.declined(index, link.name)]:
        report({"event": "declined", "ops": [asdict(op) for op in declined]})
    if spec.states is not None:
        mesh.reserve_states([link.state_bytes for link in spec.links], spec.states.most_bytes)
    mesh.loaded()
    return server


def keep_head(mesh: MeshLibrary, spec: EngineSpec) -> bool:
    """Whether the model's own layer for further tokens can draft: on the host, wherever the others are."""
    if not mesh.can_replace("MTP head"):
        return False
    return not spec.links or mesh.keep_layers(spec.draft.head_layer, next(iter(spec.devices), "CPU"))


def without_eagle3(spec: EngineSpec) -> EngineSpec:
    """No EAGLE3 head: the engine alone would draft with it whether that pays or not."""
    if not spec.draft.reads_layers:
        return spec
    return replace(spec, draft=replace(spec.draft, model=None, model_depth=0, reads_layers=False))


def without_saved_drafts(spec: EngineSpec) -> EngineSpec:
    """No drafts that need saved states: nobody weighs what these cost, or they would cross a link."""
    return replace(spec, draft=DraftSpec()) if spec.draft.needs_states else spec


def keep_states(mesh: MeshLibrary, spec: EngineSpec, states: StatesSpec, report: Report) -> bool:
    """Whether what the engine saves can stay on the workers; if not, the node is told once."""
    kept = mesh.keep_states(int(spec.settings.get("n_ctx_checkpoints", states.checkpoints)))
    if not kept and mesh.can_replace("saved states"):
        report({"event": "features_off", "sentences": [_STATES_OFF]})
    return kept


def _serve(spec: EngineSpec, engine: Engine, *, directed: bool) -> Any:
    import xllamacpp  # after the native libraries and the links: importing it fixes the list of devices

    try:
        settings = parameters(xllamacpp, spec, engine.devices(), directed=directed)
    except AttributeError as error:
        raise EngineFailed(f"the engine ({engine.wheel.version}) has other settings: {error}") from error
    return xllamacpp.Server(settings)


def load_guarded(
    libraries: dict[str, Path], *, overriding: bool = False
) -> tuple[Engine, MeshLibrary | None]:
    """The engine and its libraries, in a process that ends when its node does.

    With `overriding` our library may stand in for functions of the engine's.
    """
    engine = Engine.load({}, overriding=libraries.get("mesh") if overriding else None)
    mesh = None
    if "mesh" in libraries:
        # Before anything slow: from here on no death of the node goes unnoticed.
        engine.load_backend("mesh", libraries["mesh"])
        mesh = MeshLibrary(libraries["mesh"])
        mesh.guard(0)
    else:
        _watch_from_python()
    for backend, path in libraries.items():
        if backend != "mesh":
            engine.load_backend(backend, path)
    return engine, mesh


def open_links(mesh: MeshLibrary, spec: EngineSpec) -> None:
    if spec.fingerprint:
        mesh.use_model(spec.fingerprint, spec.files, may_be_sent=spec.send_weights)
    for adapter in spec.adapters:
        mesh.use_adapter(adapter.digest, adapter.path)
    mesh.connect({link.name: link.fd for link in spec.links})
    for index, link in enumerate(spec.links):
        if link.next_number is not None and index + 1 < len(spec.links):
            mesh.link(index, index + 1, link.next_number)


def watch(mesh: MeshLibrary, spec: EngineSpec, report: Report) -> None:
    """Tell the node what workers and drafts do, and of each worker that is lost; while nobody asks, too."""
    watched = dict(enumerate(spec.links))
    told: list[StageCounters] = []
    drafts_told = SpeculationCounters()
    while watched or spec.draft.depth > 0:
        poller = select.poll()
        for link in watched.values():
            # Asked for nothing but the end of it: what a link carries is for the library to read.
            poller.register(link.fd, getattr(select, "POLLRDHUP", 0))
        poller.poll(1000 * ENGINE_STAGES_S)
        for index in report_failures(mesh, watched, report):
            del watched[index]
        stages = [mesh.stage(index) for index in range(len(spec.links))]
        if [stage.runs for stage in stages] != [stage.runs for stage in told]:
            names = [link.name for link in spec.links]
            lines = [{"link": name, **asdict(stage)} for name, stage in zip(names, stages, strict=True)]
            report({"event": "stages", "stages": lines})
            told = stages
        drafts = mesh.speculation()
        if drafts.steps != drafts_told.steps:
            report({"event": "speculation", **asdict(drafts)})
            drafts_told = drafts


def report_failures(mesh: MeshLibrary, links: dict[int, LinkSpec], report: Report) -> list[int]:
    """The indices of links that failed, after telling the node why."""
    causes = {index: mesh.failure(index) for index in links}
    failed = [index for index, cause in causes.items() if cause]
    for index in failed:
        report({"event": "link_failed", "name": links[index].name, "cause": causes[index]})
    return failed


def _watch_from_python() -> None:
    """Without our library: Linux signals the orphan; elsewhere it ends as soon as loading lets Python run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 64):
                pass
        os._exit(_ORPHANED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


_SAMPLING = {"top_k": 1 << 1, "top_p": 1 << 2, "min_p": 1 << 3, "temp": 1 << 6}
"""The engine's bits for what a person has set (common_params_sampling_config)."""


def parameters(xllamacpp: Any, spec: EngineSpec, devices: tuple[Device, ...], *, directed: bool) -> Any:
    """An `EngineSpec` in the engine's own terms; `directed`: what is drafted is decided in our library."""
    params = xllamacpp.CommonParams()
    params.model.path = spec.model
    params.model_alias = {spec.alias}
    params.n_ctx = spec.context
    params.n_parallel = spec.slots
    params.cpuparams.n_threads = spec.threads
    params.cpuparams_batch.n_threads = spec.threads
    if spec.batch is not None:
        params.n_batch = spec.batch
    if spec.micro_batch is not None:
        params.n_ubatch = spec.micro_batch
    for name, value in given_options(spec, ENGINE_OPTIONS).items():
        part, _, parameter = ENGINE_OPTIONS[name].parameter.rpartition(".")
        setattr(getattr(params, part) if part else params, parameter, _known(xllamacpp, parameter, value))
        # Else what the model's file says would count.
        params.sampling.user_sampling_config |= _SAMPLING.get(parameter, 0)
    params.tensor_split = tensor_split(spec.devices, devices, len(params.tensor_split))
    params.n_gpu_layers = spec.gpu_layers
    params.cache_ram_mib = spec.prompt_cache_mib
    params.embedding = spec.embeddings or spec.rerank
    if spec.rerank:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    if spec.mmproj is not None:
        params.mmproj.path = spec.mmproj
    if spec.adapters:
        info = xllamacpp.CommonAdapterLoraInfo
        params.lora_adapters = [info(adapter.path, adapter.scale) for adapter in spec.adapters]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [spec.key]
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.ui = False
    params.fit_params = False  # we have fitted it, over all machines; the engine knows only this one
    params.offline = True
    params.verbosity = ENGINE_LOG_VERBOSITY
    params.tensor_buft_overrides = ",".join(f"{pattern}=CPU" for pattern in spec.overrides)
    if spec.links:
        _split(params, spec, devices)
    if spec.draft.depth > 0:
        _draft(xllamacpp, params.speculative, spec, directed=directed)
    for key, value in spec.settings.items():
        setattr(params, key, value)
    return params


def _known(xllamacpp: Any, parameter: str, value: Any) -> Any:
    """An option's value in the engine's own terms."""
    match parameter:
        case "cache_type_k" | "cache_type_v":
            return cache_type(xllamacpp, value)
        case "reasoning_format":
            name = f"COMMON_REASONING_FORMAT_{value.upper().replace('-', '_')}"
            return getattr(xllamacpp.common_reasoning_format, name)
        case "default_template_kwargs":
            return {name: json.dumps(each) for name, each in json.loads(value).items()}
    return value


def _split(params: Any, spec: EngineSpec, devices: tuple[Device, ...]) -> None:
    """Layers on workers, after the host's own; embedding and output head stay here."""
    links = {link.name: link.layers for link in spec.links}
    own = [device for device in devices if device.name in spec.devices]
    shares = _own_shares(own, spec.gpu_layers) | links
    # The engine counts the head as one more layer, of the last device. The override keeps it on the host:
    # logits are large, and the way back would carry them for every token.
    shares[spec.links[-1].name] += 1
    params.n_gpu_layers = sum(shares.values())
    length = len(params.tensor_split)
    ordered = [float(shares.get(device.name, 0)) for device in devices if device.kind is not DeviceKind.CPU]
    params.tensor_split = (ordered + [0.0] * length)[:length]
    here = own[0].name if own else "CPU"
    drafts = spec.draft.head_depth > 0
    kept = kept_by_host(head_tied=spec.head_tied, head_on_worker=spec.head_on_worker, drafts=drafts)
    # Patterns that are searched for: unanchored, they would also find every layer's attn_output.weight.
    patterns = [f"^{re.escape(name)}$" for name in kept]
    if drafts:
        patterns.append(rf"^blk\.{spec.draft.head_layer}\.")
    kept_here = [f"{pattern}={here}" for pattern in patterns]
    params.tensor_buft_overrides = ",".join([*kept_here, *(f"{pattern}=CPU" for pattern in spec.overrides)])
    params.mmproj_use_gpu = False
    # States that are not kept on the workers would pull the whole cache over the links.
    params.cache_ram_mib = spec.states.prompt_cache_mib if spec.states else 0
    params.n_ctx_checkpoints = spec.states.checkpoints if spec.states else 0
    # A text is saved when its slot is taken, and not already when somebody else asks.
    params.cache_idle_slots = False


def kept_by_host(*, head_tied: bool, head_on_worker: bool, drafts: bool = False) -> list[str]:
    """Tensors outside of layers that the engine would give to the first or the last worker.

    `drafts`: a layer on the host drafts from what the output head reads.
    """
    # Gemma 3n and 4 use these before the first layer; all others are used after the last one.
    first = ["altup_proj.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight"]
    head = ["token_embd.weight" if head_tied else "output.weight", "output.bias"]
    norm = ["output_norm.weight"] if drafts else []
    return first if head_on_worker else first + head + norm


def _draft(xllamacpp: Any, speculative: Any, spec: EngineSpec, *, directed: bool) -> None:
    """What the engine may draft with; it makes room for the deepest draft of all."""
    kinds = xllamacpp.common_speculative_type
    draft, types = spec.draft, []
    if draft.head_depth > 0:
        types.append(kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP)
        # Of recurrent models the engine keeps as many states, so that this is all that it may be.
        speculative.draft.n_max = draft.head_depth
        speculative.draft.backend_sampling = False
    if draft.text_depth > 0 and (not directed or draft.model is None or draft.reads_layers):
        # Directed, it only gives our library its place: the engine's own look-up is never asked.
        types.append(kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE)
        speculative.ngram_simple.size_m = draft.text_depth
    if draft.model is not None:
        eagle3 = draft.reads_layers
        types.append(
            kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
            if eagle3
            else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        )
        speculative.draft.mparams.path = draft.model
        speculative.draft.n_max = draft.depth if directed and not eagle3 else draft.model_depth
        speculative.draft.backend_sampling = speculative.draft.backend_sampling and not eagle3
        # Where not a layer of the model went to the GPUs, nobody has counted on room for a draft there.
        devices = spec.devices if spec.gpu_layers or spec.links else ()
        speculative.draft.n_gpu_layers = -1 if devices else 0
        # Never on a worker: a draft that crosses a link for every token is none.
        speculative.draft.devices = ",".join(devices) or "none"
        speculative.draft.cpuparams.n_threads = spec.threads
        speculative.draft.cpuparams_batch.n_threads = spec.threads
    speculative.types = types


def _own_shares(devices: list[Device], layers: int) -> dict[str, int]:
    """The host's layers over its own GPUs, by their free memory."""
    free = sum(device.free_bytes for device in devices)
    shares = {device.name: layers * device.free_bytes // free for device in devices}
    for device in devices[: layers - sum(shares.values())]:
        shares[device.name] += 1
    return shares


def tensor_split(chosen: tuple[str, ...], devices: tuple[Device, ...], length: int) -> list[float]:
    """Shares by free memory of the chosen devices, none for the others.

    The wheel has no parameter for a list of devices. The engine counts
    everything but the CPU, in the order of registration.
    """
    shares = [
        device.free_bytes / (1 << 30) if device.name in chosen else 0.0
        for device in devices
        if device.kind is not DeviceKind.CPU
    ]
    return (shares + [0.0] * length)[:length]


def cache_type(xllamacpp: Any, name: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


if __name__ == "__main__":
    main()
