"""One replica as a queue: what it has room for, and how long checks wait. Knows no prices.

M/G/1: checks come at random and are answered in order, each in its part of full steps. Memory is
shared out by the engine's own functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import Recipe, ServingMemory, load_recipe
from serve.engine.backends.arguments import GIB, Sizes, shared_out, sizes_of
from serve.plan.calibration import COMMAND, DeviceCalibration, Figures, check_work
from serve.plan.plan_file import Plan, PlannedTraffic

# What PEFT calls all-linear, in Qwen's and Llama's layers.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# vLLM's defaults, for recipes whose `engine` does not set them.
STEP = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "block_size": 32}
LENGTHS, RULES = 40, 16  # so many lengths and numbers of rules stand for all
IDLE = 1e-6  # checks per second


@dataclass(frozen=True)
class Load:
    """A replica at a rate of checks: what kinds of checks that come equally often take.

    `fixed_ms`: of any step. `full_ms`: in their part of full steps. `lone_ms`: alone. `step_ms`: a
    full step. `hit_rate`: the share of the conversations' tokens that the cache holds.
    """

    rate: float
    fixed_ms: float
    wake_ms: float
    full_ms: Figures
    lone_ms: Figures
    step_ms: float
    hit_rate: float

    @property
    def utilisation(self) -> float:
        """The rate's share of the rate that saturates."""
        return self.rate * float(self.full_ms.mean()) / 1000

    def latency_ms(self, share: float) -> float:
        """What this share of the checks takes at most; the utilisation is below 1.

        The wait has an exponential tail with the mean of Pollaczek and Khinchine. A check that
        finds a step under way joins the next one, and ends with those that wait behind it.
        """
        used, is_busy = self.utilisation, min(1.0, self.rate * self.lone_ms.mean() / 1000)
        wait_ms = (self.full_ms**2).mean() / (2 * self.full_ms.mean() * (1 - used))
        least_ms = self.lone_ms + is_busy * self.fixed_ms + (1 - is_busy) * self.wake_ms

        def too_late(limit_ms: float) -> float:
            left_ms = limit_ms - least_ms
            queue_ms = np.maximum(left_ms / (1 + used), left_ms - self.step_ms)
            late = used * np.exp(-np.maximum(queue_ms, 0) / wait_ms)
            return float(np.where(left_ms < 0, 1.0, late).mean()) - (1 - share)

        return float(brentq(too_late, 0, least_ms.max() + self.step_ms + 100 * wait_ms))


@dataclass(frozen=True)
class PlannedMethod:
    """A replica that serves a plan's rules by one method. `bytes_of`: the bytes of pieces."""

    plan: Plan
    name: str
    calibration: DeviceCalibration
    step: dict[str, int]
    slots: int
    cache_tokens: int
    bytes_of: Sizes

    def at(self, rate: float) -> Load:
        """The replica at this rate. The more checks come, the less of each is still cached."""
        traffic, cost = self.plan.traffic, self.calibration.methods[self.name]
        shares = METHODS[self.name].shares_conversation
        tokens, earlier, rules = traffic_kinds(traffic)
        # By Little's law so many tokens wait for their conversations' next turns.
        waiting = rate * traffic.think_s * tokens.mean() * (1 if shares else traffic.mean_rules)
        held = min(1.0, self.cache_tokens / waiting)
        whole_blocks = earlier // self.step["block_size"] * self.step["block_size"]
        scaffold = np.minimum(tokens, self.calibration.scaffold_tokens)
        cached = np.maximum(scaffold, held * whole_blocks)
        suffix, submit, step = self.calibration.suffix_tokens, cost.submit, cost.step
        computed, pairs = check_work(tokens, cached, rules, suffix, shares=shares)
        own_ms = submit["checks"] + submit["conversation_tokens"] * tokens + submit["rules"] * rules
        own_ms += step["tokens"] * computed + step["pairs"] * pairs + step["sequences"] * rules
        own_ms += cost.swap_in_ms * self.swap_ins
        most_tokens, most_rules = self.step["max_num_batched_tokens"], self.step["max_num_seqs"]
        steps = np.maximum(computed / most_tokens, rules / most_rules)
        full_ms, lone_ms = own_ms + step["steps"] * steps, own_ms + step["steps"] * np.ceil(steps)
        step_ms, hit_rate = full_ms.mean() / steps.mean(), cached.mean() / tokens.mean()
        return Load(rate, step["steps"], cost.wake_ms, full_ms, lone_ms, step_ms, hit_rate)

    @property
    def swap_ins(self) -> float:
        """Adapters that a check copies into a slot: those that are not among the most popular."""
        traffic = self.plan.traffic
        popularity = np.arange(1.0, traffic.rules + 1) ** -traffic.zipf
        asked = np.minimum(1, popularity / popularity.sum() * traffic.mean_rules)
        copied = traffic.mean_rules - asked[: self.slots].sum()
        return max(0.0, min(float(copied), traffic.rules - self.slots))

    @cached_property
    def saturation(self) -> float:
        """The rate, in checks per second, at which a queue that is never empty is answered."""
        highest = 2 * IDLE / self.at(IDLE).utilisation
        return float(brentq(lambda rate: self.at(rate).utilisation - 1, IDLE, highest))

    @cached_property
    def greatest_rate(self) -> float | None:
        """The greatest rate within the target and no busier than the plan allows, or None."""
        plan, highest = self.plan, self.plan.most_busy * self.saturation

        def excess(rate: float) -> float:
            load = self.at(rate)
            over_p99_ms = load.latency_ms(0.99) - (plan.p99_ms or math.inf)
            return max(load.latency_ms(0.95) - plan.p95_ms, over_p99_ms)

        if excess(IDLE) > 0:
            return None
        if excess(highest) <= 0:
            return highest
        return float(brentq(excess, IDLE, highest))


