"""vLLM as a backend: how it starts, and what it leaves behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch._inductor.exc import CppCompileError
from vllm.lora.ops.triton_ops import utils

from guard.errors import GuardError
from serve.engine import GuardEngine
from serve.engine.backends import vllm_engine
from tests.serve.cards import recipe
from tests.serve.engine.shared import NATS, assert_peft, runner
from tests.serve.guarded import CONVERSATION, ENGINE, adapter_folders, save_adapter
from tests.serve.heads import reference_logit, save_head

pytestmark = pytest.mark.slow


def test_an_engine_without_the_plugin_does_not_start(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "patched", lambda: {"vllm.a:f": True, "vllm.b:g": False})
    core = SimpleNamespace(shutdown=lambda: None)
    engine = SimpleNamespace(engine_core=core, collective_rpc=lambda _: [0])
    monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", lambda _: engine)
    with pytest.raises(GuardError, match=r"without the aLoRA plugin.*vllm\.b:g.*make doctor"):
        GuardEngine(recipe(), adapter_folders(), **ENGINE)


def test_an_engine_argument_that_vllm_does_not_have_is_named_with_the_nearest_one() -> None:
    with pytest.raises(GuardError, match=r"'blocksize'.*'block_size'"):
        GuardEngine(recipe(), {}, blocksize=32)


def fails_with(error: Exception) -> Callable[[object], None]:
    def start(_: object) -> None:
        raise error

    return start


COMPILER = CppCompileError(["g++"], "no space left")


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (None, r"did not start.*kv_cache_memory_bytes"),
        (fails_with(AssertionError()), r"did not start: AssertionError\(\).*engine section"),
        (fails_with(COMPILER), r"(?s)did not start: .*no space left.*enforce_eager: true"),
    ],
    ids=["too much memory", "an assertion of vLLM's", "a compiler that fails"],
)
def test_what_does_not_start_has_a_remedy(
    start: Any, problem: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    if start is not None:
        monkeypatch.setattr(vllm_engine.LLMEngine, "from_engine_args", start)
    with pytest.raises(GuardError, match=problem):
        GuardEngine(recipe(), {}, kv_cache_memory_bytes=2**50)


def test_a_closed_engine_leaves_those_beside_it_alone(
    engine: GuardEngine, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The one beside serves heads only, and answers without any adapter."""
    started = vllm_engine._start

    def warmed_up(*args: Any) -> Any:
        """As if a step had run before the engine was ready."""
        engine = started(*args)
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        worker.model_runner.scheduled_tokens = worker.model_runner.forward_passes = 1000
        return engine

    monkeypatch.setattr(vllm_engine, "_start", warmed_up)
    folder = save_adapter(tmp_path / "beside", "beside", seed=30)
    head = save_head(tmp_path / "head", "head", seed=31)
    with GuardEngine(recipe(), {"head": head}, **ENGINE) as of_heads:
        counters = of_heads.counters
        (verdict,) = of_heads.check(CONVERSATION).verdicts
        expected = reference_logit(CONVERSATION, of_heads.rules["head"].rule_text, head)
        assert verdict.logit == pytest.approx(expected, abs=NATS)
        assert counters.scheduled_tokens == counters.forward_passes == 0  # vLLM's warm-up is none
    engine.add("beside", folder)
    assert_peft(engine, ["beside"])
    engine.remove("beside")


def memory_of(engine: GuardEngine) -> list[weakref.ref[torch.Tensor]]:
    """Its keys and values, its weights, and a part of every layer's slots."""
    model_runner = runner(engine)
    layers = model_runner.lora_manager._adapter_manager.modules.values()
    slots = [layer.lora_a_stacked[0] for layer in layers]
    tensors = [*model_runner.kv_caches, *model_runner.model.parameters(), *slots]
    return [weakref.ref(tensor) for tensor in tensors]


def test_an_engine_that_is_closed_gives_its_memory_back_though_it_is_still_held() -> None:
    """And leaves nothing in the tables of vLLM's kernels."""
    engine = GuardEngine(recipe(), adapter_folders(), **ENGINE)
    held = memory_of(engine)
    for layer in runner(engine).lora_manager._adapter_manager.modules.values():
        utils._get_lora_a_ptr(list(layer.lora_a_stacked), layer.lora_a_stacked[0].device)
    assert utils._LORA_A_PTR_DICT
    del layer
    engine.close()
    assert not utils._LORA_A_PTR_DICT
    assert sum(tensor() is not None for tensor in held) == 0
    engine.close()  # twice does no harm
    assert list(engine.rules) == list(adapter_folders())
