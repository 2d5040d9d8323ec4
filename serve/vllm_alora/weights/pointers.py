"""What vLLM's Triton kernels remember of an engine's adapter slots, and how to make them forget.

They keep the slots' tensors in tables of the process, by the tensors' addresses, and never drop an
entry: a closed engine's slots would stay in device memory (5.6 GB for Qwen3-4B with 128 slots), and
a later engine whose slots lie at the same addresses would be read with the old strides. Not a seam:
nothing of vLLM is wrapped. Remove when vLLM drops them with an engine.
"""

from __future__ import annotations

import sys
from typing import Any

TABLES = "vllm.lora.ops.triton_ops.utils"


def forget_pointers(lora_manager: Any) -> None:
    """Drop the kernels' entries for the slots of this worker's LoRA manager.

    The entries of other engines stay: captured graphs read them.
    """
    tables: Any = sys.modules.get(TABLES)  # loaded where the kernels are
    if tables is None:
        return
    addresses: set[int] = set()
    for layer in lora_manager._adapter_manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            addresses.update(weights.data_ptr() for weights in stacked)
    for table in (tables._LORA_A_PTR_DICT, tables._LORA_B_PTR_DICT):
        for key in list(table):
            if not addresses.isdisjoint(key):
                del table[key]
