"""Turns a plan into replicas that can be simulated: by method, the cost of a step and what fits.

Costs are what `make bench NAME=calibrate` measured on this machine. Bytes are counted, and memory
is shared out, by the engine's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import Recipe, ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, Sizes, shared_out, sizes_of
from serve.plan.batching import MAX_SEQUENCES, STEP_TOKENS, ReplicaSizes
from serve.plan.calibration import COMMAND, DeviceCalibration, FittedCost
from serve.plan.plan_file import Plan

# What PEFT calls all-linear, in Qwen's and Llama's layers.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class PlannedMethod:
    """A replica that serves one method. `bytes_of`: the bytes of one piece of each kind."""

    name: str
    cost: FittedCost
    suffix_tokens: int
    sizes: ReplicaSizes
    bytes_of: Sizes

    @property
    def shares(self) -> bool:
        """Whether rules share the conversation."""
        return METHODS[self.name].shares_conversation

    @property
    def label(self) -> str:
        return METHODS[self.name].label


def deploy(plan: Plan, calibration: DeviceCalibration) -> list[PlannedMethod]:
    """A replica for each adapter method of the plan's model.

    Raises GuardError where the model, the calibration and the memory do not fit together.
    """
    recipe = load_recipe(plan.model)
    if recipe.is_encoder:
        remedy = "Plan with a decoder; an encoder is measured by `make bench NAME=encoder`"
        raise GuardError("only decoders are planned", got=plan.model, remedy=remedy)
    if calibration.model != plan.model:
        problem = "the calibration is of another model"
        remedy = f"Run `{COMMAND} MODEL={plan.model}`"
        raise GuardError(problem, got=calibration.model, remedy=remedy)
    methods = []
    for name in sorted(recipe.adapter_methods):
        cost, bytes_of = calibration.cost(name), _bytes_of(recipe, name)
        sizes = _replica_sizes(plan, recipe, bytes_of, calibration.scaffold_tokens)
        methods.append(PlannedMethod(name, cost, calibration.suffix_tokens, sizes, bytes_of))
    return methods


def _bytes_of(recipe: Recipe, method: str) -> Sizes:
    targets = recipe.settings(method).lora.get("target_modules", PROJECTIONS)
    if targets == "all-linear":
        targets = PROJECTIONS
    # A slot has room for the largest rank, whatever the adapter's own rank is.
    return sizes_of(recipe, recipe.max_rank, targets)


def _replica_sizes(plan: Plan, recipe: Recipe, bytes_of: Sizes, scaffold: int) -> ReplicaSizes:
    """What a replica has room for, with its memory split as the engine splits it."""
    adapters, engine = plan.traffic.rules, recipe.engine
    memory = ServingMemory(
        device_gib=_memory_left(plan, recipe, bytes_of), host_gib=recipe.serving_memory.host_gib
    )
    stated_slots = plan.slots or engine.get("max_loras")
    shared = shared_out(memory, bytes_of, adapters, recipe.context_tokens, stated_slots)
    return ReplicaSizes(
        step_tokens=engine.get("max_num_batched_tokens", STEP_TOKENS),
        max_sequences=engine.get("max_num_seqs", MAX_SEQUENCES),
        slots=shared["max_loras"],
        block_size=engine.get("block_size", 32),
        cache_tokens=shared["kv_cache_memory_bytes"] // bytes_of.token,
        adapters=adapters,
        scaffold_tokens=scaffold,
    )


def _memory_left(plan: Plan, recipe: Recipe, bytes_of: Sizes) -> float:
    """The GiB beside the base's weights."""
    stated_gib, left_gib = plan.memory_gib, recipe.serving_memory.device_gib
    if stated_gib is not None:
        left_gib = stated_gib - bytes_of.weights / GIB
    if left_gib is None:
        remedy = "State `memory_gib` in the plan"
        raise GuardError("how much memory serving may take is not known", remedy=remedy)
    if left_gib <= 0:
        remedy = f"It needs {bytes_of.weights / GIB:.1f} GiB and room for conversations"
        got = f"{stated_gib} GiB"
        raise GuardError("the base does not fit into the device's memory", got=got, remedy=remedy)
    return left_gib
