"""vLLM's engine in this process: token ids in, one logit out. Knows nothing of rules, conversations or cards.

Importing this module imports vLLM, which takes seconds; import it only when the inputs are known to be good.
"""

# ruff: noqa: E402 - vLLM must find its settings when it is imported
from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported, so set first. In this process, because a verdict is a single step, so two processes would have
# nothing to do at the same time; and because an error in the engine is then an exception to its caller and not a dead process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Without it vLLM sets torch to one thread, because it expects the model to be on a GPU or in processes that set their own.
os.environ.setdefault(
    "OMP_NUM_THREADS",
    str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
logging.getLogger("vllm").setLevel(
    os.environ["VLLM_LOGGING_LEVEL"].upper()
)  # vLLM warns before it has read its own setting
logging.getLogger("torch._library.triton").setLevel(
    logging.ERROR
)  # it is missing on a CPU, and nothing here asks for it

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.llm_engine import LLMEngine
from vllm_alora import patched
from vllm_alora.adapter import check_adapter, read_adapter
from vllm_alora.answers import ANSWERS
from vllm_alora.arrival import EXPECTED
from vllm_alora.kv.resident import RESIDENT_FIRST
from vllm_alora.weights.prefetch import failed_of
from vllm_alora.weights.slots import heat_of

from guard.errors import GuardError


@dataclasses.dataclass(frozen=True)
class EngineOutput:
    """What the engine says to one request. `logit` is log P(yes) - log P(no), NaN if the engine gave none."""

    request_id: str
    logit: float
    cached_tokens: int
    computed_tokens: int


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A resident adapter: what vLLM knows it by, and the SHA-256 of the files it was loaded from."""

    request: LoRARequest
    content: str


def _zero_kv(worker: Any) -> None:
    """On a worker: overwrite its keys and values."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _slots_filled(worker: Any) -> int:
    """On a worker: how often it has copied an adapter into a slot."""
    return getattr(worker.model_runner.lora_manager._adapter_manager, "swap_ins", 0)


def _adapters_read(worker: Any) -> int:
    """On a worker: how often it has read an adapter from disk."""
    return getattr(worker.model_runner.lora_manager, "adapter_loads", 0)


def _scheduled_tokens(worker: Any) -> int:
    """On a worker: how many tokens its steps have computed."""
    return getattr(worker.model_runner, "scheduled_tokens", 0)


def _keep(worker: Any, adapter_id: int) -> None:
    """On a worker: the adapter leaves its slot after all others."""
    heat_of(worker.model_runner.lora_manager._adapter_manager).kept.add(adapter_id)


def _in_slots(worker: Any) -> list[int]:
    """On a worker: the ids of the adapters that it has in slots."""
    return list(worker.model_runner.lora_manager._adapter_manager._active_adapters)


_open: set[int] = set()  # the Cores of this process that are not closed


@contextlib.contextmanager
def _groups_kept() -> Iterator[None]:
    """vLLM takes the process's communication groups down with an engine; without them other engines can load no adapter."""
    module: Any = engine_core
    take_down = module.cleanup_dist_env_and_memory
    module.cleanup_dist_env_and_memory = lambda: None
    try:
        yield
    finally:
        module.cleanup_dist_env_and_memory = take_down


class Core:
    """Owns one vLLM engine: load / unload, submit / cancel / step, forget / scrub, close. For one thread."""

    def __init__(self, engine_args: Mapping[str, Any], yes_id: int, no_id: int) -> None:
        self._yes_id, self._no_id = yes_id, no_id
        known = [field.name for field in dataclasses.fields(EngineArgs)]
        for key in engine_args:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise GuardError(
                    f"vLLM has no engine argument '{key}'",
                    remedy=f"Did you mean '{near[0]}'?" if near else None,
                )
        config = {ANSWERS: [yes_id, no_id], RESIDENT_FIRST: True} | dict(
            engine_args.get("additional_config") or {}
        )
        try:
            with warnings.catch_warnings(
                action="ignore", category=FutureWarning
            ):  # vLLM's own use of PyTorch, nobody's else to fix
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(**(dict(engine_args) | {"additional_config": config}))
                )
        except (ValueError, RuntimeError, OSError) as error:
            remedy = "If it is short of memory, set a lower kv_cache_memory_bytes or gpu_memory_utilization in the recipe's engine section"
            raise GuardError(
                f"vLLM did not start: {error}", where=engine_args.get("model"), remedy=remedy
            ) from error
        if bare := [target for target, is_patched in patched().items() if not is_patched]:
            self.close()
            remedy = "Unset VLLM_PLUGINS or add alora to it, and run `make doctor`"
            raise GuardError(
                "vLLM runs without the aLoRA plugin",
                got=f"not patched: {', '.join(bare)}",
                remedy=remedy,
            )
        # The log-probabilities of exactly these two tokens, before any sampling parameter acts: no top-k of the vocabulary.
        self._params = SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=[yes_id, no_id], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # vLLM's shallow copy will do: nothing in them changes but extra_args, which `submit` sets on a copy
        )  # fmt: skip
        _open.add(id(self))
        self._ids = itertools.count(1)
        self._unreadable: dict[int, Exception] = {}
        self.step_s = 0.0  # time spent in vLLM's steps since the start

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
        return int(max(self._engine.collective_rpc(_scheduled_tokens)))

    @property
    def swap_ins(self) -> int:
        """How often an adapter was copied into a slot since the start."""
        return int(max(self._engine.collective_rpc(_slots_filled)))

    @property
    def adapter_loads(self) -> int:
        """How often an adapter was read from disk since the start."""
        return int(max(self._engine.collective_rpc(_adapters_read)))

    def load(self, name: str, folder: Path) -> Loaded:
        """Make an adapter resident. Raises GuardError if vLLM refuses it; the engine is as it was before.

        `name` is part of the key of the cached KV blocks, so it must differ between different weights.
        """
        request = LoRARequest(
            name, next(self._ids), str(folder)
        )  # the id is never used again: a removed adapter has no heir
        config = self._engine.vllm_config
        try:
            adapter = read_adapter(request.lora_path)
            check_adapter(adapter, config.lora_config, config.model_config)
            self._engine.add_lora(request)
        except (
            Exception
        ) as error:  # whatever vLLM's loader raises; a half-loaded adapter must not stay
            with contextlib.suppress(Exception):
                self._engine.remove_lora(request.lora_int_id)
            raise GuardError(
                f"vLLM cannot load the adapter: {error}", where=folder, remedy="Run `make doctor`"
            ) from error
        return Loaded(request, adapter.content)

    def unload(self, adapter: Loaded) -> None:
        """Give the adapter's place back."""
        self._engine.remove_lora(adapter.request.lora_int_id)

    def pin(self, adapter: Loaded) -> None:
        """Let the adapter be the last to leave its slot.

        Not pinned as vLLM does, which fails a step that needs as many others as there are slots.
        """
        self._engine.collective_rpc(
            functools.partial(_keep, adapter_id=adapter.request.lora_int_id)
        )

    def in_slots(self) -> frozenset[int]:
        """The ids of the adapters that are in a slot."""
        return frozenset[int]().union(*self._engine.collective_rpc(_in_slots))

    def submit(
        self,
        token_ids: list[int],
        adapter: Loaded | None,
        activation_start: int = 0,
        *,
        turn: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue one prompt, behind those of earlier turns; the id that its EngineOutput will carry. It reads what has its `cache_salt` alone.

        A turn is a number of tokens: the prompt goes ahead by as many as the prefix cache holds of it.

        Raises GuardError if vLLM refuses it, if the adapter's files are no longer those that were loaded, or if the adapter would not
        become active at `activation_start` (0 for a plain LoRA).
        """
        request_id, params, lora = str(next(self._ids)), self._params, None
        if adapter is not None:
            params, lora = copy.copy(params), adapter.request
            params.extra_args = {EXPECTED: [activation_start, adapter.content]}
        try:
            prompt = tokens_input(token_ids, cache_salt=cache_salt)
            self._engine.add_request(request_id, prompt, params, lora_request=lora, priority=turn)
        except BaseException as error:
            self.cancel([request_id])  # vLLM may have queued it already
            if isinstance(error, ValueError):
                raise GuardError(
                    f"vLLM refuses the prompt: {error}",
                    remedy="Run `make doctor` if the prompt is as it should be",
                ) from error
            raise
        return request_id

    def step(self) -> list[EngineOutput]:
        """Run one batch; the requests it finished."""
        in_process = getattr(self._engine.engine_core, "engine_core", None)
        self._unreadable |= failed_of(in_process)  # it is known from now on that somebody asks
        started = time.perf_counter()
        outputs = self._engine.step()
        self.step_s += time.perf_counter() - started
        self._unreadable |= failed_of(in_process)
        return [
            self._reading(output)
            for output in outputs
            if isinstance(output, RequestOutput) and output.finished
        ]

    def unreadable(self) -> dict[int, Exception]:
        """The ids of adapters that could not be read since the last call, and why: their requests wait for ever. Empty in most calls."""
        found, self._unreadable = self._unreadable, {}
        return found

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        self._engine.abort_request(list(request_ids))

    def forget(self) -> None:
        """Empty the prefix cache. Raises GuardError while requests are in flight."""
        if not self._engine.reset_prefix_cache():
            what = "the prefix cache cannot be emptied while requests are in flight"
            raise GuardError(what, remedy="Wait for them, or cancel them")

    def scrub(self) -> None:
        """Empty the prefix cache and overwrite all of its keys and values with zeros. Raises GuardError while requests are in flight."""
        self.forget()
        self._engine.collective_rpc(_zero_kv)

    def close(self) -> None:
        """Give the memory back. The process may then start another engine; those that it runs beside this one go on."""
        _open.discard(id(self))
        with _groups_kept() if _open else contextlib.nullcontext():
            self._engine.engine_core.shutdown()

    def _reading(self, output: RequestOutput) -> EngineOutput:
        (completion,) = output.outputs
        cached = output.num_cached_tokens or 0
        computed = len(output.prompt_token_ids or ()) - cached
        logprobs = completion.logprobs[0] if completion.logprobs else {}
        if self._yes_id not in logprobs or self._no_id not in logprobs:
            return EngineOutput(output.request_id, math.nan, cached, computed)
        return EngineOutput(
            output.request_id,
            logprobs[self._yes_id].logprob - logprobs[self._no_id].logprob,
            cached,
            computed,
        )
