"""vLLM's engine in this process: token ids in, one logit out. Knows nothing of rules, conversations
or cards.

Importing this module imports vLLM, which takes seconds; import it only when the inputs are known to
be good.
"""

# ruff: noqa: E402 - vLLM must find its settings when it is imported
from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def _cpu_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Read by vLLM when it is imported, so set first. In this process, because a verdict is a single
# step, so two processes would have nothing to do at the same time; and because an error in the
# engine is then an exception to its caller and not a dead process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Without it vLLM sets torch to one thread: it expects the model on a GPU, or in processes that set
# their own.
os.environ.setdefault("OMP_NUM_THREADS", str(_cpu_cores()))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# vLLM warns before it has read its own setting.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
# Triton is of no use on a CPU, and nothing here asks for it.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request
from vllm_alora import patched
from vllm_alora.adapter import AdapterError, AdapterFiles, check_adapter, read_adapter
from vllm_alora.answers import ANSWERS
from vllm_alora.arrival import active_from
from vllm_alora.handover import activated
from vllm_alora.kv.followers import follow
from vllm_alora.kv.resident import RESIDENT_FIRST
from vllm_alora.shared_prompt import Prefix, SharedPrompt
from vllm_alora.states import STATE, gives_states, take_states
from vllm_alora.weights.pointers import forget_pointers
from vllm_alora.weights.prefetch import failed_of
from vllm_alora.weights.slots import heat_of

from guard.errors import GuardError, did_you_mean
from guard.head import State
from serve.engine.backend import Backend, BackendRequest, EngineOutput, Loaded

LOOK_S = 1.0  # how long a request may go by a look at an adapter's files


def _zero_kv(worker: Any) -> None:
    """On a worker: overwrite its keys and values."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _swap_ins(worker: Any) -> int:
    """On a worker: how often it has copied an adapter into a slot."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:  # an engine without adapters: of heads, or of a merged rule
        return 0
    return getattr(manager._adapter_manager, "swap_ins", 0)


def _adapter_loads(worker: Any) -> int:
    """On a worker: how often it has read an adapter from disk."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    return getattr(manager, "adapter_loads", 0)


def _scheduled_tokens(worker: Any) -> int:
    """On a worker: how many tokens its steps have computed."""
    return getattr(worker.model_runner, "scheduled_tokens", 0)


def _forget_pointers(worker: Any) -> None:
    """On a worker: let go of what vLLM's low-rank kernels remember of its adapter slots."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is not None:  # an engine of a merged rule has none
        forget_pointers(manager)


def _keep(worker: Any, adapter_id: int) -> None:
    """On a worker: the adapter is the last to be evicted from its slot."""
    heat_of(worker.model_runner.lora_manager._adapter_manager).kept.add(adapter_id)


def _in_slots(worker: Any) -> list[int]:
    """On a worker: the ids of the adapters that it has in slots."""
    return list(worker.model_runner.lora_manager._adapter_manager._active_adapters)


def _gives_states(worker: Any) -> bool:
    """On a worker: whether it keeps states for those who ask."""
    return bool(gives_states(worker.model_runner))


def _take_states(worker: Any) -> dict[str, State]:
    """On a worker: the states of the prompts that the last step completed, by request id."""
    states = take_states(worker.model_runner)
    return {request_id: state.numpy() for request_id, state in states.items()}


_open: set[int] = set()  # the backends of this process that are not closed


@contextlib.contextmanager
def _groups_kept() -> Iterator[None]:
    """Keep the process's communication groups, which vLLM takes down with an engine.

    Without them the other engines of the process can load no adapter.
    """
    module: Any = engine_core
    take_down = module.cleanup_dist_env_and_memory
    module.cleanup_dist_env_and_memory = lambda: None
    try:
        yield
    finally:
        module.cleanup_dist_env_and_memory = take_down


