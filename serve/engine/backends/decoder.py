"""vLLM with a causal language model: token ids in, one logit out."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from serve.engine.backends.vllm_engine import VllmBackend  # before vLLM: it sets what vLLM reads

# isort: split
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request
from vllm_alora.answers import ANSWERS
from vllm_alora.kv.followers import follow
from vllm_alora.kv.resident import RESIDENT_FIRST
from vllm_alora.shared_prompt import Prefix, SharedPrompt
from vllm_alora.states import STATE

from guard.errors import GuardError
from guard.weights.head import State
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.backends import worker


class DecoderBackend(VllmBackend):
    """A causal language model: one token of answer; a conversation's keys and values are shared."""

    def __init__(self, engine_args: Mapping[str, Any], yes_id: int, no_id: int) -> None:
        self._yes_id, self._no_id = yes_id, no_id
        super().__init__(engine_args, {ANSWERS: [yes_id, no_id], RESIDENT_FIRST: True})
        self._params = self._accepted(_sampling_params([yes_id, no_id]))
        self._wanting_state: set[str] = set()  # ids of the requests in flight that want one
        self._gives_states = all(self._engine.collective_rpc(worker.gives_states))
        self._last_prefix = Prefix([])
        # The last request that follows no other: later ones may follow it.
        self._last_queued: tuple[BackendRequest, Request] | None = None

    def submit(self, request: BackendRequest) -> str:
        """Queue one prompt, behind those that start earlier, ahead by as many tokens as the prefix
        cache holds of it. Raises GuardError if vLLM or the plugin refuses it, or if it wants a
        state that vLLM's model runner does not give.
        """
        request_id = str(next(self._ids))
        self._check_length(request.tokens, self.context_tokens - 1)  # and the verdict
        prompt = SharedPrompt(self._prefix(request.prefix), request.suffix)
        params = self._params_of(request, request_id)
        core, start = self._core, request.virtual_start
        try:
            lora = self._activated(request, prompt)
            leader = self._leader_of(request)
            if leader is None or not follow(
                core.scheduler, leader, request_id, prompt, lora, start, params
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
        finished = self._run_step()
        states = self._states()
        self._wanting_state.difference_update(output.request_id for output in finished)
        return [self._output(output, states.get(output.request_id)) for output in finished]

    def cancel(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._wanting_state.difference_update(ids)
        self._engine.engine_core.abort_requests(ids)

    def scrub(self) -> None:
        self.forget()
        self._engine.collective_rpc(worker.zero_kv)
        self._engine.collective_rpc(worker.forget_step)
        self._engine.collective_rpc(worker.take_states)  # what a failed step had kept

    def _params_of(self, request: BackendRequest, request_id: str) -> SamplingParams:
        if not request.wants_state:
            return self._params
        if not self._gives_states:
            problem = "this vLLM's model runner gives no hidden states, which a head reads"
            raise GuardError(problem, remedy="Serve without speculative decoding, or by an adapter")
        params = copy.copy(self._params)
        params.extra_args = {STATE: request_id}
        return params

    def _states(self) -> Mapping[str, State]:
        """That the last step left, by request id; asked for only if some request wants one."""
        states: dict[str, State] = {}
        if self._wanting_state:
            for worker_states in self._engine.collective_rpc(worker.take_states):
                states |= worker_states
        return states

    def _accepted(self, params: SamplingParams) -> SamplingParams:
        """As vLLM's input processor completes them: once, since all requests have the same."""
        request = self._engine.input_processor.process_inputs(
            "0", tokens_input([self._yes_id]), params, self._engine.get_supported_tasks()
        )
        accepted = request.sampling_params
        assert accepted is not None  # pooling requests have none
        return accepted

    def _prefix(self, token_ids: list[int]) -> Prefix:
        if self._last_prefix.token_ids is not token_ids:
            self._last_prefix = Prefix(token_ids)
        return self._last_prefix

    def _leader_of(self, request: BackendRequest) -> Request | None:
        """The request that was queued last, if this one is about the same."""
        if self._last_queued is None:
            return None
        before, leader = self._last_queued
        is_alike = request.prefix is before.prefix and request.cache_salt == before.cache_salt
        if is_alike and request.virtual_start == before.virtual_start:
            return leader
        return None

    def _output(self, output: EngineCoreOutput, state: State | None) -> EngineOutput:
        cached = computed = 0
        if output.prefill_stats is not None:
            cached = output.prefill_stats.num_cached_tokens
            computed = output.prefill_stats.num_prompt_tokens - cached
        logit = math.nan
        if output.new_logprobs is not None:
            ids = output.new_logprobs.logprob_token_ids[0].tolist()
            values = output.new_logprobs.logprobs[0].tolist()
            if self._yes_id in ids and self._no_id in ids:
                logit = values[ids.index(self._yes_id)] - values[ids.index(self._no_id)]
        return EngineOutput(output.request_id, logit, cached, computed, state)


def _sampling_params(answers: list[int]) -> SamplingParams:
    """One token, and the log-probabilities of exactly the answers, before any sampling."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=answers,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Nothing in them changes but extra_args, which `submit` sets on a copy.
        skip_clone=True,
    )
