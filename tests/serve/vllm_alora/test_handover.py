"""The activation point crosses to another process, and nothing unchecked gets in."""

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
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_alora.activation import ActivatedRequest
from vllm_alora.handover import FIRST_DERIVED_ID, KEY

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


def test_the_activation_point_and_the_content_reach_the_scheduler(core: Any) -> None:
    extra_args = {KEY: [93, "abc"], "mine": 1}
    lora = received(core, LoRARequest("rule", 7, "/adapter"), extra_args)
    assert isinstance(lora, ActivatedRequest)
    assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("rule", 7, "/adapter")
    assert (lora.activation_start, lora.content) == (93, "abc")
    assert received(core, None, {KEY: [0, "forged"]}) is None


@pytest.mark.parametrize("pools", [False, True])
def test_a_request_that_bypassed_the_input_processor_is_refused(core: Any, *, pools: bool) -> None:
    with pytest.raises(VLLMValidationError, match="adapter 'rule' bypassed the input processor"):
        received(core, LoRARequest("rule", 7, "/adapter"), None, pools=pools)


def ids_of(core: Any, contents: list[str]) -> list[int]:
    """The adapter ids of requests with these contents, which all come under one number."""
    ids = []
    for content in contents:
        lora = received(core, LoRARequest("rule", 3, "/adapter"), {KEY: [0, content]})
        ids.append(lora.lora_int_id)
    return ids


def test_one_id_means_one_content_whichever_front_end_asks(core: Any) -> None:
    """Each front end has its own numbers; what they have in common is the engine core."""
    ids = ids_of(core, [f"{number:064x}" for number in (1, 2, 1, 3, 2)])
    assert ids[0] == ids[2] == 3 and ids[1] == ids[4]
    assert len(set(ids)) == 3
    assert all(FIRST_DERIVED_ID <= derived < 2**31 for derived in (ids[1], ids[3]))


def test_contents_whose_beginnings_are_alike_have_ids_of_their_own(core: Any) -> None:
    assert len(set(ids_of(core, ["f" * 40 + end for end in "abc"]))) == 3
