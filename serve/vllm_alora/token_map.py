"""Seams: every token is computed with its own weights, base before the activation point and adapter
from it on.

vLLM gives every token of a request that request's adapter. Here those with `computed + offset <
activation_start` have adapter id 0, the base's, whatever part of the prompt a step computes. Runner
V1 (CPU, or no Triton) knows per row how many tokens are computed; runner V2 lends its LoraState the
request states. Remove when vLLM serves aLoRA itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from .handover import ActivatedRequest
from .seam import seam

Ints = npt.NDArray[np.integer[Any]]
NO_SLOT = -1  # the slot of the base's tokens


def slots_of(adapters: Sequence[int], adapter_in_slot: Sequence[int | None]) -> Ints:
    """The slot of each adapter id, NO_SLOT for 0; `adapter_in_slot` holds the id in each slot.
    Raises KeyError for an adapter that is in none.
    """
    slot_of_id = {id_in_slot: slot for slot, id_in_slot in enumerate(adapter_in_slot)}
    slot_of_id[0] = NO_SLOT
    ids, positions = np.unique(np.asarray(adapters, np.int64), return_inverse=True)
    slots: Ints = np.array([slot_of_id[adapter] for adapter in ids.tolist()], np.int64)[positions]
    return slots


class StepSlots(NamedTuple):
    """The slot of each token of a step, [tokens], and of each prompt, [prompts]."""

    tokens: Ints
    prompts: Ints


def slots_of_step(mapping: Any, adapter_in_slot: Sequence[int | None]) -> StepSlots:
    return StepSlots(
        slots_of(mapping.index_mapping, adapter_in_slot),
        slots_of(mapping.prompt_mapping, adapter_in_slot),
    )


def base_token_mask(
    activation_starts: Ints, computed: Ints, scheduled: Ints
) -> npt.NDArray[np.bool_]:
    """Whether each scheduled token, [sum(scheduled)], lies before its activation point. All
    arguments are per request, in tokens; a request's tokens lie together, in their order.
    """
    base_tokens = np.clip(activation_starts - computed, 0, scheduled)
    offsets = np.arange(scheduled.sum()) - np.repeat(np.cumsum(scheduled) - scheduled, scheduled)
    return offsets < np.repeat(base_tokens, scheduled)


def _with_base_tokens(
    token_mapping: tuple[int, ...], mask: npt.NDArray[np.bool_]
) -> tuple[int, ...]:
    if not mask.any():
        return token_mapping
    return tuple(np.where(mask, 0, token_mapping).tolist())


def _activation_start(lora_request: Any) -> int:
    if isinstance(lora_request, ActivatedRequest):
        return lora_request.activation_start
    return 0


@seam("vllm.v1.worker.gpu_input_batch:InputBatch.add_request", "self request")
def add_request_v1(original: Callable[..., int], self: Any, request: Any) -> int:
    """Remember the request's activation point under its id: rows move, ids stay."""
    starts = vars(self).setdefault("activation_starts", {})
    starts.pop(request.req_id, None)
    start = _activation_start(request.lora_request)
    if start:  # only these: nothing prunes the table while the base alone is asked
        starts[request.req_id] = start
    return original(self, request)


@seam(
    "vllm.v1.worker.gpu_input_batch:InputBatch.make_lora_inputs",
    "self num_scheduled_tokens num_sampled_tokens",
)
def make_lora_inputs_v1(
    original: Callable[..., Any], self: Any, num_scheduled_tokens: Ints, num_sampled_tokens: Ints
) -> Any:
    """vLLM's mappings of the step; tokens before the activation points are the base's."""
    prompt_mapping, token_mapping, lora_requests = original(
        self, num_scheduled_tokens, num_sampled_tokens
    )
    if lora_requests:
        # Rebuilding the table drops the requests that have left the batch; one that comes back is
        # added again.
        table = self.activation_starts
        self.activation_starts = {
            req_id: table[req_id] for req_id in self.req_ids if req_id in table
        }
        starts = np.fromiter((table.get(req_id, 0) for req_id in self.req_ids), np.int64)
        mask = base_token_mask(
            starts, self.num_computed_tokens_cpu[: self.num_reqs], num_scheduled_tokens
        )
        token_mapping = _with_base_tokens(token_mapping, mask)
    return prompt_mapping, token_mapping, lora_requests


@seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests", "self scheduler_output")
def add_requests_v2(original: Callable[..., None], self: Any, scheduler_output: Any) -> None:
    """Lend the runner's request states, with their computed tokens, to its LoraState."""
    self.lora_state.req_states = self.req_states
    original(self, scheduler_output)


@seam("vllm.v1.worker.gpu.lora_utils:LoraState.add_request", "self req_id req_index lora_request")
def add_request_v2(
    original: Callable[..., None], self: Any, req_id: str, req_index: int, lora_request: Any
) -> None:
    starts = vars(self).setdefault("activation_starts", np.zeros_like(self.lora_ids))
    starts[req_index] = _activation_start(lora_request)
    original(self, req_id, req_index, lora_request)


@seam(
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
    "self req_ids idx_mapping num_scheduled_tokens",
)
def make_lora_inputs_v2(
    original: Callable[..., Any],
    self: Any,
    req_ids: list[str],
    idx_mapping: Ints,
    num_scheduled_tokens: Ints,
) -> Any:
    """vLLM's mappings of the step; tokens before the activation points are the base's."""
    prompt_mapping, token_mapping, lora_requests = original(
        self, req_ids, idx_mapping, num_scheduled_tokens
    )
    if lora_requests:
        computed = self.req_states.num_computed_prefill_tokens[idx_mapping]
        mask = base_token_mask(self.activation_starts[idx_mapping], computed, num_scheduled_tokens)
        token_mapping = _with_base_tokens(token_mapping, mask)
    return prompt_mapping, token_mapping, lora_requests


@seam(
    "vllm.lora.punica_wrapper.utils:convert_mapping",
    "mapping lora_index_to_id max_loras vocab_size device",
)
def convert_mapping(
    original: Callable[..., Any],
    mapping: Any,
    lora_index_to_id: Sequence[int | None],
    max_loras: int,
    vocab_size: int,
    device: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """vLLM's index tensors of the step, without a loop over its tokens: the slots of tokens and of
    prompts, those as rows of a padded table, and the tokens' rows in the embeddings of all slots.
    Slots that lie on the mapping (`low_rank.launch_grid`) are taken from there, once.
    """
    slots: StepSlots | None = vars(mapping).pop("step_slots", None)
    tokens, prompts = slots or slots_of_step(mapping, lora_index_to_id)
    padded = np.where(prompts == NO_SLOT, max_loras - 1, prompts) * len(prompts)
    columns = (
        tokens,
        prompts,
        padded + np.arange(len(prompts)),
        np.where(tokens == NO_SLOT, 0, tokens) * vocab_size,
    )
    base, sampler, sampler_padded, embeddings = (
        async_tensor_h2d(column, dtype=torch.long, device=device) for column in columns
    )
    return base, sampler, sampler_padded, embeddings, [len(column) for column in columns]
