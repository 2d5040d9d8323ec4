"""The activation point crosses vLLM's process boundary, and what was not checked on arrival does not get in."""

from __future__ import annotations

import pytest
import vllm_alora
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_alora.activation import ActivatedRequest
from vllm_alora.handover import KEY


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()


def request(lora: LoRARequest | None, extra_args: dict[str, object] | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="request",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra_args),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=lora,
        cache_salt=None,
        data_parallel_rank=None,
    )


def sent(one: EngineCoreRequest) -> EngineCoreRequest:
    """`one` as it arrives in the engine-core process."""
    arrived = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(one))
    assert isinstance(arrived, EngineCoreRequest)
    return arrived


def test_the_activation_point_and_the_content_reach_the_scheduler() -> None:
    arrived = sent(request(LoRARequest("rule", 7, "/adapter"), {KEY: [93, "abc"], "mine": 1}))
    lora = Request.from_engine_core_request(arrived, None).lora_request
    assert isinstance(lora, ActivatedRequest)
    assert (lora.lora_name, lora.lora_int_id, lora.lora_path, lora.activation_start, lora.content) == ("rule", 7, "/adapter", 93, "abc")


def test_a_request_that_bypassed_the_input_processor_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="adapter 'rule' bypassed the input processor"):
        Request.from_engine_core_request(sent(request(LoRARequest("rule", 7, "/adapter"), None)), None)


def test_a_base_request_passes_as_it_is() -> None:
    assert Request.from_engine_core_request(sent(request(None, {KEY: [0, "forged"]})), None).lora_request is None
