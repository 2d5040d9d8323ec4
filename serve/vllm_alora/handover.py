"""Seam: the activation point reaches the engine core.

The front end finds it and checks the adapter (`arrival`), but a LoRARequest loses every field it does not declare on the
way between the processes. `SamplingParams.extra_args` is vLLM's own place for a plugin's data and survives; here it
becomes an `ActivatedRequest` again, which then travels as an object to the scheduler and to the workers.
A LoRA request that did not come through `arrival` was checked by nobody and is refused: vLLM answers it with an error and
lives on. Can go when LoRARequest has a field for plugins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from .activation import ActivatedRequest
from .seam import seam

KEY = "vllm_alora"


@seam("vllm.v1.request:Request.from_engine_core_request", "cls request block_hasher")
def from_engine_core_request(original: Callable[..., Any], cls: type, request: Any, block_hasher: Any) -> Any:
    """The scheduler's request, with an ActivatedRequest in the place of its LoRARequest."""
    lora = request.lora_request
    if lora is not None and request.sampling_params is not None:
        stamp = (request.sampling_params.extra_args or {}).get(KEY)
        if stamp is None:
            raise VLLMValidationError(f"vllm_alora: the request for adapter '{lora.lora_name}' bypassed the input processor")
        activation_start, content = stamp
        fields = {name: getattr(lora, name) for name in LoRARequest.__struct_fields__}
        request = copy.copy(request)
        request.lora_request = ActivatedRequest(**fields, activation_start=activation_start, content=content)
    return original(cls, request, block_hasher)