class VllmBackend(Backend):
    """One vLLM engine in this process, whatever its model (`backend.Backend` says what each verb
    does): its adapters, sizes and counts.

    `ours` are settings of our plugin for this engine.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], ours: Mapping[str, Any], *, needs_seams: bool = True
    ) -> None:
        _check_known(engine_args)
        self._engine = _start(engine_args, ours)
        if needs_seams:
            self._check_patched()
        # The one that the client asks: in this process, so that requests need not be packed.
        self._core: Any = getattr(self._engine.engine_core, "engine_core")  # noqa: B009
        _open.add(id(self))
        self._ids = itertools.count(1)
        # Adapter id -> what vLLM knows it by, and what its files said when it was loaded.
        self._loras: dict[int, tuple[LoRARequest, AdapterFiles]] = {}
        self._looked: dict[int, float] = {}  # adapter id -> when its files were looked at
        self._unreadable: dict[int, Exception] = {}
        self._step_s = 0.0
        # Runner V2 warms up with steps like any other.
        self._warm_up_tokens = max(self._engine.collective_rpc(_scheduled_tokens))

    @functools.cached_property
    def context_tokens(self) -> int:
        """Tokens that a prompt and its one token of answer have at most."""
        return int(self._engine.vllm_config.model_config.max_model_len)

    @property
    def slots(self) -> int:
        """How many adapters a step can use; none where vLLM was started without adapters."""
        lora_config = self._engine.vllm_config.lora_config
        return int(lora_config.max_loras) if lora_config else 0

    @property
    def adapted_layers(self) -> frozenset[str]:
        """The last names of the layers that slots were prepared for; empty where all are."""
        lora_config = self._engine.vllm_config.lora_config
        return frozenset(lora_config.target_modules or ()) if lora_config else frozenset()

    @property
    def block_size(self) -> int:
        """Tokens of one block of the prefix cache."""
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def step_tokens(self) -> int:
        """Tokens that a step computes at most."""
        return int(self._engine.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks or 0) * self.block_size

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed since the start, those that were computed again included."""
        tokens = max(self._engine.collective_rpc(_scheduled_tokens))
        return int(tokens - self._warm_up_tokens)

    @property
    def swap_ins(self) -> int:
        """How often an adapter was copied into a slot since the start."""
        return int(max(self._engine.collective_rpc(_swap_ins)))

    @property
    def adapter_loads(self) -> int:
        """How often an adapter was read from disk since the start."""
        return int(max(self._engine.collective_rpc(_adapter_loads)))

    @property
    def step_s(self) -> float:
        """Seconds spent in vLLM's steps since the start."""
        return self._step_s

    @property
    def state_size(self) -> int:
        """The base's hidden size."""
        return int(self._engine.vllm_config.model_config.get_hidden_size())

    def load(self, name: str, folder: Path) -> Loaded:
        """Make an adapter resident. Raises GuardError if vLLM refuses it; the engine is as it was
        before.
        """
        # The id is never used again: a removed adapter has no heir.
        request = LoRARequest(name, next(self._ids), str(folder))
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
        """Free the adapter's memory."""
        self._engine.remove_lora(adapter.adapter_id)
        del self._loras[adapter.adapter_id]
        self._looked.pop(adapter.adapter_id, None)

    def pin(self, adapter: Loaded) -> None:
        """Let the adapter be the last to be evicted from its slot.

        vLLM's own pinning is not used: a step that needs as many others as there are slots fails.
        """
        keep = functools.partial(_keep, adapter_id=adapter.adapter_id)
        self._engine.collective_rpc(keep)

    def in_slots(self) -> frozenset[int]:
        """The ids of the adapters that are in a slot."""
        return frozenset[int]().union(*self._engine.collective_rpc(_in_slots))

    def unreadable(self) -> dict[int, Exception]:
        """The ids of adapters that could not be read since the last call, and why."""
        unreadable = self._unreadable
        self._unreadable = {}
        return unreadable

    def forget(self) -> None:
        """Empty the prefix cache. Raises GuardError while requests are in flight."""
        if not self._engine.reset_prefix_cache():
            problem = "the prefix cache cannot be emptied while requests are in flight"
            raise GuardError(problem, remedy="Wait for them, or cancel them")

    def close(self) -> None:
        """Give the memory back. The process may then start another engine; those that it runs
        beside this one go on.
        """
        _open.discard(id(self))
        try:
            self._engine.collective_rpc(_forget_pointers)
        finally:  # whatever state a step has left the worker in
            with _groups_kept() if _open else contextlib.nullcontext():
                self._engine.engine_core.shutdown()

    def _check_patched(self) -> None:
        bare = [target for target, is_patched in patched().items() if not is_patched]
        if bare:
            self.close()
            raise GuardError(
                "vLLM runs without the aLoRA plugin",
                got=f"not patched: {', '.join(bare)}",
                remedy="Unset VLLM_PLUGINS or add alora to it, and run `make doctor`",
            )

    def _run_step(self) -> list[EngineCoreOutput]:
        """Run one batch; what vLLM says of the requests that it finished."""
        self._unreadable |= failed_of(self._core)  # it is known from now on that somebody asks
        started = time.perf_counter()
        outputs = self._engine.engine_core.get_output().outputs
        self._step_s += time.perf_counter() - started
        self._unreadable |= failed_of(self._core)
        return [output for output in outputs if output.finish_reason is not None]

    def _activated(self, request: BackendRequest, prompt: Sequence[int]) -> LoRARequest | None:
        """The request's adapter, and from where on it acts. Raises ValueError if it does not as it
        is expected to.
        """
        if request.adapter is None:
            return None
        lora, adapter = self._loras[request.adapter.adapter_id]
        self._check_files(lora, adapter)
        start = active_from(prompt, adapter, lora.lora_name, request.activation_start)
        request_of_vllm: LoRARequest = activated(self._core, lora, start, adapter.content)
        return request_of_vllm

    def _check_files(self, lora: LoRARequest, adapter: AdapterFiles) -> None:
        """Raise AdapterError if the files are other ones than were loaded, and may have to be read
        again: a step in which that is found fails for everybody in it.

        Looked at once in LOOK_S seconds, since `stat` calls are a tenth of what a rule costs.
        """
        lora_config = self._engine.vllm_config.lora_config
        if lora_config is None or len(self._loras) <= (lora_config.max_cpu_loras or 0):
            return  # all stay in host memory
        now = time.monotonic()
        if now < self._looked.get(lora.lora_int_id, -LOOK_S) + LOOK_S:
            return
        if read_adapter(lora.lora_path).content != adapter.content:
            raise AdapterError(
                "the adapter's files changed since it was loaded",
                where=adapter.path,
                remedy="Serve it anew: POST /admin/rules/RULE, or `GuardEngine.serve`",
            )
        self._looked[lora.lora_int_id] = now


