"""What vLLM derives from a recipe's sizes on a GPU, by its own platform for CUDA on a faked device.

Nothing starts, and nothing is computed.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from vllm import platforms
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.usage.usage_lib import UsageContext

from guard.recipe import Recipe, load_recipe
from serve.engine import arguments
from serve.engine.arguments import engine_args

# What a step computes for a rule, its title included: on a new conversation, and on one that was
# asked about before (make bench NAME=gpu_counts).
NEW_TOKENS, KNOWN_TOKENS = 34, 10


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's modules and the guard engine find an H200."""
    kernels = "vllm._C_stable_libtorch"  # a build for a CPU has none
    monkeypatch.setitem(sys.modules, kernels, ModuleType(kernels))
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class H200(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 * 2**30

    of_cpu, faked = platforms.current_platform, H200()
    monkeypatch.setattr(platforms, "_current_platform", faked)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("current_platform") is of_cpu:
            monkeypatch.setattr(module, "current_platform", faked)
    monkeypatch.setattr(arguments, "installed_device", lambda: "cuda")


def recipe(*left_out: str) -> Recipe:
    """The 4B recipe's engine on the embedded base, whose files are here, without some of it."""
    of_4b = load_recipe("qwen3-4b")
    engine = {name: value for name, value in of_4b.engine.items() if name not in left_out}
    update = {
        "dtype": of_4b.dtype,
        "engine": engine,
        "serving_memory": of_4b.serving_memory,
    }
    return load_recipe("tiny").model_copy(update=update)


def config_of(recipe: Recipe) -> Any:
    """vLLM's configuration of the guard engine."""
    args = EngineArgs(**engine_args(recipe, [], {}))
    return args.create_engine_config(UsageContext.ENGINE_CONTEXT)


@pytest.mark.usefixtures("on_an_h200")
def test_a_conversation_of_5000_tokens_and_100_rules_are_one_step_of_the_recipe() -> None:
    config = config_of(recipe())
    assert config.use_v2_model_runner
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.max_num_batched_tokens >= 5000 + 100 * NEW_TOKENS
    assert config.scheduler_config.max_num_seqs >= 100


@pytest.mark.usefixtures("on_an_h200")
def test_fifty_rules_on_a_known_conversation_are_a_step_that_is_captured() -> None:
    config = config_of(recipe())
    assert config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    assert config.compilation_config.max_cudagraph_capture_size >= 50 * KNOWN_TOKENS


@pytest.mark.usefixtures("on_an_h200")
def test_by_itself_vllm_takes_smaller_steps_and_captures_less() -> None:
    """Were it not so, the recipe's sizes could go."""
    config = config_of(recipe("max_num_batched_tokens", "max_num_seqs"))
    assert config.scheduler_config.max_num_batched_tokens < 5000
    assert config.compilation_config.max_cudagraph_capture_size < 50 * KNOWN_TOKENS
