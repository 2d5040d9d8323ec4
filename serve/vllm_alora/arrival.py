"""Seam: every request is checked where it arrives, and learns its activation point there.

The input processor is the first code of vLLM that has both the prompt's ids and the adapter, and
its errors are one request's. A prompt without the invocation is refused: the base would answer, and
that would read like the adapter's verdict. A bad adapter is refused: in a worker it would stop the
engine. Remove when vLLM serves aLoRA itself and validates adapters before it schedules them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from .adapter import AdapterFiles, check_adapter, read_adapter
from .handover import KEY, activation_start
from .seam import seam


class InvocationError(VLLMValidationError, ValueError):
    """A prompt on which an aLoRA cannot become active. One request's error (HTTP 400)."""


@seam(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs "
    "trace_headers priority data_parallel_rank resumable session_id kv_hints",
)
def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The checked request, with its activation point. Raises AdapterError or InvocationError."""
    request = original(self, *args, **kwargs)
    lora = request.lora_request
    if lora is None:
        return request
    if request.sampling_params is None:
        why = "adapters are served for generation, not for pooling. Leave the adapter out"
        raise InvocationError(f"adapter '{lora.lora_name}': {why}")
    checked = vars(self).setdefault("checked_contents", set())
    adapter = servable(read_adapter(lora.lora_path), self.lora_config, self.model_config, checked)
    if adapter.invocation and (request.resumable or request.prompt_embeds is not None):
        why = "an aLoRA generates from a complete prompt of token ids, not a stream or embeddings"
        raise InvocationError(f"adapter '{lora.lora_name}': {why}")
    start = active_from(request.prompt_token_ids, adapter, lora.lora_name)
    if lora.load_inplace:  # new weights come under a new id: none are loaded over weights in use
        request.lora_request = copy.copy(lora)
        request.lora_request.load_inplace = False
    extra_args = request.sampling_params.extra_args or {}
    request.sampling_params.extra_args = {**extra_args, KEY: [start, adapter.content]}
    return request


def servable(
    adapter: AdapterFiles, lora_config: Any, model_config: Any, checked_contents: set[str]
) -> AdapterFiles:
    """The adapter, not checked again if its content was. Raises AdapterError."""
    if adapter.content not in checked_contents:
        check_adapter(adapter, lora_config, model_config)
        checked_contents.add(adapter.content)
    return adapter


def active_from(
    prompt_token_ids: Sequence[int], adapter: AdapterFiles, name: str, expected: int | None = None
) -> int:
    """The token from which on the adapter acts in the prompt; 0 for a plain LoRA. Raises
    InvocationError where it never would, or not at the token that is `expected`.
    """
    start: int | None = 0
    if adapter.invocation:
        start = activation_start(prompt_token_ids, adapter.invocation)
    if start is None:
        raise InvocationError(
            f"adapter '{name}': the prompt does not contain the invocation tokens "
            f"{list(adapter.invocation)}, so the adapter would never become active and the base "
            "model would answer. Build the prompt with the invocation the adapter was trained with"
        )
    # Where the invocation is a turn's header, an earlier turn has it too: a prompt that lost its
    # last turn still has an invocation.
    if expected is not None and expected != start:
        raise InvocationError(
            f"adapter '{name}' would become active at token {start} of the prompt, expected was "
            f"{expected}: the prompt lost its last turn, or has one more. "
            "Build it again"
        )
    return start
