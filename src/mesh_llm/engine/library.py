"""Find and load the engine wheel and the native libraries beside it.

Only child processes call `load`: the wheel brings 100 MB of native code that
may crash, so the node itself never maps it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION
from mesh_llm.engine import cuda_mps
from mesh_llm.engine.diagnostics import sentence
from mesh_llm.errors import EngineFailed, EngineMissing
from mesh_llm.frozen import frozen
from mesh_llm.third_party import EngineSymbol
from mesh_llm.types import (
    DeclinedOp,
    Device,
    DeviceKind,
    Kernel,
    KernelSpeed,
    SpeculationCounters,
    Speed,
    StageCounters,
)

Signatures = dict[str, tuple[object, list[object]]]

# enum ggml_backend_dev_type, ggml-backend.h
_DEVICE_KINDS = {
    0: DeviceKind.CPU,
    1: DeviceKind.GPU,
    2: DeviceKind.INTEGRATED,
    3: DeviceKind.ACCELERATOR,
}


@frozen
class EngineWheel:
    version: str
    module: Path

    @property
    def build_number(self) -> int:
        """The llama.cpp build inside: the last part of the wheel's version."""
        return int(self.version.rsplit(".", 1)[1])


def find_wheel() -> EngineWheel:
    """The installed engine wheel, without importing it."""
    reinstall = "make setup from a clone, or pip install 'mesh-llm[engine]'"
    try:
        spec = importlib.util.find_spec(ENGINE_PACKAGE)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise EngineMissing(
            f"the engine ({ENGINE_PACKAGE} {ENGINE_VERSION}) is not installed", hint=reinstall
        )
    version = importlib.metadata.version(ENGINE_PACKAGE)
    if version != ENGINE_VERSION:
        raise EngineMissing(
            f"the engine installed is {ENGINE_PACKAGE} {version}; this mesh-llm needs {ENGINE_VERSION}",
            hint=reinstall,
        )
    folder = Path(spec.submodule_search_locations[0])
    modules = sorted(folder.glob(f"{ENGINE_PACKAGE}*.so"))
    if not modules:
        raise EngineMissing(f"the engine in {folder} has no native module for this platform", hint=reinstall)
    return EngineWheel(version=version, module=modules[0])


class Engine:
    """The wheel's native code, loaded into this process."""

    def __init__(self, wheel: EngineWheel, native: ctypes.CDLL) -> None:
        self.wheel = wheel
        self.native = native

    @classmethod
    def load(cls, libraries: dict[str, Path] | None = None, *, overriding: Path | None = None) -> Engine:
        """Load the wheel, then each native library (by backend name) over its own code.

        The wheel comes first and with global symbols: the libraries are linked
        against nothing and find ggml in it. Only `overriding` comes before
        it: of two functions with the same name the engine then uses that one's.
        """
        wheel = find_wheel()
        if overriding is not None:
            _load_lazily(overriding)
        native = ctypes.CDLL(str(wheel.module), ctypes.RTLD_GLOBAL)
        _declare(native)
        engine = cls(wheel, native)
        for backend, path in (libraries or {}).items():
            engine.load_backend(backend, path)
        return engine

    def load_backend(self, backend: str, path: Path) -> None:
        if backend == "cpu":
            # ggml takes the first CPU device it knows, so the wheel's own has to go before ours comes.
            registered = self.native.ggml_backend_reg_by_name(b"CPU")
            if registered:
                self.native.ggml_backend_unload(registered)
        if not self.native.ggml_backend_load(str(path).encode()):
            raise EngineMissing(
                f"the engine refused to load {path}{_refusal(path)}",
                hint="mesh-llm engine build --force rebuilds it",
            )

    def devices(self) -> tuple[Device, ...]:
        count = self.native.ggml_backend_dev_count()
        return tuple(self._device(self.native.ggml_backend_dev_get(i)) for i in range(count))

    def _device(self, handle: int) -> Device:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.native.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        kind = self.native.ggml_backend_dev_type(handle)
        name = self.native.ggml_backend_dev_name(handle).decode()
        return Device(
            name=name,
            description=self.native.ggml_backend_dev_description(handle).decode(errors="replace"),
            kind=_DEVICE_KINDS.get(kind, DeviceKind.ACCELERATOR),
            free_bytes=free.value,
            total_bytes=total.value,
            mps=name.startswith("CUDA") and cuda_mps.serves_this_user(),
        )

    def cpu_features(self) -> tuple[str, ...]:
        """Instruction sets that the loaded CPU code was compiled for."""
        registered = self.native.ggml_backend_reg_by_name(b"CPU")
        if not registered:
            return ()
        getter = self.native.ggml_backend_reg_get_proc_address(registered, b"ggml_backend_get_features")
        if not getter:
            return ()
        prototype = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)
        feature = prototype(getter)(registered)
        names = []
        index = 0
        while feature[index].name:
            if feature[index].value not in (b"0", None):
                names.append(feature[index].name.decode())
            index += 1
        return tuple(names)