class DecoderBackend(VllmBackend):
    """A causal language model: one token of answer, with the conversation's keys and values
    shared.
    """

    def __init__(
        self,
        engine_args: Mapping[str, Any],
        yes_id: int,
        no_id: int,
        *,
        needs_seams: bool = True,
    ) -> None:
        self._yes_id = yes_id
        self._no_id = no_id
        ours = {ANSWERS: [yes_id, no_id], RESIDENT_FIRST: True}
        super().__init__(engine_args, ours, needs_seams=needs_seams)
        self._params = self._accepted(_sampling_params([yes_id, no_id]))
        self._wanting_state: set[str] = set()  # ids of the requests in flight that want one
        self._gives_states = all(self._engine.collective_rpc(_gives_states))
        self._last_prefix = Prefix([])
        # That followed none: those after it may follow it.
        self._last_queued: tuple[BackendRequest, Request] | None = None

    def submit(self, request: BackendRequest) -> str:
        """Queue one prompt, behind those that start earlier, ahead by as many tokens as the prefix
        cache holds of it.

        Raises GuardError if vLLM or the plugin refuses it, or if it wants a state that vLLM's model
        runner does not give.
        """
        request_id = str(next(self._ids))
        self._check_length(request.tokens)
        prompt = SharedPrompt(self._prefix(request.prefix), request.suffix)
        params = self._params_of(request, request_id)
        core, start = self._core, request.virtual_start
        try:
            lora = self._activated(request, prompt)
            leader = self._leader_of(request)
            if leader is None or not follow(
                core.scheduler, leader, request_id, prompt, lora, start
            ):
                scheduled = Request(
                    request_id,
                    prompt,
                    params,
                    None,
                    arrival_time=time.time(),
                    lora_request=lora,
                    cache_salt=request.cache_salt,
                    priority=start,
                    block_hasher=core.request_block_hasher,
                )
                core.add_request(scheduled)
                self._last_queued = request, scheduled
        except BaseException as error:
            self.cancel([request_id])  # vLLM may have queued it already
            if isinstance(error, ValueError):
                problem = f"vLLM refuses the prompt: {error}"
                remedy = "Run `make doctor` if the prompt is as it should be"
                raise GuardError(problem, remedy=remedy) from error
            raise
        if request.wants_state:
            self._wanting_state.add(request_id)
        return request_id

    def step(self) -> list[EngineOutput]:
        """Run one batch; the outputs of the requests that it finished."""
        finished = self._run_step()
        states = self._states()
        self._wanting_state.difference_update(output.request_id for output in finished)
        return [self._output(output, states.get(output.request_id)) for output in finished]

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        ids = list(request_ids)
        self._wanting_state.difference_update(ids)
        self._engine.engine_core.abort_requests(ids)

    def scrub(self) -> None:
        """Empty the prefix cache and overwrite all of its keys and values with zeros. Raises as
        `forget` does.
        """
        self.forget()
        self._engine.collective_rpc(_zero_kv)
        self._engine.collective_rpc(_take_states)  # what a failed step had kept

    def _params_of(self, request: BackendRequest, request_id: str) -> SamplingParams:
        """One request's parameters. Raises GuardError for a state that is wanted and not given."""
        if not request.wants_state:
            return self._params
        if not self._gives_states:
            problem = "this vLLM's model runner gives no hidden states, which a head reads"
            raise GuardError(problem, remedy="Serve the rule with an adapter, or run on a CPU")
        params = copy.copy(self._params)
        params.extra_args = {STATE: request_id}
        return params

    def _states(self) -> Mapping[str, State]:
        """The states that the last step left, by request id; asked for only if some request wants
        one.
        """
        states: dict[str, State] = {}
        if self._wanting_state:
            for kept in self._engine.collective_rpc(_take_states):
                states |= kept
        return states

    def _accepted(self, params: SamplingParams) -> SamplingParams:
        """The parameters as vLLM's input processor completes them for every request.

        Done once: all requests have the same, and their prompts are the base's tokens already.
        """
        request = self._engine.input_processor.process_inputs(
            "0", tokens_input([self._yes_id]), params, self._engine.get_supported_tasks()
        )
        accepted = request.sampling_params
        assert accepted is not None  # pooling requests have none
        return accepted

    def _prefix(self, token_ids: list[int]) -> Prefix:
        """The prefix of the last request, if it is this one's too."""
        if self._last_prefix.token_ids is not token_ids:
            self._last_prefix = Prefix(token_ids)
        return self._last_prefix

    def _leader_of(self, request: BackendRequest) -> Request | None:
        """The request that was queued last, if this one is about the same and needs no state."""
        if self._last_queued is None or request.wants_state:
            return None
        before, leader = self._last_queued
        is_alike = (
            request.prefix is before.prefix
            and request.cache_salt == before.cache_salt
            and request.virtual_start == before.virtual_start
            and not before.wants_state
        )
        if is_alike:
            return leader
        return None

    def _check_length(self, tokens: int) -> None:
        longest = self.context_tokens - 1  # and the verdict
        if not 0 < tokens <= longest:
            raise GuardError(
                "the prompt is empty or does not fit the context",
                got=f"{tokens:,} tokens",
                remedy=f"Ask with at least one and at most {longest:,}",
            )

    def _output(self, output: EngineCoreOutput, state: State | None) -> EngineOutput:
        prefill = output.prefill_stats
        cached = prefill.num_cached_tokens if prefill is not None else 0
        computed = prefill.num_prompt_tokens - cached if prefill is not None else 0
        logit = math.nan
        if output.new_logprobs is not None:
            ids = output.new_logprobs.logprob_token_ids[0].tolist()
            values = output.new_logprobs.logprobs[0].tolist()
            if self._yes_id in ids and self._no_id in ids:
                logit = values[ids.index(self._yes_id)] - values[ids.index(self._no_id)]
        return EngineOutput(output.request_id, logit, cached, computed, state)


