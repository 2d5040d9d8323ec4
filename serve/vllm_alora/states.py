"""Seam: the base's last hidden state comes out of the engine, for the requests that ask for it.

A linear head reads what the output layer reads at the prompt's last token. vLLM gives out tokens
and their log-probabilities; hidden states only from an engine that pools and then generates
nothing. A request asks with `STATE` in its `SamplingParams.extra_args`, under a key of its own; in
the step that completes its prompt the runner keeps that row, and the caller takes it after the step
(`take_states`): the next one forgets it. A row is kept in no other step, so a request that is
cancelled or preempted before leaves nothing. Runner V1 without speculative decoding
(`gives_states`); elsewhere nothing is kept, and who asks has to refuse. Can go when vLLM gives out
hidden states of requests that generate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .seam import seam

STATE = "vllm_alora_state"  # in SamplingParams.extra_args: the key under which the state is kept


def gives_states(runner: Any) -> bool:
    """Whether this model runner keeps the states that requests ask for."""
    return isinstance(runner, GPUModelRunner) and runner.speculative_config is None


def take_states(runner: Any) -> dict[str, torch.Tensor]:
    """The states that the last step has kept, by their requests' keys, [hidden size] each, float32
    in host memory; given once.
    """
    states: dict[str, torch.Tensor] = vars(runner).pop("kept_states", {})
    return states


@seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens", "self grammar_output")
def sample_tokens(original: Callable[..., Any], self: Any, grammar_output: Any) -> Any:
    """vLLM's sampling; before it, the rows of the prompts that end in this step are kept for those
    who ask.
    """
    step = self.execute_model_state
    if step is not None and gives_states(self):
        _keep(self, step.sample_hidden_states, step.scheduler_output.num_scheduled_tokens)
    return original(self, grammar_output)


def _keep(runner: Any, states: torch.Tensor, scheduled: dict[str, int]) -> None:
    """Keep rows of `states`, [requests, hidden size], in the order of the batch; those of the step
    before are forgotten, as nobody may have taken them.
    """
    kept: dict[str, torch.Tensor] = {}
    batch = runner.input_batch
    for row, req_id in enumerate(batch.req_ids):
        key = _key(runner.requests[req_id].sampling_params)
        computed = batch.num_computed_tokens_cpu[row] + scheduled[req_id]
        if key is not None and computed == batch.num_prompt_tokens[row]:
            kept[key] = states[row].to("cpu", torch.float32, copy=True)
    runner.kept_states = kept


def _key(sampling_params: Any) -> str | None:
    """The key of a request that asks for its state.

    A text, or it is none: over HTTP a caller may put anything there (`vllm_xargs`).
    """
    if sampling_params is None or not sampling_params.extra_args:
        return None
    key = sampling_params.extra_args.get(STATE)
    return key if isinstance(key, str) else None
