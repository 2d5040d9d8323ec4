"""Seam: every request is checked where it arrives, and learns its activation point there.

The input processor is the first code of vLLM that has both the prompt's ids and the adapter, for `LLM` and for the server
alike, and its errors are one request's errors. A prompt without the invocation is refused: PEFT would answer with the base
model, and that would read like the adapter's verdict. A bad adapter is refused: in a worker it would stop the whole engine.
Can go when vLLM serves aLoRA itself and validates adapters before it schedules them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

from .activation import activation_start
from .adapter import Adapter, check_adapter, read_adapter
from .handover import KEY
from .seam import seam

FIRST_DERIVED_ID = 2**30  # runner V2 keeps ids in 32 bits


class InvocationError(VLLMValidationError, ValueError):
    """A prompt on which an aLoRA cannot become active. One request's error (HTTP 400)."""


@seam(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs trace_headers priority "
    "data_parallel_rank resumable session_id kv_hints",
)
def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's checked request, its adapter checked too and its activation point found. Raises AdapterError or InvocationError."""
    request = original(self, *args, **kwargs)
    lora = request.lora_request
    if lora is None:
        return request
    adapter = read_adapter(lora.lora_path)
    checked = vars(self).setdefault("checked_contents", set())
    if adapter.content not in checked:
        check_adapter(adapter, self.lora_config, self.model_config.hf_config)
        checked.add(adapter.content)
    start = _activation_start(request, adapter, lora.lora_name)
    request.lora_request = copy.copy(lora)
    request.lora_request.lora_int_id = _id_of(adapter.content, lora.lora_int_id, vars(self).setdefault("content_of_adapter_id", {}))
    request.lora_request.load_inplace = False  # new weights come under a new id, so nothing is ever loaded over weights in use
    if request.sampling_params is not None:
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), KEY: [start, adapter.content]}
    return request


def _id_of(content: str, wanted: int, content_of_id: dict[int, str]) -> int:
    """The adapter id that means `content` in this engine: `wanted` for the first content seen under it, else one made from the content.

    vLLM never looks at an adapter's files again once it has loaded an id. So an adapter that was trained again needs another id.
    """
    while content_of_id.setdefault(wanted, content) != content:
        wanted = FIRST_DERIVED_ID + (int(content[:7], 16) if wanted < FIRST_DERIVED_ID else wanted + 1 - FIRST_DERIVED_ID)
    return wanted


def _activation_start(request: Any, adapter: Adapter, name: str) -> int:
    if not adapter.invocation:
        return 0
    if request.sampling_params is None or request.resumable or request.prompt_embeds is not None:
        raise InvocationError(f"adapter '{name}': an aLoRA generates from a complete prompt of token ids, not from a stream or embeddings")
    start: int | None = activation_start(request.prompt_token_ids, adapter.invocation)
    if start is None:
        raise InvocationError(
            f"adapter '{name}': the prompt does not contain the invocation tokens {list(adapter.invocation)}, so the adapter would never "
            "become active and the base model would answer. Build the prompt with the invocation the adapter was trained with"
        )
    return start
