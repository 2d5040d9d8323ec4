"""Every request is checked and learns its activation point before it leaves the input processor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_alora
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm_alora.adapter import read_adapter
from vllm_alora.arrival import FIRST_DERIVED_ID, InvocationError, process_inputs
from vllm_alora.handover import KEY

from tests.serve.adapters import BASE, save_variant

Invocation = tuple[int, ...]


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    vllm_alora.register()


@pytest.fixture
def processor() -> SimpleNamespace:
    """What of an input processor the seam uses."""
    model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(BASE))
    return SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=16), model_config=model_config)


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


def test_an_alora_is_active_from_the_last_invocation_on(processor: Any, adapters: dict[str, str], prompts: Any) -> None:
    turn = prompts.invocation_token_ids
    request = arrive(processor, [5, *turn, 6, *turn, 7], LoRARequest("rule", 3, adapters["first"]))
    assert request.sampling_params.extra_args == {"mine": 1, KEY: [2 + len(turn), read_adapter(adapters["first"]).content]}
    assert request.lora_request.lora_int_id == 3


def test_a_plain_lora_is_active_from_the_start(processor: Any, adapters: dict[str, str]) -> None:
    request = arrive(processor, [5, 6], LoRARequest("rule", 3, adapters["lora"]))
    assert request.sampling_params.extra_args[KEY][0] == 0


def test_a_base_request_is_left_alone(processor: Any) -> None:
    assert arrive(processor, [5, 6], None).sampling_params.extra_args == {"mine": 1}


def test_a_prompt_without_the_invocation_is_refused(processor: Any, adapters: dict[str, str]) -> None:
    with pytest.raises(InvocationError, match="'rule': the prompt does not contain the invocation tokens") as caught:
        arrive(processor, [5, 6], LoRARequest("rule", 3, adapters["first"]))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("fields", [{"sampling_params": None}, {"resumable": True}, {"prompt_embeds": object()}])
def test_what_has_no_complete_prompt_of_ids_is_refused(
    processor: Any, adapters: dict[str, str], prompts: Any, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvocationError, match="generates from a complete prompt of token ids"):
        arrive(processor, prompts.invocation_token_ids, LoRARequest("rule", 3, adapters["first"]), **fields)


def test_the_callers_request_is_not_changed(processor: Any, adapters: dict[str, str]) -> None:
    mine = LoRARequest("rule", 3, adapters["lora"], load_inplace=True)
    assert arrive(processor, [5], mine).lora_request.load_inplace is False
    assert mine.load_inplace is True


def test_an_id_keeps_its_weights_and_new_weights_get_an_id_of_their_own(processor: Any, adapters: dict[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapters["lora"], tmp_path / "adapter"))
    ids = []
    for seed in (1, 2, 1):
        save_variant(folder, adapters["lora"], seed=seed)
        ids.append(arrive(processor, [5], LoRARequest("rule", 3, str(folder))).lora_request.lora_int_id)
    assert ids[0] == ids[2] == 3 and FIRST_DERIVED_ID <= ids[1] < 2**31


def test_two_adapters_under_one_id_do_not_share_it(processor: Any, adapters: dict[str, str], tmp_path: Path) -> None:
    other = save_variant(tmp_path, adapters["lora"], seed=9)
    ids = {arrive(processor, [5], LoRARequest("rule", 3, path)).lora_request.lora_int_id for path in (adapters["lora"], other)}
    assert len(ids) == 2