def _refusal(path: Path) -> str:
    """What the loader has to say, which ggml tells its log alone; nothing where it was the engine's word."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f": {str(error).removeprefix(f'{path}: ')}"
    return ""


def _load_lazily(path: Path) -> None:
    """Into the global symbols, its own ones left open, which ctypes cannot. May fail without harm."""
    this_process = ctypes.CDLL(None)
    this_process.dlopen.restype = ctypes.c_void_p
    this_process.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    this_process.dlopen(str(path).encode(), os.RTLD_LAZY | os.RTLD_GLOBAL)


@frozen
class Measurement:
    speed: Speed
    disturbed: bool
    """Others used the processor all the while: the device can do more than that."""


@frozen
class KernelMeasurement:
    speed: KernelSpeed
    disturbed: bool


class MeshLibrary:
    """The C API of our own library; `Engine.load` has loaded it as a backend already."""

    def __init__(self, path: Path) -> None:
        self.native = ctypes.CDLL(str(path))
        _declare_mesh(self.native)
        made_for = self.native.ggml_mesh_engine_version().decode()
        if made_for != ENGINE_VERSION:
            raise EngineMissing(
                f"{path} was made for engine {made_for}; this mesh-llm needs {ENGINE_VERSION}",
                hint="mesh-llm engine build --force rebuilds it",
            )

    def guard(self, descriptor: int) -> None:
        """End this process when the other end of `descriptor` closes, even while it loads a model."""
        if code := self.native.ggml_mesh_guard(descriptor):
            raise OSError(code, f"cannot watch descriptor {descriptor}")

    def selftest(self, registry: str | None) -> None:
        """Check the CPU's arithmetic, or that of all devices which ggml has under a name. Blocks."""
        why = _Reason()
        if self.native.ggml_mesh_selftest(registry.encode() if registry else None, *why.arguments):
            raise EngineMissing(why.text)

    def measure(self, device: str, *, threads: int, memory_bytes: int) -> Measurement:
        """What a device can do, within two seconds or so and so much memory. Blocks."""
        why, speed = _Reason(), _Speed()
        if self.native.ggml_mesh_measure(
            device.encode(), threads, memory_bytes, ctypes.byref(speed), *why.arguments
        ):
            raise EngineFailed(why.text)
        return Measurement(
            speed=Speed(
                read_bytes_per_s=speed.read_bytes_per_s,
                flops_per_s=speed.flops_per_s,
                attention_per_s=speed.attention_per_s,
            ),
            disturbed=bool(speed.disturbed),
        )

    def measure_kernel(
        self, device: str, kernel: Kernel, *, threads: int, memory_bytes: int
    ) -> KernelMeasurement:
        """What a device can do with a part of a model, within a fifth of a second or so. Blocks."""
        why, speed = _Reason(), _ShapeSpeed()
        shape = _Shape(kernel.kind.encode(), kernel.width, kernel.rows, kernel.experts, kernel.used)
        if self.native.ggml_mesh_measure_shape(
            device.encode(), threads, memory_bytes, ctypes.byref(shape), ctypes.byref(speed), *why.arguments
        ):
            raise EngineFailed(why.text)
        return KernelMeasurement(
            speed=KernelSpeed(
                kernel=kernel, read_bytes_per_s=speed.read_bytes_per_s, flops_per_s=speed.flops_per_s
            ),
            disturbed=bool(speed.disturbed),
        )

    # -- the host's side -----------------------------------------------------------------------

    def use_model(self, fingerprint: str, files: Sequence[str], *, may_be_sent: bool) -> None:
        """Weights of this model are asked for by name from now on; sent, if at all, to one without it."""
        why = _Reason()
        if self.native.ggml_mesh_use_model(
            fingerprint.encode(), *_strings(files), may_be_sent, *why.arguments
        ):
            raise EngineFailed(why.text)

    def use_adapter(self, digest: str, file: str) -> None:
        """Tensors of this LoRA adapter are asked for by name, too; several in the order of their loading."""
        why = _Reason()
        if self.native.ggml_mesh_use_adapter(digest.encode(), os.fsencode(file), *why.arguments):
            raise EngineFailed(why.text)

    def connect(self, workers: dict[str, int]) -> None:
        """A device for each worker, by its name, at the other end of a socket that the library then owns."""
        why = _Reason()
        sockets = (ctypes.c_int * len(workers))(*workers.values())
        if self.native.ggml_mesh_connect(sockets, *_strings(list(workers)), *why.arguments):
            raise EngineFailed(why.text)

    def link(self, source: int, target: int, peer: int) -> None:
        self.native.ggml_mesh_link(source, target, peer)

    def loaded(self) -> None:
        """The model is loaded: results that cannot be read fail their requests from here on."""
        self.native.ggml_mesh_loaded()

    def failure(self, index: int) -> str:
        """Why the device at `index` no longer works; empty while it does."""
        why = _Reason()
        self.native.ggml_mesh_failure(index, *why.arguments)
        return why.text

    def stage(self, index: int) -> StageCounters:
        counters = _Stage()
        self.native.ggml_mesh_stage_counters(index, ctypes.byref(counters))
        return StageCounters(**{name: getattr(counters, name) for name in _STAGE_SUMS + _STAGE_LATEST})

    def declined(self, index: int, link: str) -> list[DeclinedOp]:
        """Ops of its own layers that the device at `index`, called `link`, leaves to the host."""
        found: list[DeclinedOp] = []
        op = _Declined()
        while self.native.ggml_mesh_declined_op(index, len(found), ctypes.byref(op)) == 0:
            node = op.node.decode(errors="replace")
            found.append(DeclinedOp(link=link, op=op.op.decode(), node=node, layers=op.layers))
        return found

    def speculate(self, *, model_depth: int, text_depth: int) -> bool:
        """Decide what the engine drafts, from now on; False where it has to be left to itself."""
        return bool(self.native.ggml_mesh_speculate(model_depth, text_depth) == 0)

    def keep_layers(self, first: int, device: str) -> bool:
        """The layers from that one on stay on a device of the host's; False where that cannot be."""
        return bool(self.native.ggml_mesh_keep_layers(first, device.encode()) == 0)

    def pace(self, *, usual: int, fewest: int, seconds: float) -> None:
        """Read prompts for no longer than that between two tokens of others, where the engine can be told."""
        self.native.ggml_mesh_pace(usual, fewest, seconds)

    def keep_states(self, checkpoints: int) -> bool:
        """Keep what the engine saves on the workers; False where it must save nothing."""
        return bool(self.native.ggml_mesh_keep_states(checkpoints) == 0)

    def reserve_states(self, least: Sequence[int], most: int) -> None:
        """The model is loaded: memory for that on each worker, in their order."""
        self.native.ggml_mesh_reserve_states((ctypes.c_ulonglong * len(least))(*least), len(least), most)

    def speculation(self) -> SpeculationCounters:
        counters = _Speculation()
        self.native.ggml_mesh_speculation_counters(ctypes.byref(counters))
        return SpeculationCounters(**{name: getattr(counters, name) for name, _ in counters._fields_})

    def engine_symbols(self) -> tuple[EngineSymbol, ...]:
        """Functions of the engine that the library knows by name, looked up in the one that is loaded."""
        known: list[EngineSymbol] = []
        symbol = _Symbol()
        while self.native.ggml_mesh_engine_symbol(len(known), ctypes.byref(symbol)) == 0:
            texts = {name: getattr(symbol, name).decode() for name in _SYMBOL_TEXTS}
            known.append(EngineSymbol(**texts, replaced=bool(symbol.replaced), found=bool(symbol.found)))
        return tuple(known)

    def can_replace(self, feature: str) -> bool:
        """Whether the engine that is loaded has all that a feature builds on."""
        return all(symbol.found for symbol in self.engine_symbols() if symbol.feature == feature)

    def trace(self, path: str) -> None:
        """Append a line to a file for each frame that is sent or received from now on."""
        self.native.ggml_mesh_trace(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))

    # -- the worker's side ---------------------------------------------------------------------

    def new_worker(self, device: str, *, threads: int, quota_bytes: int) -> WorkerHandle:
        why = _Reason()
        handle = self.native.ggml_mesh_worker_new(device.encode(), threads, quota_bytes, *why.arguments)
        if not handle:
            raise EngineFailed(why.text)
        return WorkerHandle(self.native, handle)


