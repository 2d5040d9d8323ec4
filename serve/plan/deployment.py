"""Turns a plan into replicas that can be simulated: by method, the cost of a step and what fits.

A method's coefficients are measured on this machine by `make bench NAME=calibrate`, or computed
from a device's operations and bytes; never mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.machine.device import installed_device
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB
from serve.engine.thread.engine_thread import MAX_OPEN
from serve.plan.device.accelerator import ComputedCost, Device, load_device
from serve.plan.device.architecture import (
    BYTES,
    DecoderShape,
    adapter_rank,
    adapter_targets,
    shape_of,
)
from serve.plan.device.calibration import (
    COMMAND,
    DeviceCalibration,
    FittedCost,
    load_calibration,
)
from serve.plan.device.memory import MemorySplit, memory_left, sizes_by_shape, split_memory
from serve.plan.plan_file import HERE, Plan
from serve.plan.replay.replica import ReplicaSizes
from serve.plan.replay.scheduler import MAX_SEQUENCES, STEP_TOKENS, StepLimits
from serve.plan.report import Basis, Figure

RULE_TITLE = "The assistant must not give the user advice on their own case."


@dataclass(frozen=True)
class PlannedMethod:
    """A replica that serves one method."""

    name: str
    cost: FittedCost | ComputedCost
    sizes: ReplicaSizes
    suffix_tokens: int
    memory: MemorySplit

    @property
    def shares(self) -> bool:
        """Whether rules share the conversation."""
        return METHODS[self.name].shares_conversation

    @property
    def label(self) -> str:
        """The method's name in tables."""
        return METHODS[self.name].label


@dataclass(frozen=True)
class Deployment:
    """A plan's replicas, and the origin of their coefficients."""

    plan: Plan
    methods: tuple[PlannedMethod, ...]
    hardware: str
    basis: Basis
    source: str
    price: Figure
    device: Device | None = None


def deploy(plan: Plan, runs: Path) -> Deployment:
    """The deployment of a plan.

    Raises GuardError where the device, the model and the memory do not fit together.
    """
    recipe = load_recipe(plan.model)
    shape = plan.shape or shape_of(recipe)
    if plan.device == HERE:
        return _deploy_here(plan, recipe, shape, load_calibration(runs / "calibration.json"))
    return _deploy_computed(plan, recipe, shape, load_device(plan.device))


def _deploy_here(
    plan: Plan, recipe: Recipe, shape: DecoderShape, calibration: DeviceCalibration
) -> Deployment:
    if calibration.model != plan.model:
        problem = "the calibration is of another model"
        remedy = f"Run `{COMMAND} MODEL={plan.model}`"
        raise GuardError(problem, got=calibration.model, remedy=remedy)
    suffix = calibration.engine.suffix_tokens
    if plan.suffix_tokens not in (None, suffix):
        problem = "the calibration measured rules with another suffix"
        remedy = f"Leave suffix_tokens out: it is {suffix}"
        raise GuardError(problem, got=plan.suffix_tokens, remedy=remedy)
    if plan.price_an_hour is None:
        remedy = "State `price_an_hour` in the plan"
        raise GuardError("what this machine costs is not known", got=plan.name, remedy=remedy)
    methods = []
    for name in plan.methods:
        rank = adapter_rank(recipe, name)
        if plan.rank not in (None, rank):
            problem = "the calibration measured adapters of another rank"
            remedy = f"Leave rank out: it is {rank} by {METHODS[name].label}"
            raise GuardError(problem, got=plan.rank, remedy=remedy)
        memory = _memory(plan, recipe, shape, name, None)
        sizes = _sizes(plan, recipe, memory, calibration.engine.scaffold_tokens)
        cost = calibration.cost(name)
        methods.append(PlannedMethod(name, cost, sizes, suffix, memory))
    return Deployment(
        plan,
        tuple(methods),
        calibration.hardware,
        "measured here",
        f"{COMMAND}, commit {calibration.commit}",
        _price(plan, plan.price_an_hour, plan.price_source),
    )


