"""Calibrate the planner: the time of a step on this machine, from what it computes.

Bursts of checks of all sizes run on one engine, by aLoRA and by LoRA; coefficients are fitted to
them (`runs/calibration.json`). A burst is a number of checks that are submitted at once and driven
to their end; the planner counts its work. Then an engine with few
slots shows what it costs if an adapter has to be copied first. `make plan` reads the file.
Adapters are random; verdicts mean nothing.
"""

from __future__ import annotations

import random
import statistics
import textwrap
import time
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls
from tqdm import tqdm

from guard.conversation.example import Message
from guard.files.yaml_file import Strict
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.engines import scores_of
from serve.bench.harness import BenchCommand
from serve.bench.report import BenchReport, notes, origin
from serve.bench.workload.adapters import random_adapters
from serve.bench.workload.prompts import conversation, random_rule_text, wordings
from serve.engine import Call, GuardEngine, ScoreRequest
from serve.plan.calibration import DeviceCalibration, FittedCost, check_work

# Of a burst, each with a coefficient.
FEATURES = ("steps", "tokens", "pairs", "sequences")
SUBMIT_FEATURES = ("checks", "conversation_tokens", "rules")
FIT_ROUNDS = 5
BURSTS = 60  # by aLoRAs; a third as many by LoRAs, which take longer
QUICK_BURSTS = 12
RULES = 64  # of a check, at most
WARM_UP = 3
SHORTEST, LONGEST = 80, 3000  # tokens of a conversation
AT_ONCE = (1, 1, 2, 3, 5, 8)  # checks of a burst
# The most tokens of a burst, by whether rules share them: the work of a few seconds.
MOST_TOKENS = {True: 8_000, False: 12_000}
WAKES, PAUSE_S = 15, 0.05  # pairs of a check after a pause and one without
WAKE_TOKENS, WAKE_RULES = 300, 12
SLOTS, FLEET = 4, 24  # adapters on the device, in all
SWAP_CHECKS, RULES_A_CHECK, SWAP_TOKENS = 40, 3, 200
SWAP_WARM_UP = 4  # checks that are not recorded

# The checks of a burst, each with its conversation's tokens and its number of rules.
Burst = Sequence[tuple[int, int]]


