"""How the memory that a recipe gives to serving is shared between keys and values and adapters. Knows nothing of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from guard.errors import GuardError
from guard.recipe import Recipe, ServingMemory

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Bytes: of one token's keys and values, and of an adapter of the largest rank."""

    token: int
    adapter: int


def sizes_of(recipe: Recipe, max_rank: int, targets: Sequence[str] | None) -> Sizes:
    """From the base's architecture; an adapter has all of `targets`, by default every linear layer of the decoder.

    Raises GuardError if the base has no layer whose name ends in one of them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(recipe.base_path, revision=recipe.commit)
    width = getattr(torch, recipe.dtype).itemsize
    with torch.device("meta"):  # shapes only
        model = AutoModelForCausalLM.from_config(config)
    layers = [
        (name.rpartition(".")[2], module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    ]
    if unknown := set(targets or ()) - {name for name, _ in layers}:
        remedy = f"With serving_memory, name layers as the base's files do: {', '.join(sorted({name for name, _ in layers}))}"
        raise GuardError(
            "no layer of the base has this name",
            got=f"lora_target_modules: {', '.join(sorted(unknown))}",
            remedy=remedy,
        )
    of_decoder = {name for name, module in layers if isinstance(module, torch.nn.Linear)} - {
        "lm_head"
    }
    adapted = sum(
        sum(module.weight.shape)
        for name, module in layers
        if name in (of_decoder if targets is None else targets)
    )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(
        token=2 * config.num_hidden_layers * config.num_key_value_heads * head * width,
        adapter=max_rank * adapted * width,
    )


def shared_out(
    memory: ServingMemory,
    sizes: Sizes,
    adapters: int,
    context_tokens: int,
    places: int | None = None,
) -> dict[str, Any]:
    """vLLM EngineArgs that fill the memory and not more. `adapters`: how many are served.

    First one conversation of the full context, then places for adapters: `places` of them, or at most half of what is left and at most
    one each; the rest holds conversations. The host keeps a copy of every adapter that has a place, so it chooses no more places than
    copies. Raises GuardError if the device's part is too little for one conversation and `places`, or one adapter.
    """
    found: dict[str, Any] = {}
    if memory.host_gib is not None:
        found["max_cpu_loras"] = max(1, round(memory.host_gib * GIB) // sizes.adapter)
        adapters = min(adapters, found["max_cpu_loras"])
    if memory.device_gib is not None:
        context = (context_tokens + 64) * sizes.token  # blocks are whole, and one is not used
        left = round(memory.device_gib * GIB) - context
        if left < (places or 1) * sizes.adapter:
            least = (context + (places or 1) * sizes.adapter) / GIB
            room = f"{places} places for adapters (max_loras)" if places else "one adapter"
            what = f"the memory does not hold a conversation of the recipe's context and {room}"
            raise GuardError(
                what,
                got=f"serving_memory: device_gib: {memory.device_gib}",
                remedy=f"Give at least {least:.2f}",
            )
        found["max_loras"] = places or max(1, min(adapters, left // 2 // sizes.adapter))
        found["kv_cache_memory_bytes"] = context + left - found["max_loras"] * sizes.adapter
    return found
