"""Exactly one of vLLM's refusals is lifted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from vllm.lora.peft_helper import PEFTHelper

pytestmark = pytest.mark.slow

LIMITS = SimpleNamespace(max_lora_rank=16)
vllm_alora.register()


def helper(**fields: Any) -> PEFTHelper:
    alora = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    return PEFTHelper.from_dict({**alora, "alora_invocation_tokens": [1, 2], **fields})


def test_an_alora_is_admitted_and_keeps_its_invocation() -> None:
    alora = helper()
    alora.validate_legal(LIMITS)
    assert alora.alora_invocation_tokens == [1, 2] and alora.vllm_lora_scaling_factor == 2.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "LoRA bias"),
        ({"bias": "all"}, "Adapter bias"),
        ({"r": 17}, "rank 17 is greater than max_lora_rank 16"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "QALoRA"),
    ],
)
def test_everything_else_is_still_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        helper(**fields).validate_legal(LIMITS)
    assert "aLoRA" not in str(caught.value)
