"""One vLLM engine in this process, whatever its model: adapters, sizes, counts, steps. Importing
this module imports vLLM, for seconds: only when the inputs are known to be good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import serve.engine.backends.environment  # noqa: F401 - before vLLM

# isort: split
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_alora import patched
from vllm_alora.adapter import AdapterError, AdapterFiles, check_adapter, read_adapter
from vllm_alora.arrival import active_from
from vllm_alora.handover import activated
from vllm_alora.weights.prefetch import failed_of

from guard.errors import GuardError, did_you_mean
from serve.engine.backend import Backend, BackendRequest, Loaded
from serve.engine.backends import worker
from serve.engine.score import EngineCounters

LOOK_S = 1.0  # seconds for which a look at an adapter's files counts

_open: set[int] = set()  # the backends of this process that are not closed


@contextlib.contextmanager
def _groups_kept() -> Iterator[None]:
    """Keep the process's communication groups, without which others can load no adapter."""
    module: Any = engine_core
    take_down = module.cleanup_dist_env_and_memory
    module.cleanup_dist_env_and_memory = lambda: None
    try:
        yield
    finally:
        module.cleanup_dist_env_and_memory = take_down


class VllmBackend(Backend):
    """One vLLM engine in this process, whatever its model: its adapters, sizes and counts.
    `backend.Backend` says what each verb does. `ours` are settings of our plugin for this engine.
    Raises GuardError if it does not start, or vLLM is not patched everywhere.
    """

    def __init__(self, engine_args: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        _check_known(engine_args)
        self._engine = _start(engine_args, ours)
        self._check_patched()
        self._set_sizes()
        # The core that the client asks; it is in this process, so requests need not be serialised.
        self._core: Any = getattr(self._engine.engine_core, "engine_core")  # noqa: B009
        _open.add(id(self))
        self._ids = itertools.count(1)  # of requests
        # A count of their own: runner V2 keeps them in 32 bits, and requests are billions in days.
        self._adapter_ids = itertools.count(1)
        # Adapter id -> what vLLM knows it by, and what its files said when it was loaded.
        self._loras: dict[int, tuple[LoRARequest, AdapterFiles]] = {}
        self._checked_at: dict[int, float] = {}  # adapter id -> when its files were looked at
        self._unreadable: dict[int, Exception] = {}
        self._step_s = 0.0
        self._warm_up = self._worker_counts()  # runner V2 warms up with steps like any other

    def _set_sizes(self) -> None:
        config = self._engine.vllm_config
        self.context_tokens = int(config.model_config.max_model_len)
        self.state_size = int(config.model_config.get_hidden_size())
        self.step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.block_size = int(config.cache_config.block_size)
        self.cache_tokens = int(config.cache_config.num_gpu_blocks or 0) * self.block_size
        self.slots, self.adapted_layers = 0, frozenset[str]()
        if config.lora_config is not None:  # vLLM may be started without adapters
            self.slots = int(config.lora_config.max_loras)
            self.adapted_layers = frozenset(config.lora_config.target_modules or ())

    def counters(self) -> EngineCounters:
        """What it has done since it was ready."""
        counts = self._worker_counts()
        return EngineCounters(
            adapter_loads=counts.adapter_loads,
            swap_ins=counts.swap_ins,
            scheduled_tokens=counts.scheduled_tokens - self._warm_up.scheduled_tokens,
            forward_passes=counts.forward_passes - self._warm_up.forward_passes,
            cache_tokens=self.cache_tokens,
            step_s=self._step_s,
        )

    def _worker_counts(self) -> worker.WorkerCounts:
        """The counts of workers that share the model: of each, the highest."""
        of_workers = self._engine.collective_rpc(worker.counts)
        return worker.WorkerCounts(*map(max, zip(*of_workers, strict=True)))

    def load(self, name: str, folder: Path) -> Loaded:
        """Make an adapter resident. Raises GuardError if vLLM refuses it."""
        # The id is never used again, so it never means another adapter.
        request = LoRARequest(name, next(self._adapter_ids), str(folder))
        config = self._engine.vllm_config
        try:
            adapter = read_adapter(request.lora_path)
            check_adapter(adapter, config.lora_config, config.model_config)
            self._engine.add_lora(request)
        except Exception as error:  # whatever vLLM's loader raises
            with contextlib.suppress(Exception):  # a half-loaded adapter must not stay
                self._engine.remove_lora(request.lora_int_id)
            problem = f"vLLM cannot load the adapter: {error}"
            raise GuardError(problem, where=folder, remedy="Run `make doctor`") from error
        self._loras[request.lora_int_id] = request, adapter
        return Loaded(request.lora_int_id, adapter.content)

    def unload(self, adapter: Loaded) -> None:
        self._engine.remove_lora(adapter.adapter_id)
        del self._loras[adapter.adapter_id]
        self._checked_at.pop(adapter.adapter_id, None)

    def in_slots(self) -> frozenset[int]:
        return frozenset[int]().union(*self._engine.collective_rpc(worker.in_slots))

    def unreadable(self) -> dict[int, Exception]:
        unreadable, self._unreadable = self._unreadable, {}
        return unreadable

    def forget(self) -> None:
        is_busy = self._core.scheduler.has_unfinished_requests()
        if is_busy or not self._engine.reset_prefix_cache():
            problem = "the prefix cache cannot be emptied while requests are in flight"
            raise GuardError(problem, remedy="Wait for them, or cancel them")

    def close(self) -> None:
        """Give the memory back. Nothing can be asked of it afterwards, but to close it again."""
        engine: LLMEngine | None = vars(self).pop("_engine", None)
        if engine is None:
            return
        vars(self).pop("_core", None)
        _open.discard(id(self))
        try:
            engine.collective_rpc(worker.forget_pointers)
        finally:  # whatever state a step has left the worker in
            with _groups_kept() if _open else contextlib.nullcontext():
                engine.engine_core.shutdown()
            # vLLM leaves keys, values and slots to whoever holds the engine: itself, in circles.
            # What the first collection frees still holds the embedding.
            del engine
            gc.collect()
            gc.collect()

    def _check_patched(self) -> None:
        bare = [target for target, is_patched in patched().items() if not is_patched]
        if bare:
            self.close()
            remedy = "Unset VLLM_PLUGINS or add alora to it, and run `make doctor`"
            got = f"not patched: {', '.join(bare)}"
            raise GuardError("vLLM runs without the aLoRA plugin", got=got, remedy=remedy)

    def _run_step(self) -> list[EngineCoreOutput]:
        """Run one batch; what vLLM says of the requests that it finished."""
        self._unreadable |= failed_of(self._core)  # from now on it is known that somebody asks
        started = time.perf_counter()
        outputs = self._engine.engine_core.get_output().outputs
        self._step_s += time.perf_counter() - started
        self._unreadable |= failed_of(self._core)
        return [output for output in outputs if output.finish_reason is not None]

    def _check_length(self, tokens: int, longest: int) -> None:
        if not 0 < tokens <= longest:
            problem = "the prompt is empty or does not fit the context"
            remedy = f"Ask with at least one token and at most {longest:,}"
            raise GuardError(problem, got=f"{tokens:,} tokens", remedy=remedy)

    def _activated(self, request: BackendRequest, prompt: Sequence[int]) -> LoRARequest | None:
        """The request's adapter, with where it acts. Raises ValueError if that is elsewhere."""
        if request.adapter is None:
            return None
        lora, adapter = self._loras[request.adapter.adapter_id]
        self._check_files(lora, adapter)
        start = active_from(prompt, adapter, lora.lora_name, request.activation_start)
        request_of_vllm: LoRARequest = activated(self._core, lora, start, adapter.content)
        return request_of_vllm

    def _check_files(self, lora: LoRARequest, adapter: AdapterFiles) -> None:
        """Raise AdapterError if the files changed and may have to be read again: a step that finds
        it fails for everybody in it. Looked at once in LOOK_S, as `stat` is a tenth of a rule's
        cost.
        """
        lora_config = self._engine.vllm_config.lora_config
        if lora_config is None or len(self._loras) <= (lora_config.max_cpu_loras or 0):
            return  # all stay in host memory
        now = time.monotonic()
        if now < self._checked_at.get(lora.lora_int_id, -LOOK_S) + LOOK_S:
            return
        if read_adapter(lora.lora_path).content != adapter.content:
            problem = "the adapter's files changed since it was loaded"
            remedy = "Serve it anew: POST /admin/rules/RULE, or `GuardEngine.serve`"
            raise AdapterError(problem, where=adapter.path, remedy=remedy)
        self._checked_at[lora.lora_int_id] = now


def _check_known(engine_args: Mapping[str, Any]) -> None:
    """Raise GuardError for an engine argument that vLLM does not have."""
    arguments = [field.name for field in dataclasses.fields(EngineArgs)]
    for key in engine_args:
        if key not in arguments:
            remedy = did_you_mean(key, arguments) or None
            raise GuardError(f"vLLM has no engine argument '{key}'", remedy=remedy)


def _start(engine_args: Mapping[str, Any], ours: Mapping[str, Any]) -> LLMEngine:
    """vLLM's engine with our plugin's settings."""
    args = dict(engine_args)
    args["additional_config"] = {**ours, **dict(args.get("additional_config") or {})}
    try:
        # A warning about vLLM's own use of PyTorch, which nobody else can fix.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return LLMEngine.from_engine_args(EngineArgs(**args))
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        problem, remedy = f"vLLM did not start: {str(error) or repr(error)}", _remedy(error)
        raise GuardError(problem, where=args.get("model"), remedy=remedy) from error


def _remedy(error: Exception) -> str:
    for kind in type(error).__mro__:
        if kind.__module__.startswith(("torch._dynamo", "torch._inductor")):
            return (
                "Write `enforce_eager: true` into the recipe's engine section to serve the model "
                "without compiling it"
            )
    return (
        "If it is short of memory, set a lower kv_cache_memory_bytes or gpu_memory_utilization in "
        "the recipe's engine section"
    )
