"""A request is checked and learns its activation point before it leaves the input processor. The
point crosses to another process, and nothing unchecked gets in. By it each token of a step has its
weights, in both of vLLM's runners.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_alora
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lora.variants import calculate_alora_offsets
from transformers import AutoConfig
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.punica_wrapper import utils
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm_alora.adapter import read_adapter
from vllm_alora.arrival import InvocationError, process_inputs
from vllm_alora.handover import FIRST_DERIVED_ID, KEY, NEAR_END, ActivatedRequest, activation_start

from tests.serve.adapters import BASE
from tests.serve.served import Served

pytestmark = pytest.mark.slow

vllm_alora.register()


def received(core: Any, lora: LoRARequest | None, extra_args: Any, *, pools: bool = False) -> Any:
    """What the adapter's request has become in the scheduler, on its way through both processes."""
    request = EngineCoreRequest(
        request_id="request",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=None if pools else SamplingParams(max_tokens=1, extra_args=extra_args),
        pooling_params=PoolingParams() if pools else None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert isinstance(arrived, EngineCoreRequest)
    found, _ = EngineCore.preprocess_add_request(core, arrived)
    return found.lora_request


@pytest.fixture
def core() -> Any:
    """What of an engine core the handover uses."""
    return SimpleNamespace(mm_receiver_cache=None, request_block_hasher=None)


def test_the_activation_point_and_the_content_reach_scheduler_and_worker(core: Any) -> None:
    extra_args = {KEY: [93, "abc"], "mine": 1}
    in_scheduler = received(core, LoRARequest("rule", 7, "/adapter"), extra_args)
    for lora in (in_scheduler, pickle.loads(pickle.dumps(in_scheduler))):
        assert type(lora) is ActivatedRequest
        assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("rule", 7, "/adapter")
        assert (lora.activation_start, lora.content) == (93, "abc")
    assert received(core, None, {KEY: [0, "forged"]}) is None


@pytest.mark.parametrize("pools", [False, True])
def test_a_request_that_bypassed_the_input_processor_is_refused(core: Any, *, pools: bool) -> None:
    with pytest.raises(VLLMValidationError, match="adapter 'rule' bypassed the input processor"):
        received(core, LoRARequest("rule", 7, "/adapter"), None, pools=pools)


def test_one_id_means_one_content_whichever_front_end_asks(core: Any) -> None:
    """Each front end has its own numbers; what they have in common is the engine core."""
    contents = [f"{number:064x}" for number in (1, 2, 1, 3, 2)]
    alike = ["f" * 40 + end for end in "abc"]  # whose beginnings are
    ids = []
    for content in [*contents, *alike]:
        lora = received(core, LoRARequest("rule", 3, "/adapter"), {KEY: [0, content]})
        ids.append(lora.lora_int_id)
    assert ids[0] == ids[2] == 3 and ids[1] == ids[4]
    assert len(set(ids)) == 6
    assert all(FIRST_DERIVED_ID <= derived < 2**31 for derived in set(ids) - {3})


few_ids = st.integers(0, 2)


@given(
    beginning=st.lists(few_ids, min_size=1, max_size=12),
    behind=st.sampled_from([0, NEAR_END - 2, NEAR_END, 3 * NEAR_END]),
    invocation=st.lists(few_ids, min_size=1, max_size=4),
)
def test_the_activation_point_is_peft_s_however_far_it_is_from_the_end(
    beginning: list[int], behind: int, invocation: list[int]
) -> None:
    prompt = [*beginning, *[5] * behind]
    (offset,) = calculate_alora_offsets(
        {"a": SimpleNamespace(alora_invocation_tokens=invocation)}, "a", torch.tensor([prompt])
    )
    expected = None if offset is None else len(prompt) - offset
    assert activation_start(prompt, invocation) == expected


@pytest.fixture
def arriving(adapters: dict[str, str]) -> Callable[..., Any]:
    """What becomes of a prompt's request in the input processor; vLLM's own part gives it back."""
    processor = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=AutoConfig.from_pretrained(BASE), dtype=torch.float32
        ),
        lora_config=SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32),
    )

    def request(prompt: Sequence[int], kind: str | None, **fields: Any) -> Any:
        plain = {
            "prompt_token_ids": list(prompt),
            "lora_request": kind and LoRARequest("rule", 3, adapters[kind]),
            "sampling_params": SamplingParams(extra_args={"mine": 1}),
            "prompt_embeds": None,
            "resumable": False,
        }
        request = SimpleNamespace(**(plain | fields))
        return process_inputs.wrapper(lambda _: request, processor)

    return request


def test_an_adapter_is_active_from_the_last_invocation_on(
    arriving: Any, adapters: dict[str, str], prompts: Any
) -> None:
    turn = prompts.invocation("a rule")
    request = arriving([5, *turn, 6, *turn, 7], "first")
    content = read_adapter(adapters["first"]).content
    assert request.sampling_params.extra_args == {"mine": 1, KEY: [2 + len(turn), content]}
    assert request.lora_request.lora_int_id == 3
    assert arriving([5, 6], "lora").sampling_params.extra_args[KEY][0] == 0
    assert arriving([5, 6], None).sampling_params.extra_args == {"mine": 1}
    mine = LoRARequest("rule", 3, adapters["lora"], load_inplace=True)
    assert arriving([5], None, lora_request=mine).lora_request.load_inplace is False
    assert mine.load_inplace is True  # the caller's request is not changed


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("lora", {"sampling_params": None}, "not for pooling"),
        ("first", {"sampling_params": None}, "not for pooling"),
        ("first", {"resumable": True}, "generates from a complete prompt of token ids"),
        ("first", {"prompt_embeds": object()}, "generates from a complete prompt of token ids"),
        ("first", {"prompt_token_ids": [5, 6]}, "'rule': the prompt does not contain the invoc"),
    ],
)
def test_where_an_adapter_would_not_act_the_request_is_refused(
    arriving: Any, prompts: Any, kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvocationError, match=message) as caught:
        arriving(prompts.invocation("a rule"), kind, **fields)
    assert isinstance(caught.value, ValueError)


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


def test_v2_maps_base_lora_and_alora_of_one_batch() -> None:
    computed = np.array([0, 4, 0, 8, 0, 0, 0, 0], np.int32)
    state = LoraState(max_num_reqs=8)
    runner = SimpleNamespace(
        lora_state=state,
        req_states=SimpleNamespace(num_computed_prefill_tokens=computed),
        sampler=None,
        model_state=None,
    )
    GPUModelRunner.add_requests(runner, SimpleNamespace(scheduled_new_reqs=[]))
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
