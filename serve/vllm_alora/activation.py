"""Where an adapter becomes active in a prompt, and the request that carries it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.lora.request import LoRARequest

NEAR_END = 64  # tokens at the end, among which an invocation mostly is


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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_int_id == other.lora_int_id

    def __hash__(self) -> int:
        return hash(self.lora_int_id)
