"""A rule's LoRA merged into the base, against the adapters on the base: verdicts per second.

A closed loop of workers puts conversations of random words to one rule. Also measured is how far
the merged logits are from the adapter's: the sum of base and adapter is rounded to the recipe's
type. `make merge RULE=…` writes the merged base first. Knows nothing of how it is merged.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from guard.conversation.example import Message
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.weights.card import CARD
from serve.bench.report import BenchReport, origin, publish
from serve.bench.scores import scores_of_calls
from serve.bench.workload.prompts import conversation
from serve.bench.workload.traffic import Done, closed_loop
from serve.engine import Call, GuardEngine, ScoreRequest
from serve.merge import MERGED, mergeable_adapter, merged_engine

TOKENS = 300  # of a conversation
CHECKS_PER_REPEAT = 48  # conversations of a repeat
WORKERS = 16  # conversations under way at once
REPEATS = 5

Ask = Callable[[tuple[Message, ...]], ScoreRequest]


class MergedReport(BenchReport):
    """Everything in `runs/merged_bench.json`."""

    rule: str
    dtype: str
    workers: int
    conversation_tokens: int
    verdicts_per_second: dict[str, list[float]]  # a rate for each repeat, by "merged" or the method
    difference_nats: float  # the largest difference of a logit, merged against the adapter


@dataclass(frozen=True)
class Throughput:
    """The verdicts per second of each repeat, and the logits of the last one in nats."""

    rates: list[float]
    logits: list[float]


def run(recipe: Recipe, runs: Runs, rule: str) -> MergedReport:
    """Measure the merged rule, then its adapters, each engine by itself: two may not fit.

    Raises GuardError if the rule is not trained or not merged, or a conversation was not judged.
    """
    adapter = mergeable_adapter(recipe, runs, rule)
    measured = _merged(recipe, adapter.with_name(MERGED)) | _on_the_base(recipe, adapter.parent)
    pairs = zip(measured[MERGED].logits, measured[adapter.name].logits, strict=True)
    return MergedReport(
        **origin(recipe),
        rule=adapter.parent.name,
        dtype=recipe.serving_dtype,
        workers=WORKERS,
        conversation_tokens=TOKENS,
        verdicts_per_second={name: throughput.rates for name, throughput in measured.items()},
        difference_nats=max(abs(merged - unmerged) for merged, unmerged in pairs),
    )


def _merged(recipe: Recipe, folder: Path) -> dict[str, Throughput]:
    with merged_engine(recipe, folder) as engine:
        (card,) = engine.rules.values()
        ask = partial(ScoreRequest, rule_text=card.rule_text, adapter=None)
        return _measure(engine, {MERGED: ask}, PromptBuilder.of(recipe))


def _on_the_base(recipe: Recipe, folder: Path) -> dict[str, Throughput]:
    """Every adapter of the rule that is trained, by method, in one engine."""
    adapters = {}
    for name in recipe.methods:
        if METHODS[name].is_adapter and (folder / name / CARD).is_file():
            adapters[name] = folder / name
    with GuardEngine(recipe, adapters) as engine:
        asks: dict[str, Ask] = {}
        for name, card in engine.rules.items():
            asks[name] = partial(ScoreRequest, rule_text=card.rule_text, adapter=name)
        return _measure(engine, asks, PromptBuilder.of(recipe))


def _measure(
    engine: GuardEngine, asks: Mapping[str, Ask], prompts: PromptBuilder
) -> dict[str, Throughput]:
    """Measure each of `asks` REPEATS times after a warm-up, in another order in every repeat."""
    measured = {name: Throughput([], []) for name in asks}
    for repeat in range(-1, REPEATS):
        seeds = range(CHECKS_PER_REPEAT * (repeat + 2), CHECKS_PER_REPEAT * (repeat + 3))
        conversations = [conversation(prompts, TOKENS, seed) for seed in seeds]
        for name in random.Random(repeat).sample(list(asks), len(asks)):
            rate, logits = _closed_loop(engine, list(map(asks[name], conversations)), name)
            if repeat >= 0:
                measured[name].rates.append(rate)
                measured[name].logits[:] = logits
    return measured


def _closed_loop(
    engine: GuardEngine, requests: Sequence[ScoreRequest], name: str
) -> tuple[float, list[float]]:
    """The rate and the logits of `requests`, WORKERS at once, from an empty cache."""
    engine.forget()
    calls: list[Call] = []

    def submit(number: int) -> Done:
        call = engine.submit([requests[number]])
        calls.append(call)
        return lambda: call.done

    timed = closed_loop(submit, engine.step, len(requests), WORKERS)
    return timed.per_second, [score.logit for score in scores_of_calls(calls, where=name)]


def table(report: MergedReport) -> str:
    """The report as text."""
    lines = [
        f"verdicts per second, one rule, {report.workers} conversations of "
        f"{report.conversation_tokens} tokens under way:"
    ]
    for name, rates in report.verdicts_per_second.items():
        median = statistics.median(rates)
        lines.append(f"  {name:<7}{median:>7.1f} ({min(rates):.1f} to {max(rates):.1f})")
    lines.append(
        f"largest difference of a logit from the adapter's, {report.dtype}: "
        f"{report.difference_nats:.2g} nats"
    )
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    parser.add_argument("--rule", required=True, help="a rule that `make merge` has merged")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    report = run(load_recipe(arguments.model), Runs(arguments.runs), arguments.rule)
    publish(report, arguments.runs / "merged_bench.json", table)
