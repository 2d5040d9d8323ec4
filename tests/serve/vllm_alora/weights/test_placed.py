"""A worker computes with the weights the request names, and with all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import PPMissingLayer
from vllm_alora.adapter import AdapterError, read_adapter
from vllm_alora.handover import ActivatedRequest
from vllm_alora.weights.placed import unplaced

from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft

pytestmark = pytest.mark.slow


def test_other_files_than_the_request_was_checked_with_and_loading_in_place_are_refused(
    served: Served, adapters: dict[str, str]
) -> None:
    content = read_adapter(adapters["first"]).content
    changed = ActivatedRequest("rule", 900, adapters["lora"], content=content)
    with pytest.raises(AdapterError, match="files changed after its request was checked"):
        served.runner.lora_manager.add_adapter(changed)
    with pytest.raises(AdapterError, match="load_inplace"):  # over weights in use
        in_place = LoRARequest("rule", 900, adapters["lora"], load_inplace=True)
        served.runner.lora_manager.add_adapter(in_place)


@pytest.mark.parametrize("pools", [True, False])
def test_layers_have_a_place_plain_packed_and_of_other_stages(*, pools: bool) -> None:
    """Without "model." where the model pools, and only there: vLLM leaves it out elsewhere, and the
    base would answer.
    """
    layer = torch.nn.Linear(1, 1)
    manager: Any = SimpleNamespace(
        modules={"model.layers.0.qkv_proj": layer, "model.layers.0.o_proj": layer},
        packed_modules={"model.layers.0.qkv_proj": ["model.layers.0.q_proj"]},
        model=torch.nn.ModuleDict({"mine": layer, "elsewhere": PPMissingLayer()}),
        is_pooling_model=pools,
    )
    short = ["layers.0.q_proj", "layers.0.o_proj", "layers.0.qkv_proj"]
    assert unplaced([*(f"model.{name}" for name in short), "elsewhere.q_proj"], manager) == []
    assert unplaced(short, manager) == ([] if pools else short)
    lost = ["model.layers.0.up_proj", "mine.q_proj"]
    assert unplaced(lost, manager) == lost


def test_on_a_cpu_no_other_layers_are_served(adapters: dict[str, str], tmp_path: Path) -> None:
    """By their class, whatever they are called; and the others of the same engine are served."""
    settings = {"max_loras": 1, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    settings |= {"kv_cache_memory_bytes": 2**26}
    with Served.start(**settings, lora_target_modules=None) as engine:
        output = save_random_adapter(tmp_path / "output", seed=1, targets=["lm_head", "q_proj"])
        with pytest.raises(AdapterError, match=r"is not served \(got lm_head\)"):
            engine.llm.llm_engine.add_lora(engine.request(output))
        prompt, lora = list(range(30, 70)), adapters["lora"]
        assert_peft([engine.ask_one(prompt, lora)], [prompt], [lora])
