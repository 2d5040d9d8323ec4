"""The optimisations that are switched off, and the traffic. Knows nothing of engines.

To add an ablation: a row in `ABLATIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guard.recipe import Recipe
from guard.rule import RuleTurn


@dataclass(frozen=True)
class Traffic:
    """The load on an engine with `slots` slots, and the number of runs.

    Without `alpha` a run is one conversation of `tokens` tokens with all `adapters`; its lower
    bound is one prompt of the bare base with the needed tokens. With `alpha` a run is `requests`
    such conversations, each with one adapter by Zipf's law; in the lower bound the bare base
    answers them.
    """

    name: str
    tokens: int
    adapters: int
    slots: int
    runs: int = 5  # in a round
    warm_up_runs: int = 2  # before each round's runs
    alpha: float | None = None
    requests: int = 0
    in_host_memory: int | None = None  # number of adapters; None: all

    @property
    def engine(self) -> dict[str, Any]:
        """The vLLM arguments that this traffic needs."""
        if self.in_host_memory is None:
            return {"max_loras": self.slots}
        return {"max_loras": self.slots, "max_cpu_loras": self.in_host_memory}

    def __str__(self) -> str:
        slots = f"{self.slots} slots"
        if self.in_host_memory:
            slots += f", {self.in_host_memory} in host memory"
        if self.alpha is None:
            return f"a conversation of {self.tokens:,} tokens with {self.adapters} rules, {slots}"
        return (
            f"{self.requests} conversations of {self.tokens:,} tokens with one of {self.adapters} "
            f"rules each, Zipf's alpha {self.alpha}, {slots}"
        )


FAN_OUT = Traffic("fan-out", tokens=1000, adapters=100, slots=100)
WAVES = Traffic("waves", tokens=1000, adapters=100, slots=32)
FLEET = Traffic(
    "fleet",
    tokens=200,
    adapters=256,
    slots=32,
    runs=3,
    warm_up_runs=1,  # one is enough with so many conversations
    alpha=1.0,
    requests=256,
    in_host_memory=64,
)


@dataclass(frozen=True)
class Ablation:
    """An engine that lacks one optimisation.

    `seams_off`: seams of the plugin, named by the ends of their targets. `engine`: vLLM arguments.
    `rule_turn`: what the adapters read of a rule. `all_linear`: whether they have weights in every
    linear layer. `is_cpu_only`: whether the optimisation exists only on a CPU.
    """

    name: str
    seams_off: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    rule_turn: RuleTurn | None = None
    all_linear: bool = False
    one_by_one: bool = False  # a call for each rule
    slots_first: bool = True  # rules whose adapter is in a slot go before a conversation's others
    is_cpu_only: bool = False

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of this engine's adapters."""
        method = recipe.sharing_method
        settings = recipe.settings(method)
        if self.all_linear:
            lora = settings.lora | {"target_modules": "all-linear"}
            settings = settings.model_copy(update={"lora": lora})
        update = {
            "rule_turn": self.rule_turn or recipe.rule_turn,
            "methods": recipe.methods | {method: settings},
        }
        return recipe.model_copy(update=update)


FULL_ENGINE = "full engine"
NO_SHARED_PARTIAL_BLOCK = {"additional_config": {"vllm_alora_kept_partial_blocks": 0}}
VLLM_EVICTION = Ablation(
    "vLLM's eviction policy",
    seams_off=(  # together, because they need each other
        "_apply_adapters",
        "LRUCacheLoRAModelManager.activate_adapter",
        "remove_oldest_adapter",
    ),
)
VLLM_OPERATOR = Ablation(
    "vLLM's LoRA operator",
    seams_off=("add_lora_linear", "_create_lora_modules"),
    # It gives the base's tokens the adapter in the last slot: that one stays empty.
    engine={"max_loras": 101},
    is_cpu_only=True,
)
NO_SHARED_BLOCKS = Ablation(
    "no blocks shared between adapters",
    seams_off=("generate_block_hash_extra_keys", "get_request_block_hasher"),
    engine=NO_SHARED_PARTIAL_BLOCK,
)
ABLATIONS: Mapping[Traffic, tuple[Ablation, ...]] = {
    FAN_OUT: (
        Ablation(FULL_ENGINE),
        Ablation("not compiled", engine={"enforce_eager": True}),
        Ablation("one rule after the other", one_by_one=True),
        Ablation("the rule's title in every suffix", rule_turn="title"),
        Ablation("the rule's policy in every suffix", rule_turn="policy"),
        Ablation("weights in every linear layer", all_linear=True),
        Ablation("no partial-block sharing", engine=NO_SHARED_PARTIAL_BLOCK),
        Ablation(
            "rules wait for the conversation's step",
            engine={"additional_config": {"vllm_alora_share_in_step": False}},
        ),
        Ablation("every rule hashes the conversation", seams_off=("get_request_block_hasher",)),
        Ablation(
            "every rule looks the conversation up in the cache",
            seams_off=("find_longest_cache_hit",),
        ),
        Ablation(
            "every rule's blocks are counted and listed",
            seams_off=(
                "_get_num_evictable_blocks",
                "estimate_cached_tokens",
                "_connector_finished",
            ),
        ),
        Ablation(
            "every rule is planned by vLLM's scheduler",
            engine={"additional_config": {"vllm_alora_followers": False}},
        ),
        Ablation(
            "every rule's blocks are allocated by vLLM",
            # This leaves the planning to vLLM too.
            engine={"additional_config": {"vllm_alora_gives_held_blocks": False}},
        ),
        Ablation(
            "low-rank products in a loop over adapters",
            engine={"additional_config": {"vllm_alora_native_products": False}},
            is_cpu_only=True,
        ),
        Ablation("a step's slots in a loop over its tokens", seams_off=("convert_mapping",)),
        Ablation(
            "every rule reads the conversation's keys and values",
            seams_off=("_build_attention_metadata",),
            is_cpu_only=True,
        ),
        Ablation("resident adapters are looked up", seams_off=("_apply_adapters",)),
        Ablation(
            "the whole vocabulary's logits",
            engine={"additional_config": {"vllm_alora_answers": []}},
            is_cpu_only=True,
        ),
        Ablation("B stored by rows", seams_off=("_create_lora_modules",), is_cpu_only=True),
        VLLM_OPERATOR,
        Ablation("embedding and output layer wrapped too", engine={"lora_target_modules": None}),
        NO_SHARED_BLOCKS,
    ),
    WAVES: (
        Ablation(FULL_ENGINE),
        Ablation("FCFS instead of rules in slots first", slots_first=False),
        VLLM_EVICTION,
    ),
    FLEET: (
        Ablation(FULL_ENGINE),
        Ablation(
            "no asynchronous prefetch", engine={"additional_config": {"vllm_alora_prefetch": 0}}
        ),
        VLLM_EVICTION,
    ),
}
