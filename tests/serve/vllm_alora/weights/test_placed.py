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
from vllm_alora.weights.placed import add_adapter, load_adapter, unplaced

from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft

pytestmark = pytest.mark.slow


class Worker:
    """vLLM's manager as the seams use it: a packed and a plain layer, and adapters."""

    def __init__(self, *, pools: bool = False) -> None:
        layer = torch.nn.Linear(1, 1)
        self.loaded: list[str] = []
        self.content_of_id: dict[int, str] = {}
        self._adapter_manager = SimpleNamespace(
            modules={"layers.0.qkv_proj": layer, "layers.0.o_proj": layer},
            packed_modules={"layers.0.qkv_proj": ["layers.0.q_proj", "layers.0.k_proj"]},
            model=torch.nn.ModuleDict({"mine": layer, "elsewhere": PPMissingLayer()}),
            _registered_adapters=self.content_of_id,
            is_pooling_model=pools,
        )
        self.adapter_loads = 0

    def list_adapters(self) -> set[int]:
        return set(self.content_of_id)

    def remove_adapter(self, adapter_id: int) -> None:
        self.content_of_id.pop(adapter_id)

    def add(
        self,
        request: LoRARequest,
        modules: tuple[str, ...] = ("layers.0.q_proj", "layers.0.o_proj"),
    ) -> None:
        def original_load(self: Any, request: LoRARequest) -> Any:
            self.loaded.append(request.lora_path)
            return SimpleNamespace(loras=dict.fromkeys(modules))

        def original_add(self: Any, request: LoRARequest) -> bool:
            if request.lora_int_id not in self.list_adapters():
                load_adapter.wrapper(original_load, self, request)
            return True

        add_adapter.wrapper(original_add, self, request)


def named(
    adapters: dict[str, str], which: str, content_of: str, adapter_id: int = 1
) -> ActivatedRequest:
    """A request for the folder of `which` that was checked with the content of `content_of`."""
    content = read_adapter(adapters[content_of]).content
    return ActivatedRequest("rule", adapter_id, adapters[which], content=content)


def test_an_adapter_is_loaded_once_and_again_from_other_files(adapters: dict[str, str]) -> None:
    worker = Worker()
    for _ in range(2):
        worker.add(named(adapters, "lora", "lora"))
    assert worker.loaded == [adapters["lora"]]
    assert worker.adapter_loads == 1
    worker = Worker()
    worker.add(LoRARequest("preloaded", 1, adapters["lora"]))
    worker.add(named(adapters, "first", "first"))
    assert worker.loaded == [adapters["lora"], adapters["first"]]


def test_other_files_and_tensors_that_vllm_would_drop_are_refused(adapters: dict[str, str]) -> None:
    with pytest.raises(AdapterError, match="files changed after its request was checked"):
        Worker().add(named(adapters, "lora", "first"))
    dropped = ("layers.0.o_proj", "layers.9.q_proj")
    problem = r"layers that the engine cannot adapt \(got layers\.9\.q_proj\)"
    with pytest.raises(AdapterError, match=problem):
        Worker().add(named(adapters, "lora", "lora"), modules=dropped)
    with pytest.raises(AdapterError, match="load_inplace"):  # over weights in use
        Worker().add(LoRARequest("rule", 1, adapters["lora"], load_inplace=True))


def test_plain_and_packed_layers_and_other_stages_layers_have_a_place() -> None:
    manager = Worker()._adapter_manager
    placed = ["layers.0.q_proj", "layers.0.o_proj", "layers.0.qkv_proj", "elsewhere.q_proj"]
    assert unplaced(placed, manager) == []
    lost = ["layers.0.up_proj", "mine.q_proj"]
    assert unplaced(lost, manager) == lost


def test_a_name_without_model_is_a_layer_where_the_model_pools_and_only_there() -> None:
    """vLLM leaves it out elsewhere, and the base would answer."""
    short = ["layers.0.q_proj", "layers.0.o_proj"]
    for pools, expected in ((True, []), (False, short)):
        manager = Worker(pools=pools)._adapter_manager
        layer = manager.modules["layers.0.o_proj"]
        packed = "model.layers.0.qkv_proj"
        manager.modules = {packed: layer, "model.layers.0.o_proj": layer}
        manager.packed_modules = {packed: ["model.layers.0.q_proj", "model.layers.0.k_proj"]}
        assert unplaced(short, manager) == expected
        assert unplaced([f"model.{name}" for name in short], manager) == []


def test_on_a_cpu_no_other_layers_are_served(adapters: dict[str, str], tmp_path: Path) -> None:
    """By their class, whatever they are called; and the others of the same engine are served."""
    settings = {"max_loras": 1, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    engine = Served.start(**settings, lora_target_modules=None, kv_cache_memory_bytes=2**26)
    try:
        output = save_random_adapter(tmp_path / "output", seed=1, targets=["lm_head", "q_proj"])
        with pytest.raises(AdapterError, match=r"is not served \(got lm_head\)"):
            engine.llm.llm_engine.add_lora(engine.request(output))
        prompt = list(range(30, 70))
        lora = adapters["lora"]
        assert_peft([engine.ask_one(prompt, lora)], [prompt], [lora])
    finally:
        engine.close()
