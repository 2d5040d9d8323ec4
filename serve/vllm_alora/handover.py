"""Seam: the activation point reaches the engine core.

The front end finds it and checks the adapter (`arrival`), but a LoRARequest loses every field it
does not declare on the way between the processes. `SamplingParams.extra_args` is vLLM's own place
for a plugin's data and survives; here it becomes an `ActivatedRequest` again, which then travels as
an object to the scheduler and to the workers. Its id is settled here too, because all front ends
meet in the engine core: one id means one content, whoever asked. A LoRA request that did not come
through `arrival` was checked by nobody and is refused: vLLM answers it with an error and lives on.
Remove when LoRARequest has a field for plugins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from .activation import ActivatedRequest
from .seam import seam
from .weights.prefetch import connect

KEY = "vllm_alora"
FIRST_DERIVED_ID = 2**30  # runner V2 keeps ids in 32 bits
MOST_KNOWN = 4096  # adapters whose requests are copied instead of made


@seam("vllm.v1.engine.core:EngineCore.preprocess_add_request", "self request")
def preprocess_add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
    """The scheduler's request, with an ActivatedRequest in the place of its LoRARequest."""
    lora = request.lora_request
    if lora is not None:
        stamp = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(KEY)
        if stamp is None:
            raise VLLMValidationError(
                f"vllm_alora: the request for adapter '{lora.lora_name}' bypassed the input "
                "processor. Send it through vLLM's own front end, with the plugin installed "
                "there too"
            )
        request = copy.copy(request)
        request.lora_request = activated(self, lora, *stamp)
    return original(self, request)


def activated(engine_core: Any, lora: Any, activation_start: int, content: str) -> ActivatedRequest:
    """The request by which scheduler and worker of `engine_core` know one prompt's adapter."""
    connect(engine_core)
    content_of_id = vars(engine_core).setdefault("content_of_adapter_id", {})
    adapter_id = _id_of(content, lora.lora_int_id, content_of_id)
    requests: dict[tuple[int, str], ActivatedRequest] = vars(engine_core).setdefault(
        "activated", {}
    )
    if (adapter_id, lora.lora_path) not in requests:
        if len(requests) >= MOST_KNOWN:
            requests.clear()
        fields = {name: getattr(lora, name) for name in LoRARequest.__struct_fields__}
        fields["lora_int_id"] = adapter_id
        requests[adapter_id, lora.lora_path] = ActivatedRequest(**fields, content=content)
    request = copy.copy(requests[adapter_id, lora.lora_path])
    request.activation_start = activation_start
    return request


def _id_of(content: str, requested_id: int, content_of_id: dict[int, str]) -> int:
    """The adapter id that means `content` in this engine. `requested_id` for the first content seen
    under it, else one made from the content: vLLM never looks at an adapter's files again once it
    has loaded an id, so an adapter that was trained again needs another id.
    """
    adapter_id = requested_id
    while content_of_id.setdefault(adapter_id, content) != content:
        if adapter_id < FIRST_DERIVED_ID:
            adapter_id = FIRST_DERIVED_ID + int(content[:7], 16)
        else:
            adapter_id += 1
    return adapter_id
