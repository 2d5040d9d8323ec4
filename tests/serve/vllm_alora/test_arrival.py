"""Every request is checked and learns its activation point before it leaves the input processor."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_alora
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm_alora.adapter import read_adapter
from vllm_alora.arrival import InvocationError, active_from, process_inputs
from vllm_alora.handover import KEY

from guard.conversation.example import Message
from tests.serve.adapters import BASE

pytestmark = pytest.mark.slow

Invocation = tuple[int, ...]


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()


@pytest.fixture
def processor() -> SimpleNamespace:
    """What of an input processor the seam uses."""
    model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(BASE), dtype=torch.float32)
    return SimpleNamespace(
        lora_config=SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32),
        model_config=model_config,
    )


def arrive(processor: Any, prompt: Sequence[int], lora: LoRARequest | None, **fields: Any) -> Any:
    """The request after the seam; vLLM's own part returns it as given."""
    request = SimpleNamespace(
        prompt_token_ids=list(prompt),
        lora_request=lora,
        sampling_params=SamplingParams(extra_args={"mine": 1}),
        prompt_embeds=None,
        resumable=False,
    )
    vars(request).update(fields)
    return process_inputs.wrapper(lambda self: request, processor)


def test_an_alora_is_active_from_the_last_invocation_on(
    processor: Any, adapters: dict[str, str], prompts: Any
) -> None:
    turn = prompts.invocation("a rule")
    request = arrive(processor, [5, *turn, 6, *turn, 7], LoRARequest("rule", 3, adapters["first"]))
    assert request.sampling_params.extra_args == {
        "mine": 1,
        KEY: [2 + len(turn), read_adapter(adapters["first"]).content],
    }
    assert request.lora_request.lora_int_id == 3


def test_a_plain_lora_is_active_from_the_start(processor: Any, adapters: dict[str, str]) -> None:
    request = arrive(processor, [5, 6], LoRARequest("rule", 3, adapters["lora"]))
    assert request.sampling_params.extra_args[KEY][0] == 0


def test_a_base_request_is_left_alone(processor: Any) -> None:
    assert arrive(processor, [5, 6], None).sampling_params.extra_args == {"mine": 1}


def test_a_prompt_without_the_invocation_is_refused(
    processor: Any, adapters: dict[str, str]
) -> None:
    with pytest.raises(
        InvocationError, match="'rule': the prompt does not contain the invocation tokens"
    ) as caught:
        arrive(processor, [5, 6], LoRARequest("rule", 3, adapters["first"]))
    assert isinstance(caught.value, ValueError)


CONVERSATION = [Message("user", "May I take two?"), Message("assistant", "I can not say.")]


def test_a_prompt_that_lost_its_last_turn_is_told_by_what_is_expected(
    adapters: dict[str, str], prompts: Any
) -> None:
    rule = "a rule"
    adapter, whole = read_adapter(adapters["first"]), prompts.build(CONVERSATION, rule)
    expected = whole.invocation_start
    assert active_from(whole.token_ids, adapter, "rule", expected) == whole.invocation_start
    answer = prompts.suffix_ids("")[-len(prompts._answer) :]
    lost = [*whole.token_ids[: whole.invocation_start], *answer]
    # Nothing tells it apart: an earlier turn has the same header.
    assert 0 < active_from(lost, adapter, "rule") < whole.invocation_start
    with pytest.raises(InvocationError, match=f"expected was {whole.invocation_start}"):
        active_from(lost, adapter, "rule", expected)


@pytest.mark.parametrize("kind", ["lora", "first"])
def test_a_pooling_request_of_an_adapter_is_refused(
    processor: Any, adapters: dict[str, str], prompts: Any, kind: str
) -> None:
    with pytest.raises(InvocationError, match="not for pooling"):
        arrive(
            processor,
            prompts.invocation("a rule"),
            LoRARequest("rule", 3, adapters[kind]),
            sampling_params=None,
        )


@pytest.mark.parametrize("fields", [{"resumable": True}, {"prompt_embeds": object()}])
def test_what_has_no_complete_prompt_of_ids_is_refused(
    processor: Any, adapters: dict[str, str], prompts: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvocationError, match="generates from a complete prompt of token ids"):
        arrive(
            processor,
            prompts.invocation("a rule"),
            LoRARequest("rule", 3, adapters["first"]),
            **fields,
        )


def test_the_callers_request_is_not_changed(processor: Any, adapters: dict[str, str]) -> None:
    mine = LoRARequest("rule", 3, adapters["lora"], load_inplace=True)
    assert arrive(processor, [5], mine).lora_request.load_inplace is False
    assert mine.load_inplace is True