class WorkerHandle:
    """A device of this machine that is lent to clients; lives as long as the process."""

    def __init__(self, native: ctypes.CDLL, handle: int) -> None:
        self._native = native
        self._handle = handle
        self._chosen: Any = None
        """Kept: native code calls it."""

    def add_model(self, fingerprint: str, files: Sequence[str]) -> None:
        why = _Reason()
        if self._native.ggml_mesh_worker_add_model(
            self._handle, fingerprint.encode(), *_strings(files), *why.arguments
        ):
            raise EngineFailed(why.text)

    def add_part(self, fingerprint: str, files: Sequence[str], tensors: Sequence[str]) -> None:
        """The same for files with holes: only these tensors are there."""
        why = _Reason()
        if self._native.ggml_mesh_worker_add_part(
            self._handle, fingerprint.encode(), *_strings(files), *_strings(tensors), *why.arguments
        ):
            raise EngineFailed(why.text)

    def prepare(self, fingerprint: str, first: int, last: int, progress: Callable[[int, int], None]) -> None:
        """Read layers `first` to `last` (not included) into memory. Blocks.

        `progress` gets bytes, done and in all.
        """
        why = _Reason()
        if self._native.ggml_mesh_worker_prepare(
            self._handle, fingerprint.encode(), first, last, _PROGRESS(progress), *why.arguments
        ):
            raise EngineFailed(why.text)

    def unload(self, fingerprint: str) -> int:
        """Drop a model's weights that nobody uses, and return their bytes."""
        dropped: int = self._native.ggml_mesh_worker_unload(self._handle, fingerprint.encode())
        return dropped

    def poison(self) -> None:
        """For tests: results depend on nothing that a graph left behind, or they are not numbers."""
        self._native.ggml_mesh_worker_poison(self._handle)

    def use_main_memory(self, pattern: str, layers: int | None, quota_bytes: int) -> None:
        """Weights whose names match lie there, of the first so many layers that are prepared, or of all."""
        search = re.compile(pattern).search
        self._chosen = _CHOSEN(lambda name: search(name.decode(errors="replace")) is not None)
        count = -1 if layers is None else layers
        self._native.ggml_mesh_worker_use_main_memory(self._handle, self._chosen, count, quota_bytes)

    def lack(self, op: str) -> None:
        """For tests: the worker knows no op of this name."""
        if self._native.ggml_mesh_worker_lack(self._handle, op.encode()):
            raise EngineFailed(f"there is no op {op}")

    def resident_bytes(self) -> int:
        resident: int = self._native.ggml_mesh_worker_resident(self._handle)
        return resident

    def add_peer(self, number: int, descriptor: int) -> None:
        if self._native.ggml_mesh_worker_add_peer(self._handle, number, descriptor):
            raise EngineFailed(f"the link to worker {number} cannot be used")

    def drop_peer(self, number: int) -> None:
        self._native.ggml_mesh_worker_drop_peer(self._handle, number)

    def serve(self, descriptor: int) -> str:
        """Serve one client until it leaves, and return what it did wrong, if anything. Blocks."""
        why = _Reason()
        self._native.ggml_mesh_worker_serve(self._handle, descriptor, *why.arguments)
        return why.text


