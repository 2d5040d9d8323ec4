"""A worker computes with the weights the request names, and with all of them."""

from __future__ import annotations

import shutil
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

ADAPTER_ID = 900


def request_of(folder: str, content_of: str) -> ActivatedRequest:
    """A request for the adapter in `folder` that was checked with the content of `content_of`."""
    content = read_adapter(content_of).content
    return ActivatedRequest("rule", ADAPTER_ID, folder, content=content)


def test_an_adapter_is_loaded_once_and_again_from_other_files(
    served: Served, adapters: dict[str, str], tmp_path: Path
) -> None:
    worker = served.runner.lora_manager
    before = getattr(worker, "adapter_loads", 0)  # there from the first one on
    folder = shutil.copytree(adapters["lora"], tmp_path / "adapter")
    worker.add_adapter(LoRARequest("preloaded", ADAPTER_ID, str(folder)))
    for _ in range(2):
        worker.add_adapter(request_of(str(folder), adapters["lora"]))
    assert worker.adapter_loads - before == 1
    shutil.copytree(adapters["first"], folder, dirs_exist_ok=True)
    worker.add_adapter(request_of(str(folder), adapters["first"]))
    assert worker.adapter_loads - before == 2
    with pytest.raises(AdapterError, match="files changed after its request was checked"):
        worker.add_adapter(request_of(str(folder), adapters["second"]))
    with pytest.raises(AdapterError, match="load_inplace"):  # over weights in use
        worker.add_adapter(LoRARequest("rule", 1, adapters["lora"], load_inplace=True))
    worker.remove_adapter(ADAPTER_ID)


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
