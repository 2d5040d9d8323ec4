"""A pytest plugin: vLLM's way on a GPU, on a CPU, with few programs a kernel. `make test-gpu-path`.

Not shown by it: FlashAttention, captured graphs, streams, bfloat16 kernels (the interpreter has no
such products), memory and speed.
"""

from __future__ import annotations

from typing import Any

import tests.serve.gpu_path.gpu_process  # noqa: F401 - before vLLM

# isort: split
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
