# ruff: noqa: E402 - the environment decides what is imported
"""A pytest plugin for `make test-gpu-path`: vLLM's path on a GPU, on a CPU. Runner V2, and the
wrapper of its Triton kernels, interpreted, with few programs a kernel.

vLLM and Triton decide this when they are imported, so nothing of vLLM may be imported before. Not
shown by it: FlashAttention, captured graphs, streams, bfloat16 kernels (the interpreter has no such
products), memory and speed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1",
    CUDA_VISIBLE_DEVICES="",
    VLLM_USE_V2_MODEL_RUNNER="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from triton.backends import backends

# vLLM wants an active driver; on a CPU that is Triton's driver for CPUs.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.platforms import current_platform


def _gpu_wrapper(_: object) -> str:
    return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


_platform: Any = type(current_platform)
_platform.get_punica_wrapper = classmethod(_gpu_wrapper)

from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op

SPLIT_K = 2  # vLLM's 64 and 8 keep a GPU busy and make the interpreter ten times slower
_configs = lora_shrink_op.get_lora_op_configs


def _few_programs(*args: Any, **kwargs: Any) -> dict[str, Any]:
    config = dict(_configs(*args, **kwargs))
    if "split_k" in config:
        config["split_k"] = SPLIT_K
    return config


lora_shrink_op.get_lora_op_configs = _few_programs
lora_expand_op.get_lora_op_configs = _few_programs
