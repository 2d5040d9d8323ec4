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
from serve.plan.device.calibration import FittedCost, non_negative

SLOTS, HOST, FLEET = 4, 8, 24  # adapters on the device, in host memory, in all
CHECKS, RULES_A_CHECK, TOKENS = 40, 3, 200


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
    """The coefficients, with a least-squares fit of the checks' times to their copies and reads.

    The rest of the work is the same in every check.
    """
    counts = np.asarray([[1.0, row.swap_ins, row.loads] for row in rows])
    _, swap_in_ms, load_ms = non_negative(counts, [row.wall_ms for row in rows])
    return cost.model_copy(update={"swap_in_ms": float(swap_in_ms), "load_ms": float(load_ms)})


def swap_rows(engine: GuardEngine, recipe: Recipe, method: str) -> list[SwapRow]:
    """Measure one check after the other. A third of them ask only rules that stay in slots."""
    prompts, draw = PromptBuilder.of(recipe), random.Random(0)
    text = wordings([random_rule_text(recipe)], 1)[0]
    label, rows = METHODS[method].label, []
    for number in tqdm(range(CHECKS), desc=f"adapters without a slot, {label}", unit="check"):
        choices = (FLEET, HOST, SLOTS)[number // 2 % 3]
        rules = draw.sample(range(choices), RULES_A_CHECK)
        messages = conversation(prompts, TOKENS, seed=number)
        requests = [ScoreRequest(messages, text, f"{method}-{rule}") for rule in rules]
        engine.forget()
        swap_ins, loads, started = engine.swap_ins, engine.adapter_loads, time.perf_counter()
        outcomes = engine.score(requests)
        wall_ms = 1000 * (time.perf_counter() - started)
        scores_of(outcomes, where=f"adapters without a slot, {method}")
        rows.append(
            SwapRow(
                wall_ms=wall_ms,
                swap_ins=engine.swap_ins - swap_ins,
                loads=engine.adapter_loads - loads,
            )
        )
    return rows
