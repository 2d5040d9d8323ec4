"""vLLM as a backend: how it starts, and what it leaves behind."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guard.errors import GuardError
from serve.engine import GuardEngine
from serve.engine.backends import vllm_engine
from tests.serve.cards import recipe
from tests.serve.engine.shared import runner
from tests.serve.guarded import CONVERSATION, ENGINE, adapter_folders, peft_logit, save_adapter
from tests.serve.heads import reference_logit, save_head

pytestmark = pytest.mark.slow

NATS = 2e-3  # float32: two ways to compute the same logit


def test_an_engine_without_the_plugin_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serve.engine.backends.vllm_engine.patched", lambda: {"vllm.a:f": True, "vllm.b:g": False}
    )
    monkeypatch.setattr(
        "serve.engine.backends.vllm_engine.LLMEngine.from_engine_args",
        lambda _: SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: None), collective_rpc=lambda _: [0]
        ),
    )
    with pytest.raises(GuardError, match=r"without the aLoRA plugin.*vllm\.b:g.*make doctor"):
        GuardEngine(recipe(), adapter_folders(), **ENGINE)


def test_an_engine_argument_that_vllm_does_not_have_is_named_with_the_nearest_one() -> None:
    with pytest.raises(GuardError, match=r"'blocksize'.*'block_size'"):
        GuardEngine(recipe(), {}, blocksize=32)


def test_an_engine_that_does_not_start_names_the_settings_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    with pytest.raises(GuardError, match=r"did not start.*kv_cache_memory_bytes"):
        GuardEngine(recipe(), {}, kv_cache_memory_bytes=2**50)


def test_every_b_lies_in_memory_by_columns(engine: GuardEngine) -> None:
    def layouts(worker: Any) -> list[bool]:
        modules = worker.model_runner.lora_manager._adapter_manager.modules.values()
        return [part.mT.is_contiguous() for module in modules for part in module.lora_b_stacked]

    (found,) = engine.backend._engine.collective_rpc(layouts)
    assert len(found) == 6 * (3 + 1 + 2 + 1) and all(found)


def test_an_engine_that_is_closed_leaves_those_beside_it_as_they_are(
    engine: GuardEngine, tmp_path: Path
) -> None:
    """The one beside serves heads only, and answers without any adapter."""
    folder = save_adapter(tmp_path / "beside", "beside", seed=30)
    head = save_head(tmp_path / "head", "head", seed=31)
    with GuardEngine(recipe(), {"head": head}, **ENGINE) as of_heads:
        (verdict,) = of_heads.check(CONVERSATION).verdicts
        expected = reference_logit(CONVERSATION, of_heads.rules["head"].rule_text, head)
        assert verdict.logit == pytest.approx(expected, abs=NATS)
    engine.add("beside", folder)
    logit = engine.check(CONVERSATION, ["beside"]).verdicts[0].logit
    assert logit == pytest.approx(
        peft_logit(CONVERSATION, engine.rules["beside"].rule_text, folder), abs=NATS
    )
    engine.remove("beside")


def test_an_assertion_of_vllm_s_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("serve.engine.backends.vllm_engine.LLMEngine.from_engine_args", start)
    with pytest.raises(GuardError, match=r"did not start: AssertionError\(\).*engine section"):
        GuardEngine(recipe(), {}, **ENGINE)


def test_a_compiler_that_fails_is_an_error_with_the_line_that_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.exc import CppCompileError

    def start(_: object) -> None:
        raise CppCompileError(["g++"], "no space left")

    monkeypatch.setattr("serve.engine.backends.vllm_engine.LLMEngine.from_engine_args", start)
    with pytest.raises(
        GuardError, match=r"(?s)did not start: .*no space left.*enforce_eager: true"
    ):
        GuardEngine(recipe(), {}, **ENGINE)


def test_an_engine_that_is_closed_leaves_nothing_in_the_kernels_tables() -> None:
    from vllm.lora.ops.triton_ops import utils

    engine = GuardEngine(recipe(), adapter_folders(), **ENGINE)
    backend: Any = engine.backend
    runner = backend._engine.engine_core.engine_core.model_executor.driver_worker.worker
    manager = runner.model_runner.lora_manager._adapter_manager
    for layer in manager.modules.values():
        utils._get_lora_a_ptr(list(layer.lora_a_stacked), layer.lora_a_stacked[0].device)
    assert utils._LORA_A_PTR_DICT
    engine.close()
    assert not utils._LORA_A_PTR_DICT


def memory_of(engine: GuardEngine) -> list[weakref.ref[torch.Tensor]]:
    """Its keys and values, its weights, and a part of every layer's slots."""
    model_runner = runner(engine)
    layers = model_runner.lora_manager._adapter_manager.modules.values()
    slots = [layer.lora_a_stacked[0] for layer in layers]
    tensors = [*model_runner.kv_caches, *model_runner.model.parameters(), *slots]
    return [weakref.ref(tensor) for tensor in tensors]


def test_an_engine_that_is_closed_gives_its_memory_back_though_it_is_still_held() -> None:
    engine = GuardEngine(recipe(), adapter_folders(), **ENGINE)
    held = memory_of(engine)
    engine.close()
    assert sum(tensor() is not None for tensor in held) == 0
    engine.close()  # twice does no harm
    assert list(engine.rules) == list(adapter_folders())


def test_tokens_of_vllm_s_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as if a step had run before the engine was ready."""
    started = vllm_engine._start

    def warmed_up(*args: Any) -> Any:
        engine = started(*args)
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        runner.scheduled_tokens, runner.forward_passes = 1000, 10
        return engine

    monkeypatch.setattr(vllm_engine, "_start", warmed_up)
    engine = GuardEngine(recipe(), {}, **ENGINE)
    try:
        assert engine.counters.scheduled_tokens == engine.counters.forward_passes == 0
    finally:
        engine.close()
