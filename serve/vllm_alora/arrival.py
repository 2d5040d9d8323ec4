"""Seam: every request is checked where it arrives, and learns its activation point there.

The input processor is the first code of vLLM that has both the prompt's ids and the adapter, for
`LLM` and for the server alike, and its errors are one request's errors. A prompt without the
invocation is refused: PEFT would answer with the base model, and that would read like the adapter's
verdict. A bad adapter is refused: in a worker it would stop the whole engine. Can go when vLLM
serves aLoRA itself and validates adapters before it schedules them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from .activation import activation_start
from .adapter import AdapterError, AdapterFiles, check_adapter, read_adapter
from .handover import KEY
from .seam import seam

# In SamplingParams.extra_args, from a caller who knows: [activation start, content].
EXPECTED = "vllm_alora_expected"


class InvocationError(VLLMValidationError, ValueError):
    """A prompt on which an aLoRA cannot become active. One request's error (HTTP 400)."""


@seam(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "self request_id prompt params supported_tasks arrival_time lora_request tokenization_kwargs "
    "trace_headers priority data_parallel_rank resumable session_id kv_hints",
)
def process_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's checked request, its adapter checked too and its activation point found. Raises
    AdapterError or InvocationError.
    """
    request = original(self, *args, **kwargs)
    if request.lora_request is not None:
        checked = vars(self).setdefault("checked_contents", set())
        stamp(request, self.lora_config, self.model_config, checked)
    return request


def stamp(request: Any, lora_config: Any, model_config: Any, checked_contents: set[str]) -> None:
    """Check the adapter of an EngineCoreRequest and note its activation point for `handover`.

    `checked_contents` are the adapters' contents that this engine has found servable. Raises
    AdapterError or InvocationError.
    """
    lora = request.lora_request
    if request.sampling_params is None:
        raise InvocationError(
            f"adapter '{lora.lora_name}': adapters are served for generation, not for pooling. "
            "Leave the adapter out"
        )
    adapter = read_adapter(lora.lora_path)
    if adapter.content not in checked_contents:
        check_adapter(adapter, lora_config, model_config)
        checked_contents.add(adapter.content)
    start = _activation_start(request, adapter, lora.lora_name)
    extra_args = request.sampling_params.extra_args or {}
    if EXPECTED in extra_args:
        _check_expected(extra_args[EXPECTED], start, adapter, lora.lora_name)
    if lora.load_inplace:  # new weights come under a new id: none are loaded over weights in use
        request.lora_request = copy.copy(lora)
        request.lora_request.load_inplace = False
    request.sampling_params.extra_args = {**extra_args, KEY: [start, adapter.content]}


def _check_expected(expected: Sequence[Any], start: int, adapter: AdapterFiles, name: str) -> None:
    """Raise unless the caller's `[activation start, content]` are those found.

    Where the invocation is a turn's header, an earlier turn has it too: a prompt that lost its last
    turn is not without invocation.
    """
    try:
        expected_start, content = expected
    except (TypeError, ValueError):
        raise InvocationError(
            f"{EXPECTED} must be [activation start, content], got {str(expected)[:60]}"
        ) from None
    if content != adapter.content:
        remedy = "Remove the adapter and add it again, or start the engine again"
        raise AdapterError(
            "the adapter's files have changed since it was loaded",
            where=adapter.path,
            remedy=remedy,
        )
    if expected_start != start:
        raise InvocationError(
            f"adapter '{name}' would become active at token {start} of the prompt, expected was "
            f"{expected_start}: the prompt lost its last turn, or has one more. Build it again"
        )


def _activation_start(request: Any, adapter: AdapterFiles, name: str) -> int:
    if not adapter.invocation:
        return 0
    if request.resumable or request.prompt_embeds is not None:
        raise InvocationError(
            f"adapter '{name}': an aLoRA generates from a complete prompt of token ids, "
            "not from a stream or embeddings"
        )
    start: int | None = activation_start(request.prompt_token_ids, adapter.invocation)
    if start is None:
        raise InvocationError(
            f"adapter '{name}': the prompt does not contain the invocation tokens "
            f"{list(adapter.invocation)}, so the adapter would never become active and the base "
            "model would answer. Build the prompt with the invocation the adapter was trained with"
        )
    return start