def traffic_kinds(traffic: PlannedTraffic) -> tuple[Figures, Figures, Figures]:
    """Checks that come equally often: tokens, those of the turn before, and rules."""
    turns, places = round(traffic.turns), np.linspace(0, 1, len(traffic.lengths))
    lengths = np.interp((np.arange(LENGTHS) + 0.5) / LENGTHS, places, traffic.lengths)
    rules = np.unique(np.rint(np.linspace(*traffic.rules_a_check, RULES)))
    grid = np.meshgrid(lengths, np.arange(1, turns + 1), rules)
    length, turn, asked = (axis.ravel() for axis in grid)
    return length * turn / turns, length * (turn - 1) / turns, asked


def deploy(plan: Plan, calibration: DeviceCalibration) -> list[PlannedMethod]:
    """A replica for each adapter method of the plan's model, or GuardError where none can be."""
    recipe = load_recipe(plan.model)
    if recipe.is_encoder:
        remedy = "Plan with a decoder; an encoder is measured by `make bench NAME=encoder`"
        raise GuardError("only decoders are planned", got=plan.model, remedy=remedy)
    if calibration.model != plan.model or set(recipe.adapter_methods) - set(calibration.methods):
        problem = "the calibration is of another model, or of other methods"
        remedy = f"Run `{COMMAND} MODEL={plan.model}`"
        raise GuardError(problem, got=calibration.model, remedy=remedy)
    return [_sized(plan, calibration, recipe, name) for name in sorted(recipe.adapter_methods)]


def _sized(plan: Plan, calibration: DeviceCalibration, recipe: Recipe, name: str) -> PlannedMethod:
    """What a replica has room for, with its memory split as the engine splits it."""
    targets = recipe.settings(name).lora.get("target_modules", "all-linear")
    if targets == "all-linear":
        targets = PROJECTIONS
    # A slot has room for the largest rank, whatever the adapter's own rank is.
    bytes_of = sizes_of(recipe, recipe.max_rank, targets)
    device_gib = recipe.serving_memory.device_gib
    if plan.memory_gib is not None:
        device_gib = plan.memory_gib - bytes_of.weights / GIB
    if device_gib is None or device_gib <= 0:
        problem = "the base does not fit into the device's memory, or that is not stated"
        remedy = f"State more than {bytes_of.weights / GIB:.1f} GiB as the plan's `memory_gib`"
        raise GuardError(problem, got=f"{plan.memory_gib} GiB", remedy=remedy)
    memory = ServingMemory(device_gib=device_gib, host_gib=recipe.serving_memory.host_gib)
    slots = plan.slots or recipe.engine.get("max_loras")
    shared = shared_out(memory, bytes_of, plan.traffic.rules, recipe.context_tokens, slots)
    cache_tokens = shared["kv_cache_memory_bytes"] // bytes_of.token
    slots = shared["max_loras"]
    step = {key: recipe.engine.get(key, default) for key, default in STEP.items()}
    if slots < plan.traffic.rules:
        step["max_num_seqs"] = min(slots, step["max_num_seqs"])
    return PlannedMethod(plan, name, calibration, step, slots, cache_tokens, bytes_of)
