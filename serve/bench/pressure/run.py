"""More conversations at once than the KV cache holds.

What is computed again, and what cache-aware order saves.

Eight conversations are put to twenty rules each, all at the same moment. The engines' KV cache
holds twice, once, half and a quarter of these conversations. They have a slot for every adapter, or
eight slots, so that a conversation's rules come in waves with those of other conversations in
between. Then all conversations come again, a turn longer, in the same order. Cache-aware engines
serve those first of which the cache holds more; others serve first come, first served (FCFS).

What is computed is compared with the needed tokens: every new conversation once, only the new turn
of one that comes again, and every rule's suffix (a little less, because all conversations begin
with the same block). If a conversation's blocks were evicted before all of its rules had read them,
it would be computed again, and the throughput would collapse. A conversation that comes again finds
what the others have left of it. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.pressure.measure import ROUNDS, PressureDriver, PressureRound
from serve.bench.pressure.plot import draw
from serve.bench.pressure.report import PressureReport, PressureRow, table
from serve.bench.pressure.work import PressureEngine, PressureWork
from serve.bench.report import (
    Spread,
    engine_settings,
    median_count,
    origin,
    percentile,
    publish,
)
from serve.bench.workload.prompts import random_rule_text, wordings
from serve.bench.workload.random_adapter import adapter_mib, by_name, random_adapters
from serve.engine import GuardEngine

REPEATS = 5
DEFAULT_WORK = PressureWork()


def run(
    recipe: Recipe,
    repeats: int,
    work: PressureWork = DEFAULT_WORK,
    engines: Sequence[PressureEngine] = (),
) -> PressureReport:
    """Put the work to the engines, one after the other; without any, to all that get this work."""
    engines = engines or work.engines
    rows: list[PressureRow] = []
    with (
        random_adapters(recipe, [recipe.sharing_method], work.rules) as folders,
        tqdm(total=len(engines) * (repeats + 1), desc="measuring", unit="run") as bar,
    ):
        for setup in engines:
            rows += _measure_engine(recipe, by_name(folders), work, setup, repeats, bar)
    return PressureReport(
        **origin(recipe),
        conversations=work.conversations,
        conversation_tokens=work.tokens,
        new_tokens=_new_tokens_of_turn(recipe, work, rows),
        rules=work.rules,
        repeats=repeats,
        engine=engine_settings(recipe),
        rows=tuple(rows),
    )


def _measure_engine(
    recipe: Recipe,
    folders: Mapping[str, Path],
    work: PressureWork,
    setup: PressureEngine,
    repeats: int,
    bar: tqdm,
) -> list[PressureRow]:
    """Measure one engine: a row for each round."""
    texts = wordings([random_rule_text(recipe)], work.rules)
    rounds: dict[str, list[PressureRound]] = {name: [] for name in ROUNDS}
    with GuardEngine(recipe, folders, **setup.arguments(recipe, work)) as engine:
        driver = PressureDriver(engine, PromptBuilder.of(recipe), texts, list(folders))
        for repeat in range(repeats + 1):
            measured = driver.run_rounds(work, first_seed=1000 * repeat)
            bar.update()
            if repeat > 0:  # the first is a warm-up
                for name in ROUNDS:
                    rounds[name].append(measured[name])
        cache_tokens = engine.cache_tokens
    size_mib = adapter_mib(next(iter(folders.values())))
    return [_row(name, setup, rounds[name], cache_tokens, size_mib) for name in ROUNDS]


def _row(
    name: str,
    setup: PressureEngine,
    rounds: Sequence[PressureRound],
    cache_tokens: int,
    size_mib: float,
) -> PressureRow:
    """The row of one round: medians over the repeats."""
    latencies_ms: list[float] = []
    for pressure_round in rounds:
        latencies_ms += pressure_round.latencies_ms
    return PressureRow(
        round=name,
        slots=setup.slots,
        order=setup.order,
        demand=setup.demand,
        cache_tokens=cache_tokens,
        verdicts_per_second=Spread.of([measured.verdicts_per_second for measured in rounds]),
        p50_ms=percentile(latencies_ms, 50),
        p95_ms=percentile(latencies_ms, 95),
        computed_tokens=median_count([measured.computed_tokens for measured in rounds]),
        needed_tokens=median_count([measured.needed_tokens for measured in rounds]),
        swap_ins=median_count([measured.swap_ins for measured in rounds]),
        adapter_mib=size_mib,
    )


def _new_tokens_of_turn(recipe: Recipe, work: PressureWork, rows: Sequence[PressureRow]) -> int:
    """The number of new tokens in the turn with which a conversation comes again."""
    prompts = PromptBuilder.of(recipe)
    texts = wordings([random_rule_text(recipe)], work.rules)
    suffix_tokens = sum(len(prompts.suffix_ids(text)) for text in texts)
    again = next(row for row in rows if row.round == "again")
    return round(again.needed_tokens / work.conversations - suffix_tokens)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "runs in each engine")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    report = run(load_recipe(arguments.model), arguments.repeats)
    publish(report, arguments.runs / "pressure_bench.json", table, draw)
