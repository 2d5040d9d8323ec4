"""The activation point is PEFT's, and the request that carries it survives its way."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets
from vllm.lora.request import LoRARequest
from vllm_alora.activation import NEAR_END, ActivatedRequest, activation_start

pytestmark = pytest.mark.slow

few_ids = st.integers(0, 2)


@given(
    prompt=st.lists(few_ids, min_size=1, max_size=12),
    invocation=st.lists(few_ids, min_size=1, max_size=4),
)
def test_the_activation_point_is_peft_s(prompt: list[int], invocation: list[int]) -> None:
    (offset,) = calculate_alora_offsets(
        {"a": SimpleNamespace(alora_invocation_tokens=invocation)}, "a", torch.tensor([prompt])
    )
    assert activation_start(prompt, invocation) == (
        None if offset is None else len(prompt) - offset
    )


def test_the_last_whole_occurrence_counts_from_its_first_token_however_far_it_is() -> None:
    assert activation_start([1, 2, 9, 1, 2, 9, 9], (1, 2)) == 3
    assert activation_start([1, 2, 3, 1, 2], (1, 2, 3)) == 0
    assert activation_start([1, 2], (1, 2, 3)) is None
    for behind in (NEAR_END - 2, NEAR_END - 1, NEAR_END, 3 * NEAR_END):
        assert activation_start([9, 1, 2, *[5] * behind], (1, 2)) == 1
        assert activation_start([1, 2, 1, *[5] * behind], (1, 2)) == 0


def test_an_activated_request_survives_the_way_to_a_worker_process() -> None:
    request = ActivatedRequest("rule", 7, "/adapter", activation_start=93, content="abc")
    arrived = pickle.loads(pickle.dumps(request))
    assert type(arrived) is ActivatedRequest and arrived.lora_name == "rule"
    assert (arrived.activation_start, arrived.content) == (93, "abc")


def test_in_a_batch_two_versions_of_one_name_are_two_adapters_and_two_prompts_are_one() -> None:
    old = ActivatedRequest("rule", 7, "/adapter", content="old")
    new = ActivatedRequest("rule", 8, "/adapter", content="new")
    assert old != new and len({old, new}) == 2
    assert len({LoRARequest("rule", 7, "/a"), LoRARequest("rule", 8, "/a")}) == 1
    prompts = [ActivatedRequest("rule", 7, "/a", activation_start=start) for start in (0, 40, 93)]
    assert len(set(prompts)) == 1
