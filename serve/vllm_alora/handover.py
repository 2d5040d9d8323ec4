"""Seam: the activation point reaches the engine core.

The front end finds it and checks the adapter (`arrival`), but a LoRARequest loses every field it
does not declare on the way between the processes. `SamplingParams.extra_args` survives; here it
becomes an `ActivatedRequest`, which travels to the scheduler and to the workers. One id means one
content, whichever front end asked. A request that did not come through `arrival` is refused. Remove
when LoRARequest has a field for plugins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from .seam import seam
from .weights.prefetch import connect

KEY = "vllm_alora"
FIRST_DERIVED_ID = 2**30  # runner V2 keeps ids in 32 bits
NEAR_END = 64  # tokens at the end, among which an invocation mostly is
MOST_KNOWN = 4096  # adapters whose requests are copied instead of made


def activation_start(prompt_token_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Index of the first token of the last occurrence of `invocation`, or None: PEFT's
    `calculate_alora_offsets`, from the left. The last NEAR_END tokens are searched first, as the
    invocation is mostly there: then the cost is that of the suffix, not of the conversation.
    """
    wanted = list(invocation)
    tail = list(prompt_token_ids[-NEAR_END:])
    start = _last_start(tail, wanted)
    if start is not None:
        return len(prompt_token_ids) - len(tail) + start
    return _last_start(list(prompt_token_ids), wanted)


def _last_start(tokens: list[int], wanted: list[int]) -> int | None:
    for start in range(len(tokens) - len(wanted), -1, -1):
        if tokens[start] == wanted[0] and tokens[start : start + len(wanted)] == wanted:
            return start
    return None


class ActivatedRequest(LoRARequest):
    """A LoRARequest of one prompt: tokens from `activation_start` on are the adapter's, tokens
    before it the base model's. A plain LoRA is the case `activation_start == 0`. `content` is the
    SHA-256 of the adapter's files: it names the weights, which name, id and path do not. Unlike a
    LoRARequest, which compares by name, two of these are the same adapter if they have the same id:
    vLLM collects a batch's adapters in a set, and two versions of one name may meet there.
    """

    activation_start: int = 0
    content: str = ""

    def __eq__(self, request: object) -> bool:
        return isinstance(request, LoRARequest) and self.lora_int_id == request.lora_int_id

    def __hash__(self) -> int:
        return hash(self.lora_int_id)


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
