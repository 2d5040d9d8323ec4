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
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper import utils
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm_alora.handover import ActivatedRequest

from tests.serve.served import Served

pytestmark = pytest.mark.slow

vllm_alora.register()


def alora(adapter_id: int, start: int) -> ActivatedRequest:
    return ActivatedRequest(f"rule {adapter_id}", adapter_id, "/adapter", activation_start=start)


def test_v1_forgets_the_activation_points_of_requests_that_left(
    served: Served, adapters: dict[str, str], prompts: Any
) -> None:
    """And notes none of the base and of LoRAs, while which alone are asked nothing is forgotten."""
    prompt = [*range(100, 140), *prompts.invocation("a rule")]
    for asked, most in ((["first"] * 4, 4), (["first"], 1), (["lora"] * 4, 1)):
        served.ask([prompt] * len(asked), [adapters[kind] for kind in asked])
        assert len(served.runner.input_batch.activation_starts) <= most


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