def _check_known(engine_args: Mapping[str, Any]) -> None:
    """Raise GuardError for an engine argument that vLLM does not have."""
    arguments = [field.name for field in dataclasses.fields(EngineArgs)]
    for key in engine_args:
        if key not in arguments:
            remedy = did_you_mean(key, arguments) or None
            raise GuardError(f"vLLM has no engine argument '{key}'", remedy=remedy)


def _start(engine_args: Mapping[str, Any], ours: Mapping[str, Any]) -> LLMEngine:
    """vLLM's engine with our plugin's settings. Raises GuardError if it does not start."""
    args = dict(engine_args)
    args["additional_config"] = {**ours, **dict(args.get("additional_config") or {})}
    try:
        # vLLM's own use of PyTorch, nobody's else to fix.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return LLMEngine.from_engine_args(EngineArgs(**args))
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        problem = f"vLLM did not start: {str(error) or repr(error)}"
        raise GuardError(
            problem, where=args.get("model"), remedy=_remedy_of_start(error)
        ) from error


def _remedy_of_start(error: Exception) -> str:
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


def _sampling_params(answers: list[int]) -> SamplingParams:
    """One token, and the log-probabilities of exactly the answers, before any sampling parameter
    acts.
    """
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=answers,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # vLLM's shallow copy will do: nothing in them changes but extra_args, which `submit` sets
        # on a copy.
        skip_clone=True,
    )
