"""The cost of an adapter without a slot, or on disk: checks on an engine with few slots."""

from __future__ import annotations

import random
import time

import numpy as np
from tqdm import tqdm

from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.scores import scores_of
from serve.bench.workload.prompts import conversation, random_rule_text, wordings
from serve.engine import GuardEngine, ScoreRequest
from serve.plan.device.calibration import FittedCost, non_negative, standard_errors

SLOTS, HOST, FLEET = 4, 8, 24  # adapters on the device, in host memory, in all
CHECKS, RULES_A_CHECK, TOKENS = 40, 3, 200
WARM_UP = 4  # checks that are not recorded


class SwapRow(Strict):
    """One check: its time, and the numbers of adapters that were copied and read for it."""

    wall_ms: float
    swap_ins: int
    loads: int


def with_swaps(engine: GuardEngine, recipe: Recipe, method: str, cost: FittedCost) -> FittedCost:
    """The coefficients, with the times that a copy into a slot and a read from disk add."""
    rows = swap_rows(engine, recipe, method)
    return swaps_fitted(rows, cost)


def swaps_fitted(rows: list[SwapRow], cost: FittedCost) -> FittedCost:
    """The coefficients, with a least-squares fit of the checks' times to their copies and reads,
    and the standard errors of these two.

    The rest of the work is the same in every check.
    """
    counts = np.asarray([[1.0, row.swap_ins, row.loads] for row in rows])
    wall_ms = [row.wall_ms for row in rows]
    solution = non_negative(counts, wall_ms)
    _, swap_in_ms, load_ms = solution.tolist()
    _, swap_in_error_ms, load_error_ms = standard_errors(counts, wall_ms, solution).tolist()
    fields = {
        "swap_in_ms": swap_in_ms,
        "load_ms": load_ms,
        "swap_in_error_ms": swap_in_error_ms,
        "load_error_ms": load_error_ms,
    }
    return cost.model_copy(update=fields)


def swap_rows(engine: GuardEngine, recipe: Recipe, method: str) -> list[SwapRow]:
    """Measure one check after the other, once a few have warmed the engine up. A third of them ask
    only rules that stay in slots.
    """
    meter = SwapMeter(engine, recipe, method)
    for number in range(WARM_UP):  # the first time is always slow
        meter.check(FLEET, seed=CHECKS + number)
    label, rows = METHODS[method].label, []
    for number in tqdm(range(CHECKS), desc=f"adapters without a slot, {label}", unit="check"):
        choices = (FLEET, HOST, SLOTS)[number // 2 % 3]
        rows.append(meter.check(choices, seed=number))
    return rows


class SwapMeter:
    """Measures checks by one method's adapters on an engine that has slots for a few of them."""

    def __init__(self, engine: GuardEngine, recipe: Recipe, method: str) -> None:
        self._engine, self._method = engine, method
        self._prompts, self._draw = PromptBuilder.of(recipe), random.Random(0)
        self._text = wordings([random_rule_text(recipe)], 1)[0]

    def check(self, choices: int, seed: int) -> SwapRow:
        """Measure a check by some of the first `choices` adapters. `seed`: its conversation's."""
        engine = self._engine
        rules = self._draw.sample(range(choices), RULES_A_CHECK)
        messages = conversation(self._prompts, TOKENS, seed)
        requests = [ScoreRequest(messages, self._text, f"{self._method}-{rule}") for rule in rules]
        engine.forget()
        before, started = engine.counters, time.perf_counter()
        outcomes = engine.score(requests)
        wall_ms = 1000 * (time.perf_counter() - started)
        scores_of(outcomes, where=f"adapters without a slot, {self._method}")
        return SwapRow(
            wall_ms=wall_ms,
            swap_ins=engine.counters.swap_ins - before.swap_ins,
            loads=engine.counters.adapter_loads - before.adapter_loads,
        )
