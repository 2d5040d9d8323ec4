"""What the pressure benchmark asks of which engines. Knows nothing of measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from guard.recipe import Recipe

Order = Literal["cache-aware", "FCFS"]

DEMANDS = (0.5, 1.0, 2.0, 4.0)
SUFFIX_MARGIN = 200  # tokens of a prompt beside conversation and turn, at most
BLOCK_SIZE = 16  # vLLM's, where the recipe states none


@dataclass(frozen=True)
class PressureWork:
    """What is put to every engine.

    `turn_tokens`: the length of the turn with which conversations come again, including what all
    conversations begin with.
    """

    conversations: int = 8
    tokens: int = 5000  # each takes several steps
    rules: int = 20
    turn_tokens: int = 100
    few_slots: int = 8

    @property
    def engines(self) -> list[PressureEngine]:
        """The engines that get this work, in the order of the table."""
        few_slots = min(self.few_slots, self.rules)
        kinds: tuple[tuple[int, Order], ...] = (
            (self.rules, "cache-aware"),
            (few_slots, "cache-aware"),
            (self.rules, "FCFS"),
        )
        engines = []
        for slots, order in kinds:
            engines += [PressureEngine(slots, order, demand) for demand in DEMANDS]
        return engines


@dataclass(frozen=True)
class PressureEngine:
    """An engine to measure.

    `slots`: adapters on the device at once. `demand`: the tokens of all conversations over those
    that the cache holds.
    """

    slots: int
    order: Order
    demand: float

    def arguments(self, recipe: Recipe, work: PressureWork) -> dict[str, Any]:
        """The vLLM arguments that it has beside the recipe's."""
        from vllm_alora.kv.resident import RESIDENT_FIRST

        block_size = recipe.engine.get("block_size", BLOCK_SIZE)
        cache_tokens = work.conversations * work.tokens / self.demand
        return {
            "max_loras": self.slots,
            "max_model_len": work.tokens + work.turn_tokens + SUFFIX_MARGIN,
            "block_size": block_size,
            "num_gpu_blocks_override": round(cache_tokens / block_size),
            "additional_config": {RESIDENT_FIRST: self.order == "cache-aware"},
        }
