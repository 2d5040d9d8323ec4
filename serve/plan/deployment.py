"""Turns a plan into replicas that can be simulated: by method, the cost of a step and what fits.

A method's coefficients are measured on this machine by `make bench NAME=calibrate`, or computed
from a device's operations and bytes; never mixed. Memory is shared out as the engine does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.machine.device import installed_device
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, Sizes, shared_out
from serve.plan.batching import MAX_SEQUENCES, STEP_TOKENS, ReplicaSizes
from serve.plan.calibration import COMMAND, DeviceCalibration, FittedCost, load_calibration
from serve.plan.device import (
    BYTES,
    ComputedCost,
    DecoderShape,
    Device,
    adapter_rank,
    adapter_targets,
    load_device,
    shape_of,
)
from serve.plan.plan_file import HERE, Plan

RULE_TITLE = "The assistant must not give the user advice on their own case."


@dataclass(frozen=True)
class PlannedMethod:
    """A replica that serves one method. `bytes_of`: the bytes of one piece of each kind."""

    name: str
    cost: FittedCost | ComputedCost
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


@dataclass(frozen=True)
class Deployment:
    """A plan's replicas, and the origin of their coefficients; without a device: this machine."""

    methods: tuple[PlannedMethod, ...]
    hardware: str
    source: str
    price_an_hour: float
    price_source: str
    device: Device | None


def deploy(plan: Plan, runs: Path) -> Deployment:
    """The deployment of a plan.

    Raises GuardError where the device, the model and the memory do not fit together.
    """
    recipe = load_recipe(plan.model)
    shape = plan.shape or shape_of(recipe)
    if plan.device == HERE:
        return _measured(plan, recipe, shape, load_calibration(runs / "calibration.json"))
    return _computed(plan, recipe, shape, load_device(plan.device))


def _measured(
    plan: Plan, recipe: Recipe, shape: DecoderShape, calibration: DeviceCalibration
) -> Deployment:
    if calibration.model != plan.model:
        problem = "the calibration is of another model"
        remedy = f"Run `{COMMAND} MODEL={plan.model}`"
        raise GuardError(problem, got=calibration.model, remedy=remedy)
    suffix = calibration.suffix_tokens
    if plan.suffix_tokens not in (None, suffix):
        problem = "the calibration measured rules with another suffix"
        remedy = f"Leave suffix_tokens out: it is {suffix}"
        raise GuardError(problem, got=plan.suffix_tokens, remedy=remedy)
    if plan.price_an_hour is None:
        remedy = "State `price_an_hour` in the plan"
        raise GuardError("what this machine costs is not known", got=plan.name, remedy=remedy)
    methods = []
    for name in sorted(recipe.adapter_methods):
        bytes_of = _bytes_of(recipe, shape, name, None)
        sizes = _replica_sizes(plan, recipe, bytes_of, None, calibration.scaffold_tokens)
        methods.append(PlannedMethod(name, calibration.cost(name), suffix, sizes, bytes_of))
    source = f"{COMMAND}, commit {calibration.commit}"
    price = plan.price_an_hour, plan.price_source
    return Deployment(tuple(methods), calibration.hardware, source, *price, device=None)


def _computed(plan: Plan, recipe: Recipe, shape: DecoderShape, device: Device) -> Deployment:
    suffix = plan.suffix_tokens or _suffix_tokens(recipe)
    methods = []
    for name in sorted(recipe.adapter_methods):
        tensors = shape.adapter_tensors(adapter_rank(recipe, name), adapter_targets(recipe, name))
        cost = ComputedCost(device, shape, BYTES[recipe.dtype], sum(tensors))
        bytes_of = _bytes_of(recipe, shape, name, device)
        sizes = _replica_sizes(plan, recipe, bytes_of, device, 0)
        methods.append(PlannedMethod(name, cost, suffix, sizes, bytes_of))
    source = f"recipes/devices/{plan.device}.yaml: {device.source}; host: {device.host_source}"
    price = device.price_an_hour, device.price_source
    if plan.price_an_hour is not None:
        price = plan.price_an_hour, plan.price_source
    return Deployment(tuple(methods), device.name, source, *price, device=device)


