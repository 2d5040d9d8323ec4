# ruff: noqa: E402 - the environment decides what is imported
"""Importing this makes a process on a CPU take vLLM's path on a GPU: runner V2, and the wrapper of
its Triton kernels, interpreted.

Import it before anything of vLLM, in a process of its own: vLLM and Triton decide this when they
are imported. It needs Triton, which `make setup` installs.
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