def draw_bursts(count: int, most_rules: int, seed: int, *, shares: bool) -> list[Burst]:
    """Draw bursts of all sizes: log-uniform lengths, and one to `most_rules` rules."""
    draw = random.Random(seed)
    drawn: list[Burst] = []
    for _ in range(count):
        checks: list[tuple[int, int]] = []
        left = MOST_TOKENS[shares]
        for _ in range(draw.choice(AT_ONCE)):
            tokens = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
            rules = max(1, round(most_rules ** draw.random()))
            if not shares:
                rules = min(rules, max(1, left // tokens))
            left -= tokens if shares else tokens * rules
            if left >= 0 or not checks:
                checks.append((tokens, rules))
        drawn.append(checks)
    return drawn


class BurstRow(Strict):
    """Checks that were submitted at once: the time they took, and the work of their steps."""

    method: str
    checks: int
    conversation_tokens: int
    rules: int
    submit_ms: float
    steps_ms: float
    work: dict[str, float]


class BurstMeter:
    """Runs bursts of checks by one method's adapters."""

    def __init__(
        self, engine: GuardEngine, recipe: Recipe, method: str, *, most_rules: int
    ) -> None:
        self._engine, self._method, self.most_rules = engine, method, most_rules
        self._prompts = PromptBuilder.of(recipe)
        self._scaffold = scaffold_tokens(self._prompts, engine.backend.block_size)
        self._texts = wordings([random_rule_text(recipe)], most_rules)
        self._seed = 0

    def run(self, burst: Burst, pause_s: float = 0.0) -> BurstRow:
        """Time a burst on new conversations, from an empty cache, after a pause."""
        conversations: list[tuple[Message, ...]] = []
        for tokens, _ in burst:
            self._seed += 1
            conversations.append(conversation(self._prompts, tokens, self._seed))
        lengths = [len(self._prompts.prefix_ids(messages)) for messages in conversations]
        rules = [rules for _, rules in burst]
        self._engine.forget()
        time.sleep(pause_s)
        started = time.perf_counter()
        asked = zip(conversations, rules, strict=True)
        calls = [self._submit(messages, count) for messages, count in asked]
        submitted = time.perf_counter()
        steps = 0
        while not all(call.done for call in calls):
            self._engine.step()
            steps += 1
        finished = time.perf_counter()
        for call in calls:
            scores_of(call.results(), where=f"bursts of {self._method}")
        return BurstRow(
            method=self._method,
            checks=len(calls),
            conversation_tokens=sum(lengths),
            rules=sum(rules),
            submit_ms=1000 * (submitted - started),
            steps_ms=1000 * (finished - submitted),
            work={"steps": float(steps)} | self._work(lengths, rules),
        )

    def _work(self, lengths: Sequence[int], rules: Sequence[int]) -> dict[str, float]:
        """What a burst computes; what all prompts begin with is cached from the second check on."""
        cached = np.full(len(lengths), float(self._scaffold))
        cached[0] = 0
        suffix = len(self._prompts.suffix_ids(self._texts[0]))
        shares = METHODS[self._method].shares_conversation
        per_check = np.array(lengths, float), cached, np.array(rules, float)
        tokens, pairs = check_work(*per_check, suffix, shares=shares)
        sums = {"tokens": tokens.sum(), "pairs": pairs.sum(), "sequences": sum(rules)}
        return {name: float(value) for name, value in sums.items()}

    def _submit(self, messages: tuple[Message, ...], rules: int) -> Call:
        names = [f"{self._method}-{rule}" for rule in range(rules)]
        pairs = zip(self._texts, names, strict=False)
        return self._engine.submit([ScoreRequest(messages, text, name) for text, name in pairs])


def fitted(rows: Sequence[BurstRow]) -> FittedCost:
    """The coefficients with the smallest relative errors on one method's bursts, none below 0."""
    step_rows = [[row.work[name] for name in FEATURES] for row in rows]
    submit_rows = [[float(getattr(row, name)) for name in SUBMIT_FEATURES] for row in rows]
    steps_ms = [row.steps_ms for row in rows]
    step = non_negative(step_rows, steps_ms)
    submit = non_negative(submit_rows, [row.submit_ms for row in rows])
    predicted = np.asarray(step_rows) @ step
    return FittedCost(
        step=dict(zip(FEATURES, step.tolist(), strict=True)),
        submit=dict(zip(SUBMIT_FEATURES, submit.tolist(), strict=True)),
        error=float(np.median(np.abs(predicted / np.asarray(steps_ms) - 1))),
    )


def non_negative(
    features: Sequence[Sequence[float]] | np.ndarray, measured: Sequence[float]
) -> np.ndarray:
    """A coefficient for each column, none below 0: least squares of relative errors.

    Errors are relative to the prediction of the round before. If they were relative to the measured
    times, a burst would count the less the slower the machine happened to be, and all coefficients
    would come out low. Columns are scaled, so that small features count too.
    """
    counts, times = np.asarray(features, dtype=float), np.asarray(measured, dtype=float)
    predicted = times
    for _ in range(FIT_ROUNDS):
        scaled = counts / predicted[:, None]
        scale = np.maximum(scaled.max(axis=0), 1e-12)
        solution, _ = nnls(scaled / scale, times / predicted)
        coefficients = np.asarray(solution / scale)
        predicted = np.maximum(counts @ coefficients, 1e-12)
    return coefficients


def scaffold_tokens(prompts: PromptBuilder, block_size: int) -> int:
    """The number of tokens in the whole blocks that every conversation's prompt begins with."""
    first, second = (prompts.prefix_ids((Message("user", text),)) for text in ("one", "two"))
    common = 0
    for first_token, second_token in zip(first, second, strict=False):
        if first_token != second_token:
            break
        common += 1
    return common // block_size * block_size


def wake_ms(meter: BurstMeter) -> float:
    """The extra time of a check that finds the engine asleep, at least 0: the median difference
    between the same check after a pause and right after other work. Caches are cold then, and a
    core has to wake. In an open-loop load at low rates this is every check.
    """
    burst = [(WAKE_TOKENS, min(WAKE_RULES, meter.most_rules))]
    differences_ms: list[float] = []
    for _ in range(WAKES):
        asleep, awake = meter.run(burst, PAUSE_S), meter.run(burst)
        asleep_ms = asleep.submit_ms + asleep.steps_ms
        differences_ms.append(asleep_ms - awake.submit_ms - awake.steps_ms)
    return max(0.0, statistics.median(differences_ms))


class SwapRow(Strict):
    """One check: its time, and the number of adapters that were copied for it."""

    wall_ms: float
    swap_ins: int


def with_swaps(rows: Sequence[SwapRow], cost: FittedCost) -> FittedCost:
    """The coefficients, with a least-squares fit of the checks' times to their copies.

    The rest of the work is the same in every check.
    """
    counts = [[1.0, row.swap_ins] for row in rows]
    _, swap_in_ms = non_negative(counts, [row.wall_ms for row in rows]).tolist()
    return cost.model_copy(update={"swap_in_ms": swap_in_ms})


def swap_rows(engine: GuardEngine, recipe: Recipe, method: str) -> list[SwapRow]:
    """Measure checks one by one in a warm engine. A third ask only rules that stay in slots."""
    prompts, draw = PromptBuilder.of(recipe), random.Random(0)
    text = random_rule_text(recipe)

    def check(choices: int, seed: int) -> SwapRow:
        rules = draw.sample(range(choices), RULES_A_CHECK)
        messages = conversation(prompts, SWAP_TOKENS, seed)
        requests = [ScoreRequest(messages, text, f"{method}-{rule}") for rule in rules]
        engine.forget()
        before, started = engine.counters, time.perf_counter()
        outcomes = engine.score(requests)
        wall_ms = 1000 * (time.perf_counter() - started)
        scores_of(outcomes, where=f"adapters without a slot, {method}")
        return SwapRow(wall_ms=wall_ms, swap_ins=engine.counters.swap_ins - before.swap_ins)

    for number in range(SWAP_WARM_UP):  # the first time is always slow
        check(FLEET, seed=SWAP_CHECKS + number)
    rows: list[SwapRow] = []
    for number in tqdm(range(SWAP_CHECKS), desc=f"adapters without a slot, {method}", unit="check"):
        rows.append(check((FLEET, 2 * SLOTS, SLOTS)[number // 2 % 3], seed=number))
    return rows


class CalibrationReport(BenchReport, DeviceCalibration):
    """The planner's file, written as the report of a benchmark."""

    bursts: tuple[BurstRow, ...]


class CalibrateBench(BenchCommand):
    """The calibration."""

    name = "calibrate"
    summary = "what a step takes on this machine, for make plan -> runs/calibration.json"
    duration = "3 min"

    def main(self) -> None:
        report, path = self.calibrated(), self.runs.root / "calibration.json"
        report.save(path)
        print(table(report))
        print(f"written: {path}")

    def calibrated(self) -> CalibrationReport:
        """Fit every adapter method of the recipe, on two engines, one after the other."""
        recipe = self.recipe
        methods, prompts = recipe.adapter_methods, PromptBuilder.of(recipe)
        with random_adapters(recipe, methods, max(RULES, FLEET)) as adapters:
            with GuardEngine(recipe, adapters, max_loras=len(adapters)) as engine:
                rows: list[BurstRow] = []
                costs: dict[str, FittedCost] = {}
                block_size = engine.backend.block_size
                for method in methods:
                    meter = BurstMeter(engine, recipe, method, most_rules=RULES)
                    method_rows = self._run_bursts(meter, method)
                    rows += method_rows
                    update = {"wake_ms": wake_ms(meter)}
                    costs[method] = fitted(method_rows).model_copy(update=update)
            with GuardEngine(recipe, adapters, max_loras=SLOTS) as engine:
                for method in methods:
                    costs[method] = with_swaps(swap_rows(engine, recipe, method), costs[method])
        return CalibrationReport(
            **origin(recipe),
            scaffold_tokens=scaffold_tokens(prompts, block_size),
            suffix_tokens=len(prompts.suffix_ids(random_rule_text(recipe))),
            methods=costs,
            bursts=tuple(rows),
        )

    def _run_bursts(self, meter: BurstMeter, method: str) -> list[BurstRow]:
        shares, bursts = METHODS[method].shares_conversation, BURSTS
        if self.options.quick:
            bursts = QUICK_BURSTS
        if not shares:
            bursts = max(1, bursts // 3)
        drawn = draw_bursts(bursts, RULES, seed=1, shares=shares)
        for burst in drawn[:WARM_UP]:  # the first time is always slow
            meter.run(burst)
        watched = tqdm(drawn, desc=f"calibrating {METHODS[method].label}", unit="burst")
        return [meter.run(burst) for burst in watched]


def table(report: CalibrationReport) -> str:
    lines = []
    for method, cost in report.methods.items():
        submit = dict(zip(("a check", "a token", "a rule"), cost.submit.values(), strict=True))
        step, per_token, per_pair, per_rule = cost.step.values()
        shown = {"step": step, "1,000 tokens": per_token * 1e3, "M pairs": per_pair * 1e6}
        shown |= {"a rule": per_rule, "swap-in": cost.swap_in_ms, "wake": cost.wake_ms}
        times = [f"{name} {ms:.3g}" for name, ms in shown.items()]
        times += [f"submit {name} {ms:.3g}" for name, ms in submit.items()]
        lines += textwrap.wrap(f"{METHODS[method].label}, ms: {', '.join(times)}", 100)
    for method, cost in report.methods.items():
        rows = [row for row in report.bursts if row.method == method]
        label = METHODS[method].label
        lines.append(f"{label}: the median error of {len(rows)} bursts' times is {cost.error:.1%}")
    lines += notes(
        "pairs: a token and one that it attends to. swap-in: a copy into a slot. wake: the extra",
        "time of a check that finds the engine asleep.",
    )
    return "\n".join([*lines, report.source])