def _deploy_computed(plan: Plan, recipe: Recipe, shape: DecoderShape, device: Device) -> Deployment:
    methods = []
    width = BYTES[recipe.dtype]
    suffix = plan.suffix_tokens or _suffix_tokens(recipe)
    for name in plan.methods:
        memory = _memory(plan, recipe, shape, name, device)
        tensors = shape.adapter_tensors(_rank(plan, recipe, name), adapter_targets(recipe, name))
        cost = ComputedCost(device, shape, width, sum(tensors))
        sizes = _sizes(plan, recipe, memory, 0)
        methods.append(PlannedMethod(name, cost, sizes, suffix, memory))
    price, price_source = device.price_an_hour, device.price_source
    if plan.price_an_hour is not None:
        price, price_source = plan.price_an_hour, plan.price_source
    return Deployment(
        plan,
        tuple(methods),
        device.name,
        "computed",
        f"recipes/devices/{plan.device}.yaml: {device.source}",
        _price(plan, price, price_source),
        device=device,
    )


def _price(plan: Plan, price: float, source: str) -> Figure:
    return Figure(value=price, unit="USD an hour", basis="given", source=source)


def _rank(plan: Plan, recipe: Recipe, method: str) -> int:
    return plan.rank or adapter_rank(recipe, method)


def _suffix_tokens(recipe: Recipe) -> int:
    """The number of tokens that a rule adds to the recipe's prompt, by the base's tokenizer."""
    if not Path(recipe.base_path).is_dir():
        remedy = "State `suffix_tokens` in the plan"
        problem = "the base's tokenizer is not in the checkout"
        raise GuardError(problem, where=f"recipe {recipe.name}", got=recipe.base, remedy=remedy)
    text = "" if recipe.rule_turn == "none" else RULE_TITLE
    return len(PromptBuilder.of(recipe).suffix_ids(text))


def _memory(
    plan: Plan, recipe: Recipe, shape: DecoderShape, method: str, device: Device | None
) -> MemorySplit:
    width = BYTES[recipe.serving_dtype if device is None else recipe.dtype]
    # A slot has room for the largest rank, whatever the adapter's own rank is.
    slot_rank = max(_rank(plan, recipe, method), recipe.max_rank)
    tensors = shape.adapter_tensors(slot_rank, adapter_targets(recipe, method))
    is_pinned = device is not None or installed_device() == "cuda"
    sizes = sizes_by_shape(shape, tensors, width, is_pinned=is_pinned)
    total_gib, workspace_gib = plan.memory_gib, 0.0
    if device is not None:
        total_gib = plan.memory_gib or device.memory_gib
        workspace_gib = device.workspace_gib
    device_gib = recipe.serving_memory.device_gib  # beside the base's weights
    if total_gib is not None:
        device_gib = memory_left(total_gib, sizes, workspace_gib)
    host_gib = plan.host_gib
    if host_gib is None:
        host_gib = recipe.serving_memory.host_gib
    return split_memory(
        ServingMemory(device_gib=device_gib, host_gib=host_gib),
        sizes,
        plan.traffic.rules,
        recipe.context_tokens,
        slots=plan.slots or recipe.engine.get("max_loras"),
        workspace_bytes=round(workspace_gib * GIB),
    )


def _sizes(plan: Plan, recipe: Recipe, memory: MemorySplit, scaffold_tokens: int) -> ReplicaSizes:
    engine = recipe.engine
    limits = StepLimits(
        engine.get("max_num_batched_tokens", STEP_TOKENS),
        engine.get("max_num_seqs", MAX_SEQUENCES),
        memory.slots,
        engine.get("block_size", 32),
    )
    return ReplicaSizes(
        limits,
        memory.cache_tokens,
        plan.traffic.rules,
        memory.host_adapters,
        scaffold_tokens,
        max_open=MAX_OPEN,
    )
