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

vllm_alora.register()


class Arriving:
    """An input processor, as far as the seam uses it, and requests of the adapters of the tests."""

    def __init__(self, adapters: dict[str, str]) -> None:
        model = {"hf_config": AutoConfig.from_pretrained(BASE), "dtype": torch.float32}
        self.model_config = SimpleNamespace(**model)
        self.lora_config = SimpleNamespace(max_lora_rank=16, lora_dtype=torch.float32)
        self.adapters = adapters

    def request(self, prompt: Sequence[int], kind: str | None, **fields: Any) -> Any:
        """The request after the seam; vLLM's own part returns it as given."""
        lora = kind and LoRARequest("rule", 3, self.adapters[kind])
        request = SimpleNamespace(
            prompt_token_ids=list(prompt),
            lora_request=lora,
            sampling_params=SamplingParams(extra_args={"mine": 1}),
            prompt_embeds=None,
            resumable=False,
        )
        vars(request).update(fields)
        return process_inputs.wrapper(lambda self: request, self)


@pytest.fixture
def arriving(adapters: dict[str, str]) -> Arriving:
    return Arriving(adapters)


def test_an_adapter_is_active_from_the_last_invocation_on(arriving: Arriving, prompts: Any) -> None:
    turn = prompts.invocation("a rule")
    request = arriving.request([5, *turn, 6, *turn, 7], "first")
    content = read_adapter(arriving.adapters["first"]).content
    assert request.sampling_params.extra_args == {"mine": 1, KEY: [2 + len(turn), content]}
    assert request.lora_request.lora_int_id == 3
    assert arriving.request([5, 6], "lora").sampling_params.extra_args[KEY][0] == 0
    assert arriving.request([5, 6], None).sampling_params.extra_args == {"mine": 1}


CONVERSATION = [Message("user", "May I take two?"), Message("assistant", "I can not say.")]


def test_a_prompt_without_its_last_turn_is_refused(adapters: dict[str, str], prompts: Any) -> None:
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


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("lora", {"sampling_params": None}, "not for pooling"),
        ("first", {"sampling_params": None}, "not for pooling"),
        ("first", {"resumable": True}, "generates from a complete prompt of token ids"),
        ("first", {"prompt_embeds": object()}, "generates from a complete prompt of token ids"),
        (
            "first",
            {"prompt_token_ids": [5, 6]},
            "'rule': the prompt does not contain the invocation tokens",
        ),
    ],
)
def test_where_an_adapter_would_not_act_the_request_is_refused(
    arriving: Arriving, prompts: Any, kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvocationError, match=message) as caught:
        arriving.request(prompts.invocation("a rule"), kind, **fields)
    assert isinstance(caught.value, ValueError)


def test_the_callers_request_is_not_changed(arriving: Arriving) -> None:
    mine = LoRARequest("rule", 3, arriving.adapters["lora"], load_inplace=True)
    assert arriving.request([5], None, lora_request=mine).lora_request.load_inplace is False
    assert mine.load_inplace is True
