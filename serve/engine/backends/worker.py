"""What vLLM's workers are asked to do, or to say, by `collective_rpc`: functions of a worker."""

from __future__ import annotations

from typing import Any

import serve.engine.backends.environment  # noqa: F401 - before vLLM

# isort: split
from vllm_alora import states
from vllm_alora.weights import pointers

from guard.weights.head import State


def zero_kv(worker: Any) -> None:
    """Overwrite its keys and values."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def forget_step(worker: Any) -> None:
    """Forget a step that was computed and has not been sampled from: as long as it is there, runner
    V1 refuses to compute another one.
    """
    worker.model_runner.execute_model_state = None


def swap_ins(worker: Any) -> int:
    """How often it has copied an adapter into a slot."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:  # an engine without adapters: of heads, or of a merged rule
        return 0
    return getattr(manager._adapter_manager, "swap_ins", 0)


def adapter_loads(worker: Any) -> int:
    """How often it has read an adapter from disk."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    return getattr(manager, "adapter_loads", 0)


def scheduled_tokens(worker: Any) -> int:
    """How many tokens its steps have computed."""
    return getattr(worker.model_runner, "scheduled_tokens", 0)


def forward_passes(worker: Any) -> int:
    """How many of its steps have computed anything."""
    return getattr(worker.model_runner, "forward_passes", 0)


def forget_pointers(worker: Any) -> None:
    """Let go of what vLLM's low-rank kernels remember of its adapter slots."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:  # an engine of a merged rule has none
        pointers.forget_pointers(manager)


def in_slots(worker: Any) -> list[int]:
    """The ids of the adapters that it has in slots."""
    return list(worker.model_runner.lora_manager._adapter_manager._active_adapters)


def gives_states(worker: Any) -> bool:
    """Whether it keeps states for those who ask."""
    return bool(states.gives_states(worker.model_runner))


def take_states(worker: Any) -> dict[str, State]:
    """The states of the prompts that the last step completed, by request id."""
    taken = states.take_states(worker.model_runner)
    return {request_id: state.numpy() for request_id, state in taken.items()}
