"""Which weights each token of a step is computed with, in both of vLLM's runners."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_alora
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper import utils
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_alora.handover import ActivatedRequest
from vllm_alora.token_map import slots_of_step

pytestmark = pytest.mark.slow

vllm_alora.register()


def alora(adapter_id: int, start: int) -> ActivatedRequest:
    return ActivatedRequest(f"rule {adapter_id}", adapter_id, "/adapter", activation_start=start)


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(
        max_num_reqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=100,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
    )


def add(batch: InputBatch, req_id: str, lora: LoRARequest | None) -> None:
    params, prompt = SamplingParams(max_tokens=1), list(range(20))
    batch.add_request(
        CachedRequestState(req_id, prompt, [], params, None, ([0],), 0, [], lora_request=lora)
    )


def v1_map(batch: InputBatch, scheduled: list[int]) -> list[int]:
    counts = np.array(scheduled, dtype=np.int32)
    return list(batch.make_lora_inputs(counts, np.ones_like(counts))[1])


def test_v1_keeps_the_activation_point_of_a_row_that_moves_and_of_no_request_that_left(
    batch: InputBatch,
) -> None:
    for req_id, start in (("a", 1), ("b", 3), ("c", 2)):
        add(batch, req_id, alora(ord(req_id), start))
    batch.swap_states(0, 2)
    assert v1_map(batch, [3, 4, 2]) == [0, 0, ord("c"), 0, 0, 0, ord("b"), 0, ord("a")]
    batch.remove_request("b")
    batch.condense()
    assert v1_map(batch, [3, 3]) == [0, 0, ord("c"), 0, ord("a"), ord("a")]
    assert set(batch.activation_starts) == {"a", "c"}
    for req_id, lora in (("a", None), ("c", alora(1, start=0))):  # come back without one
        batch.remove_request(req_id)
        batch.condense()
        add(batch, req_id, lora)
    assert not batch.activation_starts


def v2_state(computed: list[int]) -> LoraState:
    """A LoraState as its runner leaves it once requests were added."""
    runner = SimpleNamespace(
        lora_state=LoraState(max_num_reqs=8),
        req_states=SimpleNamespace(num_computed_prefill_tokens=np.array(computed, dtype=np.int32)),
        sampler=None,
        model_state=None,
    )
    GPUModelRunner.add_requests(runner, SimpleNamespace(scheduled_new_reqs=[]))
    return runner.lora_state


def test_v2_maps_base_lora_and_alora_of_one_batch() -> None:
    state = v2_state(computed=[0, 4, 0, 8, 0, 0, 0, 0])
    state.add_request("base", 0, None)
    state.add_request("decoding", 1, alora(1, start=2))
    state.add_request("lora", 2, alora(2, start=0))
    state.add_request("cut", 3, alora(3, start=10))
    order = np.array([3, 0, 2, 1])
    prompt_map, token_map, requests = state.make_lora_inputs(
        ["cut", "base", "lora", "decoding"], order, np.array([4, 2, 1, 1])
    )
    assert token_map == (0, 0, 3, 3, 0, 0, 2, 1)
    assert tuple(prompt_map) == (3, 0, 2, 1)
    assert {request.lora_int_id for request in requests} == {1, 2, 3}

    state.remove_request("cut")
    state.add_request("in its row", 3, alora(4, start=0))  # without its activation point
    assert state.make_lora_inputs(["in its row"], np.array([3]), np.array([3]))[1] == (4, 4, 4)


@given(
    st.lists(st.sampled_from([0, 5, 9, 2**30 + 7]), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 5, 9]), min_size=1, max_size=8),
)
def test_the_index_tensors_are_vllms(tokens: list[int], prompts: list[int]) -> None:
    mapping = LoRAMapping(tuple(tokens), tuple(prompts), is_prefill=True)
    adapter_in_slot = [9, None, 5, 2**30 + 7]
    original = utils.convert_mapping.__wrapped__  # type: ignore[attr-defined]
    *expected, lengths = original(mapping, adapter_in_slot, 4, 100, "cpu")
    *tensors, our_lengths = utils.convert_mapping(mapping, adapter_in_slot, 4, 100, "cpu")
    assert our_lengths == lengths
    for ours, vllms in zip(tensors, expected, strict=True):
        assert ours.dtype == vllms.dtype and torch.equal(ours, vllms)


def test_slots_that_lie_on_the_mapping_are_taken_once() -> None:
    mapping: Any = LoRAMapping((0, 5, 9, 9), (5, 9), is_prefill=True)
    adapter_in_slot = [9, None, 5, None]
    expected, *_ = utils.convert_mapping(mapping, adapter_in_slot, 4, 100, "cpu")
    mapping.step_slots = slots_of_step(mapping, adapter_in_slot)
    tokens, *_ = utils.convert_mapping(mapping, [], 4, 100, "cpu")  # nothing is looked up
    assert torch.equal(tokens, expected)
    with pytest.raises(KeyError):  # in another step: the adapters are in no slot
        utils.convert_mapping(mapping, [], 4, 100, "cpu")
