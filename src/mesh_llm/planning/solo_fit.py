"""How a model lies in the memory of one machine: which devices, and how many layers on GPUs. Pure."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.errors import UsageError
from mesh_llm.frozen import frozen
from mesh_llm.planning.fit import (
    CacheSettings,
    compute_bytes,
    largest_context,
    layer_cache_bytes,
    memory_need,
    refusal,
)
from mesh_llm.types import Device, DeviceKind, MemoryNeed, ModelFacts


@frozen
class Fit:
    """How a model is going to lie in this machine's memory."""

    settings: CacheSettings
    need: MemoryNeed
    have_bytes: int
    devices: tuple[str, ...]
    gpu_layers: int

    @property
    def spare_bytes(self) -> int:
        return self.have_bytes - self.need.total_bytes


def choose_devices(wanted: tuple[str, ...] | None, present: tuple[Device, ...]) -> tuple[Device, ...]:
    """The GPUs to use, in the order of their names there; none means the CPU. Unknown names are refused.

    The CPU may stand behind them: a host uses it anyway, a worker lends main memory, too.
    """
    gpus = tuple(device for device in present if device.kind is not DeviceKind.CPU)
    if wanted is None:
        return tuple(device for device in gpus if device.kind is DeviceKind.GPU)
    if wanted in (("none",), ("CPU",)):
        return ()
    by_name = {device.name: device for device in gpus}
    wanted = tuple(name for name in wanted if name != "CPU")
    for name in wanted:
        if name not in by_name:
            known = ", ".join(["CPU", *by_name])
            raise UsageError(f"--device {name}: there is no such device", hint=f"this machine has {known}")
    return tuple(by_name[name] for name in dict.fromkeys(wanted))


def fit_solo(
    facts: ModelFacts,
    wish: CacheSettings | None,
    base: CacheSettings,
    *,
    memory_bytes: int,
    gpus: tuple[Device, ...],
    gpu_layers: int | None,
    cpu_moe: int = 0,
    max_memory_bytes: int | None = None,
) -> Fit:
    """Fit a model on this machine alone, or say why not.

    `wish` holds the context that was asked for; without it, `base` with the
    largest context that fits is taken. GPUs are filled first, the CPU takes the
    rest. `max_memory_bytes` bounds all of it together.
    """
    gpu_bytes = sum(device.free_bytes for device in gpus)
    have = memory_bytes + gpu_bytes
    if max_memory_bytes is not None:
        have = min(have, max_memory_bytes)
        # The embedding lies in main memory whatever the GPUs hold.
        gpu_bytes = min(gpu_bytes, max_memory_bytes - facts.embedding_bytes - facts.other_bytes)
    settings = wish
    if settings is None:
        context = largest_context(facts, base, have)
        if context is None:
            smallest = replace(base, context=min(512, facts.context_trained))
            raise refusal(facts, smallest, memory_need(facts, smallest), have)
        settings = replace(base, context=context)
    need = memory_need(facts, settings)
    if need.total_bytes > have:
        raise refusal(facts, settings, need, have)
    return Fit(
        settings=settings,
        need=need,
        have_bytes=have,
        devices=tuple(device.name for device in gpus),
        gpu_layers=_gpu_layers(facts, settings, gpu_bytes, gpu_layers, cpu_moe) if gpus else 0,
    )


def _gpu_layers(
    facts: ModelFacts, settings: CacheSettings, gpu_bytes: int, wanted: int | None, cpu_moe: int
) -> int:
    """How many layers, counted from the end as llama.cpp does, go to the GPUs; one more is the head."""
    if wanted is not None:
        return wanted
    left = (
        gpu_bytes
        - compute_bytes(facts, settings)
        - settings.beside_bytes(host=True)
        - max(facts.head_bytes, facts.embedding_bytes)
    )
    for start in range(len(facts.layers) + 1):
        need = sum(layer.weight_bytes + layer_cache_bytes(layer, settings) for layer in facts.layers[start:])
        need -= sum(layer.expert_bytes for layer in facts.layers[start : start + cpu_moe])
        if need <= left:
            return len(facts.layers) - start + (start == 0)
    return 0
