"""Seam: the last hidden state comes out of the engine, for the requests that ask for it.

A linear head reads what the output layer reads at the prompt's last token, and vLLM gives out
hidden states only where it generates nothing. A request asks with `STATE` in its
`SamplingParams.extra_args`, under a key of its own; the step that completes its prompt keeps that
row, and the caller takes it before the next step (`take_states`). Both model runners, without
speculative decoding (`gives_states`); elsewhere who asks has to refuse. Remove when vLLM gives out
hidden states of requests that generate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from .seam import seam

STATE = "vllm_alora_state"  # in SamplingParams.extra_args: the key under which the state is kept


def gives_states(runner: Any) -> bool:
    """Whether this model runner keeps the states that requests ask for."""
    return isinstance(runner, (RunnerV1, RunnerV2)) and runner.speculative_config is None


def take_states(runner: Any) -> dict[str, torch.Tensor]:
    """The last step's states by their requests' keys, float32 in host memory; given once."""
    states: dict[str, torch.Tensor] = vars(runner).pop("kept_states", {})
    return states


@seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", "self grammar_output")
def sample_tokens_v1(original: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
    """vLLM's sampling, once the rows of prompts that end in this step are kept."""
    step = self.execute_model_state
    if step is not None and gives_states(self):
        scheduled, batch = step.scheduler_output.num_scheduled_tokens, self.input_batch
        rows: dict[str, int] = {}
        for row, req_id in enumerate(batch.req_ids):
            key = _key(self.requests[req_id].sampling_params)
            computed = batch.num_computed_tokens_cpu[row] + scheduled[req_id]
            if key is not None and computed == batch.num_prompt_tokens[row]:
                rows[key] = row
        _keep(self, step.sample_hidden_states, rows)
    return original(self, grammar_output)


@seam("vllm.v1.worker.gpu.sample.sampler:Sampler.add_request", "self req_idx sampling_params")
def add_request_v2(
    original: Callable[..., None], self: Any, req_idx: int, sampling_params: Any
) -> None:
    """vLLM's; beside it, whether the request asks: this runner does not keep what requests say."""
    keys: dict[int, str] = vars(self).setdefault("state_keys", {})
    keys.pop(req_idx, None)  # the key of the request that had this row before
    key = _key(sampling_params)
    if key is not None:
        keys[req_idx] = key
    original(self, req_idx, sampling_params)


@seam(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
    "self hidden_states input_batch grammar_output",
)
def sample_v2(
    original: Callable[..., Any],
    self: Any,
    hidden_states: torch.Tensor,
    input_batch: Any,
    grammar_output: Any,
) -> Any:
    """As `sample_tokens_v1`; `hidden_states` are those of all of the step's tokens."""
    if gives_states(self):
        keys: dict[int, str] = getattr(self.sampler, "state_keys", {})
        _keep(self, hidden_states, _ending_rows(self, input_batch, keys) if keys else {})
    return original(self, hidden_states, input_batch, grammar_output)


def _ending_rows(runner: Any, batch: Any, keys: Mapping[int, str]) -> dict[str, int]:
    """The row of the last token of each prompt that ends in the step of runner V2 and asks."""
    computed = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    rows: dict[str, int] = {}
    for number, req_idx in enumerate(batch.idx_mapping_np):
        key = keys.get(req_idx)
        if key is not None and computed[number] == runner.req_states.prompt_len.np[req_idx]:
            rows[key] = int(batch.query_start_loc_np[number + 1]) - 1
    return rows


def _keep(runner: Any, states: torch.Tensor, rows: dict[str, int]) -> None:
    """Keep rows of `states` by their keys, and forget those of the step before."""
    if not rows:
        runner.kept_states = {}
        return
    copied = states[list(rows.values())].to("cpu", torch.float32)  # of all rows at once
    runner.kept_states = dict(zip(rows, copied, strict=True))


def _key(sampling_params: Any) -> str | None:
    """The key of a request for its state, if it is a text: over HTTP it may be anything."""
    if sampling_params is None or not sampling_params.extra_args:
        return None
    key = sampling_params.extra_args.get(STATE)
    return key if isinstance(key, str) else None
