"""The activation point crosses vLLM's process boundary, and what was not checked on arrival does
not get in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_alora.activation import ActivatedRequest
from vllm_alora.handover import FIRST_DERIVED_ID, KEY

pytestmark = pytest.mark.slow


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


@pytest.fixture
def core() -> SimpleNamespace:
    """What of an engine core the handover uses."""
    return SimpleNamespace(mm_receiver_cache=None, request_block_hasher=None)


def received(core: Any, one: EngineCoreRequest) -> Request:
    """The scheduler's request."""
    found, _ = EngineCore.preprocess_add_request(core, sent(one))
    return found


def test_the_activation_point_and_the_content_reach_the_scheduler(core: Any) -> None:
    lora = received(
        core, request(LoRARequest("rule", 7, "/adapter"), {KEY: [93, "abc"], "mine": 1})
    ).lora_request
    assert isinstance(lora, ActivatedRequest)
    assert (
        lora.lora_name,
        lora.lora_int_id,
        lora.lora_path,
        lora.activation_start,
        lora.content,
    ) == ("rule", 7, "/adapter", 93, "abc")


@pytest.mark.parametrize("is_pooling", [False, True])
def test_a_request_that_bypassed_the_input_processor_is_refused(
    core: Any, is_pooling: bool
) -> None:
    one = request(LoRARequest("rule", 7, "/adapter"), None)
    if is_pooling:
        one.sampling_params, one.pooling_params = None, PoolingParams()
    with pytest.raises(VLLMValidationError, match="adapter 'rule' bypassed the input processor"):
        received(core, one)


def test_a_base_request_passes_as_it_is(core: Any) -> None:
    assert received(core, request(None, {KEY: [0, "forged"]})).lora_request is None


def test_one_id_means_one_content_whichever_front_end_asks(core: Any) -> None:
    """Each front end has its own numbers; what they have in common is the engine core."""
    contents = [f"{number:064x}" for number in (1, 2, 1, 3, 2)]
    requests = [
        request(LoRARequest("rule", 3, "/adapter"), {KEY: [0, content]}) for content in contents
    ]
    ids = [received(core, one).lora_request.lora_int_id for one in requests]
    assert ids[0] == ids[2] == 3 and ids[1] == ids[4]
    assert len(set(ids)) == 3 and all(
        FIRST_DERIVED_ID <= derived < 2**31 for derived in (ids[1], ids[3])
    )


def test_contents_whose_beginnings_are_alike_have_ids_of_their_own(core: Any) -> None:
    requests = [
        request(LoRARequest("rule", 3, "/adapter"), {KEY: [0, "f" * 40 + end]}) for end in "abc"
    ]
    assert len({received(core, one).lora_request.lora_int_id for one in requests}) == 3