class _Reason:
    """Room for the sentence that a failing call leaves."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(500)

    @property
    def arguments(self) -> tuple[ctypes.Array[ctypes.c_char], int]:
        return self._buffer, len(self._buffer)

    @property
    def text(self) -> str:
        return sentence(self._buffer.value.decode(errors="replace"))


def _strings(values: Sequence[str]) -> tuple[ctypes.Array[ctypes.c_char_p], int]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values)), len(values)


_STAGE_SUMS = (
    *("runs", "compute_ns", "wait_ns", "sent_bytes", "received_bytes"),
    *("worker_in_bytes", "worker_out_bytes", "weight_bytes"),
)
_STAGE_LATEST = ("queued", "in_flight")


class _Stage(ctypes.Structure):
    """struct ggml_mesh_stage"""

    _fields_ = (
        *((name, ctypes.c_ulonglong) for name in _STAGE_SUMS),
        *((name, ctypes.c_uint) for name in _STAGE_LATEST),
    )


class _Declined(ctypes.Structure):
    """struct ggml_mesh_declined"""

    _fields_ = (("op", ctypes.c_char * 32), ("node", ctypes.c_char * 64), ("layers", ctypes.c_uint))


_SYMBOL_TEXTS = ("name", "feature", "without")


class _Symbol(ctypes.Structure):
    """struct ggml_mesh_symbol"""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in _SYMBOL_TEXTS),
        *((name, ctypes.c_int) for name in ("replaced", "found")),
    )


class _Speculation(ctypes.Structure):
    """struct ggml_mesh_speculation"""

    _fields_ = (
        ("steps", ctypes.c_ulonglong),
        ("tokens", ctypes.c_ulonglong),
        ("drafted", ctypes.c_ulonglong),
        ("accepted", ctypes.c_ulonglong),
        ("text_drafted", ctypes.c_ulonglong),
        ("text_accepted", ctypes.c_ulonglong),
        ("seconds", ctypes.c_double),
        ("plain_seconds", ctypes.c_double),
        ("depth", ctypes.c_uint),
    )


class _Speed(ctypes.Structure):
    """struct ggml_mesh_speed"""

    _fields_ = (
        ("read_bytes_per_s", ctypes.c_double),
        ("flops_per_s", ctypes.c_double),
        ("attention_per_s", ctypes.c_double),
        ("disturbed", ctypes.c_int),
    )


class _Shape(ctypes.Structure):
    """struct ggml_mesh_shape"""

    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("width", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("used", ctypes.c_int64),
    )


class _ShapeSpeed(ctypes.Structure):
    """struct ggml_mesh_shape_speed"""

    _fields_ = (
        ("read_bytes_per_s", ctypes.c_double),
        ("flops_per_s", ctypes.c_double),
        ("disturbed", ctypes.c_int),
    )


_CHOSEN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_PROGRESS = ctypes.CFUNCTYPE(None, ctypes.c_ulonglong, ctypes.c_ulonglong)


class _Feature(ctypes.Structure):
    """struct ggml_backend_feature; the list ends with a null name."""

    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def _declare_mesh(native: ctypes.CDLL) -> None:
    pointer, text, size, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
    texts = ctypes.POINTER(text)
    _apply(
        native,
        {
            "ggml_mesh_engine_version": (text, []),
            "ggml_mesh_guard": (number, [number]),
            "ggml_mesh_selftest": (number, [text, text, size]),
            "ggml_mesh_measure": (
                number,
                [text, number, ctypes.c_ulonglong, ctypes.POINTER(_Speed), text, size],
            ),
            "ggml_mesh_measure_shape": (
                number,
                [
                    *(text, number, ctypes.c_ulonglong),
                    *(ctypes.POINTER(_Shape), ctypes.POINTER(_ShapeSpeed)),
                    *(text, size),
                ],
            ),
            "ggml_mesh_use_model": (number, [text, texts, size, number, text, size]),
            "ggml_mesh_use_adapter": (number, [text, text, text, size]),
            "ggml_mesh_connect": (number, [ctypes.POINTER(number), texts, size, text, size]),
            "ggml_mesh_link": (None, [number, number, ctypes.c_uint]),
            "ggml_mesh_loaded": (None, []),
            "ggml_mesh_failure": (size, [number, text, size]),
            "ggml_mesh_declined_op": (number, [number, size, ctypes.POINTER(_Declined)]),
            "ggml_mesh_stage_counters": (number, [number, ctypes.POINTER(_Stage)]),
            "ggml_mesh_speculate": (number, [number, number]),
            "ggml_mesh_keep_layers": (number, [number, ctypes.c_char_p]),
            "ggml_mesh_pace": (number, [ctypes.c_uint, ctypes.c_uint, ctypes.c_double]),
            "ggml_mesh_keep_states": (number, [ctypes.c_uint]),
            "ggml_mesh_reserve_states": (
                None,
                [ctypes.POINTER(ctypes.c_ulonglong), size, ctypes.c_ulonglong],
            ),
            "ggml_mesh_speculation_counters": (number, [ctypes.POINTER(_Speculation)]),
            "ggml_mesh_engine_symbol": (number, [size, ctypes.POINTER(_Symbol)]),
            "ggml_mesh_trace": (None, [number]),
            "ggml_mesh_worker_prepare": (number, [pointer, text, number, number, _PROGRESS, text, size]),
            "ggml_mesh_worker_unload": (ctypes.c_ulonglong, [pointer, text]),
            "ggml_mesh_worker_poison": (None, [pointer]),
            "ggml_mesh_worker_lack": (number, [pointer, text]),
            "ggml_mesh_worker_use_main_memory": (None, [pointer, _CHOSEN, number, ctypes.c_ulonglong]),
            "ggml_mesh_worker_resident": (ctypes.c_ulonglong, [pointer]),
            "ggml_mesh_worker_new": (pointer, [text, number, ctypes.c_ulonglong, text, size]),
            "ggml_mesh_worker_add_model": (number, [pointer, text, texts, size, text, size]),
            "ggml_mesh_worker_add_part": (number, [pointer, text, texts, size, texts, size, text, size]),
            "ggml_mesh_worker_add_peer": (number, [pointer, ctypes.c_uint, number]),
            "ggml_mesh_worker_drop_peer": (None, [pointer, ctypes.c_uint]),
            "ggml_mesh_worker_serve": (number, [pointer, number, text, size]),
        },
    )


def _declare(native: ctypes.CDLL) -> None:
    """Argument and result types: ctypes assumes int, which cuts pointers in half."""
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures: Signatures = {
        "ggml_backend_reg_by_name": (pointer, [text]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, text]),
        "ggml_backend_unload": (None, [pointer]),
        "ggml_backend_load": (pointer, [text]),
        "ggml_backend_dev_count": (size, []),
        "ggml_backend_dev_get": (pointer, [size]),
        "ggml_backend_dev_name": (text, [pointer]),
        "ggml_backend_dev_description": (text, [pointer]),
        "ggml_backend_dev_type": (ctypes.c_int, [pointer]),
        "ggml_backend_dev_memory": (
            None,
            [pointer, ctypes.POINTER(size), ctypes.POINTER(size)],
        ),
    }
    _apply(native, signatures)


def _apply(native: ctypes.CDLL, signatures: Signatures) -> None:
    for name, (result, arguments) in signatures.items():
        function = getattr(native, name, None)
        if function is None:
            raise EngineMissing(f"{native._name} has no function {name}: it is of another version")
        function.restype = result
        function.argtypes = arguments
