"""What vLLM's workers are asked to do, or to say, by `collective_rpc`: functions of a worker."""

from __future__ import annotations

from typing import Any, NamedTuple

import serve.engine.backends.environment  # noqa: F401 - before vLLM

# isort: split
from vllm_alora import states
from vllm_alora.weights import slots

from guard.weights.head import State


class WorkerCounts(NamedTuple):
    """What a worker has done: tokens and steps computed, adapters copied into slots and read."""

    scheduled_tokens: int
    forward_passes: int
    swap_ins: int
    adapter_loads: int


def counts(worker: Any) -> WorkerCounts:
    """What it has done, warming up included. Not every engine has adapters."""
    runner = worker.model_runner
    manager = getattr(runner, "lora_manager", None)
    return WorkerCounts(
        scheduled_tokens=getattr(runner, "scheduled_tokens", 0),
        forward_passes=getattr(runner, "forward_passes", 0),
        swap_ins=getattr(getattr(manager, "_adapter_manager", None), "swap_ins", 0),
        adapter_loads=getattr(manager, "adapter_loads", 0),
    )


def zero_kv(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def forget_step(worker: Any) -> None:
    """Forget a step that was not sampled from: runner V1 would refuse to compute another."""
    worker.model_runner.execute_model_state = None


def forget_pointers(worker: Any) -> None:
    """Let go of what vLLM's low-rank kernels remember of its adapter slots."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:
        slots.forget_pointers(manager)


def in_slots(worker: Any) -> list[int]:
    return list(worker.model_runner.lora_manager._adapter_manager._active_adapters)


def gives_states(worker: Any) -> bool:
    return bool(states.gives_states(worker.model_runner))


def take_states(worker: Any) -> dict[str, State]:
    """The states of the prompts that the last step completed, by request id."""
    taken = states.take_states(worker.model_runner)
    return {request_id: state.numpy() for request_id, state in taken.items()}
