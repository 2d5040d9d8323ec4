"""What vLLM derives from a recipe's sizes on a GPU, by its own platform for CUDA on a faked device.

In a process of its own, because vLLM remembers the platform. No engine starts.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from guard.machine.device import installed_device
from guard.recipe import load_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed_device() != "cpu", reason="a GPU need not be faked"),
]

STEP_SIZES = ("max_num_batched_tokens", "max_num_seqs")
# What a step computes for a rule, its title included: on a new conversation, and on one that was
# asked about before (counted at 48229d6).
NEW_TOKENS, KNOWN_TOKENS = 34, 10


class DerivedSizes(NamedTuple):
    """Of a step, and of the largest step that is captured as a graph, 0 for none."""

    tokens: int
    requests: int
    captured_tokens: int
    is_runner_v2: bool
    is_async: bool


def test_steps_of_the_recipe_are_large_and_captured_and_vllm_s_own_are_not() -> None:
    """A conversation of 5000 tokens and 100 rules are one step, fifty rules on a known one are
    captured. Were it so without them, the recipe's sizes could go.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        sizes = process.submit(sizes_on_an_h200).result()
    recipe, plain = sizes["recipe"], sizes["vLLM"]
    assert recipe.tokens >= 5000 + 100 * NEW_TOKENS and recipe.requests >= 100
    assert recipe.is_runner_v2 and not recipe.is_async
    assert plain.tokens < 5000
    assert plain.captured_tokens < 50 * KNOWN_TOKENS <= recipe.captured_tokens


def sizes_on_an_h200() -> dict[str, DerivedSizes]:
    """What a process finds that does nothing else."""
    import tests.serve.gpu_path.gpu_process  # noqa: F401 - before vLLM

    kernels = "vllm._C_stable_libtorch"  # a build for a CPU has none
    sys.modules[kernels] = ModuleType(kernels)
    import vllm_alora
    from vllm import platforms

    # Modules that ask for the platform's kernels when they are imported are there from here on.
    vllm_alora.register()
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    from serve.engine.backends import arguments

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

    of_cpu: Any = platforms.current_platform
    faked: Any = H200()
    platforms._current_platform = faked
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("current_platform") is of_cpu:
            module.current_platform = faked  # type: ignore[attr-defined]
    setattr(arguments, "installed_device", lambda: "cuda")  # noqa: B010 - mypy knows its type
    return {"recipe": _derived(), "vLLM": _derived(left_out=STEP_SIZES)}


def _derived(left_out: tuple[str, ...] = ()) -> DerivedSizes:
    """Of the 4B recipe's engine on the embedded base, whose files are here, without some of it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from serve.engine.backends.arguments import engine_args

    of_4b = load_recipe("qwen3-4b")
    engine = {name: value for name, value in of_4b.engine.items() if name not in left_out}
    update = {"dtype": of_4b.dtype, "engine": engine, "serving_memory": of_4b.serving_memory}
    recipe = load_recipe("tiny").model_copy(update=update)
    args = EngineArgs(**engine_args(recipe, [], {}))
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return DerivedSizes(
        tokens=config.scheduler_config.max_num_batched_tokens,
        requests=config.scheduler_config.max_num_seqs,
        captured_tokens=config.compilation_config.max_cudagraph_capture_size or 0,
        is_runner_v2=config.use_v2_model_runner,
        is_async=bool(config.scheduler_config.async_scheduling),
    )