def _suffix_tokens(recipe: Recipe) -> int:
    """The number of tokens that a rule adds to the recipe's prompt, by the base's tokenizer."""
    if not Path(recipe.base_path).is_dir():
        remedy = "State `suffix_tokens` in the plan"
        problem = "the base's tokenizer is not in the checkout"
        raise GuardError(problem, where=f"recipe {recipe.name}", got=recipe.base, remedy=remedy)
    text = "" if recipe.rule_turn == "none" else RULE_TITLE
    return len(PromptBuilder.of(recipe).suffix_ids(text))


def _bytes_of(recipe: Recipe, shape: DecoderShape, method: str, device: Device | None) -> Sizes:
    width = BYTES[recipe.serving_dtype if device is None else recipe.dtype]
    # A slot has room for the largest rank, whatever the adapter's own rank is.
    tensors = shape.adapter_tensors(recipe.max_rank, adapter_targets(recipe, method))
    is_pinned = device is not None or installed_device() == "cuda"
    return sizes_by_shape(shape, tensors, width, is_pinned=is_pinned)


def sizes_by_shape(
    shape: DecoderShape, adapter_tensors: Sequence[int], width: int, *, is_pinned: bool
) -> Sizes:
    """The bytes of the base, a token's keys and values, and an adapter.

    `adapter_tensors`: the number of weights in each of its tensors. `width`: the bytes of a number.
    `is_pinned`: whether host memory is pinned, as it is beside a GPU: in powers of two.
    """
    tensors = [weights * width for weights in adapter_tensors]
    host = tensors
    if is_pinned:
        host = [1 << (size - 1).bit_length() for size in tensors]
    return Sizes(
        token=shape.key_value_width * width,
        adapter=sum(tensors),
        host_adapter=sum(host),
        weights=shape.weights * width,
    )


def _replica_sizes(
    plan: Plan, recipe: Recipe, bytes_of: Sizes, device: Device | None, scaffold_tokens: int
) -> ReplicaSizes:
    """What a replica has room for, with its memory split as the engine splits it."""
    adapters, engine = plan.traffic.rules, recipe.engine
    memory = ServingMemory(
        device_gib=_memory_left(plan, recipe, bytes_of, device),
        host_gib=plan.host_gib or recipe.serving_memory.host_gib,
    )
    stated_slots = plan.slots or engine.get("max_loras")
    shared = shared_out(memory, bytes_of, adapters, recipe.context_tokens, stated_slots)
    slots = shared["max_loras"]
    return ReplicaSizes(
        step_tokens=engine.get("max_num_batched_tokens", STEP_TOKENS),
        max_sequences=engine.get("max_num_seqs", MAX_SEQUENCES),
        slots=slots,
        block_size=engine.get("block_size", 32),
        cache_tokens=shared["kv_cache_memory_bytes"] // bytes_of.token,
        adapters=adapters,
        host_adapters=min(adapters, max(shared.get("max_cpu_loras", adapters), slots)),
        scaffold_tokens=scaffold_tokens,
    )


def _memory_left(plan: Plan, recipe: Recipe, bytes_of: Sizes, device: Device | None) -> float:
    """The GiB beside the base's weights and a named device's workspace."""
    total_gib, taken_gib = plan.memory_gib, bytes_of.weights / GIB
    if device is not None:
        total_gib, taken_gib = total_gib or device.memory_gib, taken_gib + device.workspace_gib
    elif total_gib is None:
        if recipe.serving_memory.device_gib is None:
            remedy = "State `memory_gib` in the plan"
            raise GuardError("how much memory serving may take is not known", remedy=remedy)
        return recipe.serving_memory.device_gib
    if total_gib <= taken_gib:
        remedy = f"It needs {taken_gib:.1f} GiB and room for conversations"
        got = f"{total_gib} GiB"
        raise GuardError("the base does not fit into the device's memory", got=got, remedy=remedy)
    return total_gib - taken_gib
