"""What a device's memory holds: weights, adapters in slots, keys and values. Nothing is measured.

The shares are the engine's own (`serve.engine.backends.arguments.shared_out`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from guard.errors import GuardError
from guard.recipe import ServingMemory
from serve.engine.backends.arguments import GIB, Sizes, shared_out
from serve.plan.device.architecture import DecoderShape


@dataclass(frozen=True)
class MemorySplit:
    """The parts of a device's memory in bytes, and how much each holds.

    `host_bytes`: the size of the adapters in host memory.
    """

    weights_bytes: int
    adapters_bytes: int
    cache_bytes: int
    workspace_bytes: int
    slots: int
    cache_tokens: int
    host_adapters: int
    host_bytes: int


def sizes_by_shape(
    shape: DecoderShape, adapter_tensors: Sequence[int], width: int, *, is_pinned: bool
) -> Sizes:
    """The bytes of the base, a token's keys and values, and an adapter.

    `adapter_tensors`: the number of weights in each of its tensors. `width`: the bytes of a number.
    `is_pinned`: whether host memory is pinned, as it is beside a GPU.
    """
    tensor_bytes = [weights * width for weights in adapter_tensors]
    host_bytes = tensor_bytes
    if is_pinned:
        host_bytes = [_pinned_bytes(size) for size in tensor_bytes]
    return Sizes(
        token=shape.key_value_width * width,
        adapter=sum(tensor_bytes),
        host_adapter=sum(host_bytes),
        weights=shape.weights * width,
    )


def _pinned_bytes(size: int) -> int:
    """What a pinned tensor takes: PyTorch pins powers of two."""
    return 1 << (size - 1).bit_length()


def split_memory(
    memory: ServingMemory,
    sizes: Sizes,
    adapters: int,
    context_tokens: int,
    *,
    slots: int | None = None,
    workspace_bytes: int = 0,
) -> MemorySplit:
    """The parts into which an engine splits its memory.

    `memory.device_gib`: the memory beside the base's weights. Raises GuardError where it cannot
    hold an adapter and one conversation of the full context.
    """
    if memory.device_gib is None:
        remedy = "State `memory_gib` in the plan"
        raise GuardError("how much memory serving may take is not known", remedy=remedy)
    shared = shared_out(memory, sizes, adapters, context_tokens, slots)
    host_adapters = min(adapters, max(shared.get("max_cpu_loras", adapters), shared["max_loras"]))
    cache_bytes = shared["kv_cache_memory_bytes"]
    return MemorySplit(
        weights_bytes=sizes.weights,
        adapters_bytes=shared["max_loras"] * sizes.adapter,
        cache_bytes=cache_bytes,
        workspace_bytes=workspace_bytes,
        slots=shared["max_loras"],
        cache_tokens=cache_bytes // sizes.token,
        host_adapters=host_adapters,
        host_bytes=host_adapters * sizes.host_adapter,
    )


def memory_left(memory_gib: float, sizes: Sizes, workspace_gib: float) -> float:
    """The GiB beside the base's weights and the workspace. Raises GuardError where none is left."""
    left = memory_gib - sizes.weights / GIB - workspace_gib
    if left <= 0:
        remedy = f"It needs {memory_gib - left:.1f} GiB and room for conversations"
        got = f"{memory_gib} GiB"
        raise GuardError("the base does not fit into the device's memory", got=got, remedy=remedy)
    return left
