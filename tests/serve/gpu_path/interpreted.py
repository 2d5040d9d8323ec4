# ruff: noqa: E402 - the environment decides what is imported
"""A pytest plugin: what vLLM does on a GPU, on a CPU. Runner V2, and Triton's kernels interpreted.

    python -m pytest -n0 -p tests.serve.gpu_path.interpreted tests/serve/gpu_path/ring_*.py

A process of its own, because vLLM and Triton decide all of it when they are imported. Not shown by
it: FlashAttention, captured graphs, streams, bfloat16 kernels (the interpreter has no such
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

# vLLM wants a driver that is active, and on a CPU the one of Triton for CPUs.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]

from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.platforms import current_platform

type(current_platform).get_punica_wrapper = classmethod(
    lambda cls: "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
)

SPLIT_K = 2  # vLLM's 64 and 8 keep a GPU busy and make the interpreter ten times slower
_configs = lora_shrink_op.get_lora_op_configs


def _few_programs(*args: Any, **kwargs: Any) -> dict[str, Any]:
    config = dict(_configs(*args, **kwargs))
    if "split_k" in config:
        config["split_k"] = SPLIT_K
    return config


lora_shrink_op.get_lora_op_configs = _few_programs
lora_expand_op.get_lora_op_configs = _few_programs
