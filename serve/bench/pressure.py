"""More conversations at once than the KV cache holds.

What is computed again, and what cache-aware order saves.

Eight conversations are put to twenty rules each, all at the same moment, in engines whose KV cache
holds twice, once, half and a quarter of them; with a slot for every adapter, and with eight, so
that a conversation's rules come in waves and others in between. Then all of them come again, a turn
longer, in the same order. Cache-aware engines serve those first of which the cache holds more;
others serve first come, first served (FCFS). What is computed is compared with the needed tokens:
every conversation once, of one that comes again only the new turn, and every rule's suffix (a
little less, because all conversations begin with the same block). Were a conversation's blocks
evicted before all of its rules had read them, it would be computed again, and the throughput would
collapse. One that comes again finds what the others have left of it. Knows nothing of what the
verdicts mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from guard.example import Message
from guard.files.yaml_file import Strict
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.plot import (
    BLUE,
    ORANGE,
    SKY,
    VERMILION,
    new_figure,
    plot_spreads,
    save_figure,
)
from serve.bench.report import (
    BenchReport,
    Spread,
    engine_settings,
    median_count,
    notes,
    origin,
    percentile,
    publish,
    source,
)
from serve.bench.scores import scores_of_calls
from serve.bench.workload.prompts import (
    common_tokens,
    conversation,
    random_rule_text,
    wordings,
)
from serve.bench.workload.random_adapter import adapter_mib, by_name, random_adapters
from serve.engine import GuardEngine, ScoreRequest

Order = Literal["cache-aware", "FCFS"]

REPEATS = 5
ROUNDS = ("new", "again")
DEMANDS = (0.5, 1.0, 2.0, 4.0)
SUFFIX_MARGIN = 200  # tokens of a prompt beside conversation and turn, at most
BLOCK_SIZE = 16  # vLLM's, where the recipe states none
COLOURS = (VERMILION, BLUE, ORANGE, SKY, "#7A3300", "#003A5D")


@dataclass(frozen=True)
class PressureWork:
    """What is put to every engine.

    `turn_tokens`: of the turn with which conversations come again, what all conversations begin
    with among them.
    """

    conversations: int = 8
    tokens: int = 5000  # each takes several steps
    rules: int = 20
    turn_tokens: int = 100
    few_slots: int = 8

    @property
    def engines(self) -> list[PressureEngine]:
        """The engines that get it, in the order of tables."""
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
    """Adapters on the device at once, order of service, and tokens of all conversations over those
    the cache holds.
    """

    slots: int
    order: Order
    demand: float

    def arguments(self, recipe: Recipe, work: PressureWork) -> dict[str, Any]:
        """Its vLLM arguments beside the recipe's."""
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


DEFAULT_WORK = PressureWork()


class PressureRow(Strict):
    """One engine in one round.

    Latencies of the conversations of all repeats, in ms, from when all were submitted.
    """

    round: str
    slots: int  # adapters on the device at once
    order: Order
    demand: float  # tokens of all conversations over those the cache holds
    cache_tokens: int
    verdicts_per_second: Spread
    p50_ms: float
    p95_ms: float
    computed_tokens: int
    needed_tokens: int
    swap_ins: int  # copied into a slot
    adapter_mib: float


class PressureReport(BenchReport):
    """Everything in `runs/pressure_bench.json`.

    `new_tokens`: of the turn with which a conversation comes again.
    """

    conversations: int
    conversation_tokens: int
    new_tokens: int
    rules: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[PressureRow, ...]


@dataclass(frozen=True)
class PressureRound:
    """All conversations at once.

    `latencies_ms`: of each conversation, from when all were submitted.
    """

    verdicts_per_second: float
    latencies_ms: tuple[float, ...]
    computed_tokens: int
    needed_tokens: int
    swap_ins: int


class PressureDriver:
    """An engine and the rules that every conversation is put to.

    `adapters`: a name for each of the rules' texts.
    """

    def __init__(
        self,
        engine: GuardEngine,
        prompts: PromptBuilder,
        texts: Sequence[str],
        adapters: Sequence[str],
    ) -> None:
        self._engine, self._prompts = engine, prompts
        self._rules = list(zip(texts, adapters, strict=True))
        self._suffix_tokens = sum(len(prompts.suffix_ids(text)) for text in texts)

    def rounds(self, work: PressureWork, first_seed: int) -> dict[str, PressureRound]:
        """Both rounds, on fresh conversations. Raises GuardError for a refusal."""
        seeds = range(first_seed, first_seed + work.conversations)
        new = [conversation(self._prompts, work.tokens, seed) for seed in seeds]
        turns = [conversation(self._prompts, work.turn_tokens, 7 + seed) for seed in seeds]
        longer = [(*messages, *turn) for messages, turn in zip(new, turns, strict=True)]
        self._engine.forget()
        return {
            "new": self._round(new, [()] * work.conversations),
            "again": self._round(longer, new),
        }

    def _round(
        self, conversations: Sequence[tuple[Message, ...]], seen: Sequence[tuple[Message, ...]]
    ) -> PressureRound:
        """Put all conversations to all rules at once; of each, `seen` was computed before."""
        engine = self._engine
        needed = len(conversations) * self._suffix_tokens
        needed += sum(map(self._new_tokens, conversations, seen))
        tokens_before, swap_ins_before = engine.scheduled_tokens, engine.swap_ins
        started = time.perf_counter()
        calls = [engine.submit(self._requests(messages)) for messages in conversations]
        while not all(call.done for call in calls):
            engine.step()
        wall_s = time.perf_counter() - started
        return PressureRound(
            verdicts_per_second=len(scores_of_calls(calls, where="pressure")) / wall_s,
            latencies_ms=tuple(1000 * (call.finished - started) for call in calls),
            computed_tokens=engine.scheduled_tokens - tokens_before,
            needed_tokens=needed,
            swap_ins=engine.swap_ins - swap_ins_before,
        )

    def _requests(self, messages: tuple[Message, ...]) -> list[ScoreRequest]:
        return [ScoreRequest(messages, text, adapter) for text, adapter in self._rules]

    def _new_tokens(self, messages: tuple[Message, ...], seen: tuple[Message, ...]) -> int:
        """Tokens of the conversation behind those with which the seen one begins too."""
        token_ids = self._prompts.prefix_ids(messages)
        if not seen:
            return len(token_ids)
        return len(token_ids) - common_tokens(token_ids, self._prompts.prefix_ids(seen))


def run(
    recipe: Recipe,
    repeats: int,
    work: PressureWork = DEFAULT_WORK,
    engines: Sequence[PressureEngine] = (),
) -> PressureReport:
    """Put the work to the engines, one after the other; without any, to all that get it."""
    engines = engines or work.engines
    rows: list[PressureRow] = []
    with (
        random_adapters(recipe, [recipe.sharing_method], work.rules) as folders,
        tqdm(total=len(engines) * (repeats + 1), desc="measuring", unit="run") as bar,
    ):
        for setup in engines:
            rows += _rows(recipe, by_name(folders), work, setup, repeats, bar)
    return PressureReport(
        **origin(recipe),
        conversations=work.conversations,
        conversation_tokens=work.tokens,
        new_tokens=_tokens_of_turn(recipe, work, rows),
        rules=work.rules,
        repeats=repeats,
        engine=engine_settings(recipe),
        rows=tuple(rows),
    )


def _rows(
    recipe: Recipe,
    folders: Mapping[str, Path],
    work: PressureWork,
    setup: PressureEngine,
    repeats: int,
    bar: tqdm,
) -> list[PressureRow]:
    """One engine's rows, of every round."""
    texts = wordings([random_rule_text(recipe)], work.rules)
    rounds: dict[str, list[PressureRound]] = {name: [] for name in ROUNDS}
    with GuardEngine(recipe, folders, **setup.arguments(recipe, work)) as engine:
        driver = PressureDriver(engine, PromptBuilder.of(recipe), texts, list(folders))
        for repeat in range(repeats + 1):
            measured = driver.rounds(work, first_seed=1000 * repeat)
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
    """Medians over the repeats."""
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


def _tokens_of_turn(recipe: Recipe, work: PressureWork, rows: Sequence[PressureRow]) -> int:
    """Tokens of the turn with which a conversation comes again, without what was seen."""
    prompts = PromptBuilder.of(recipe)
    texts = wordings([random_rule_text(recipe)], work.rules)
    suffix_tokens = sum(len(prompts.suffix_ids(text)) for text in texts)
    again = next(row for row in rows if row.round == "again")
    return round(again.needed_tokens / work.conversations - suffix_tokens)


def table(report: PressureReport) -> str:
    """The report as text."""
    head = (
        f"{'round':<5} {'slots':>5} {'order':>11} {'demand':>6} {'cache, tokens':>13} | "
        f"{'verdicts/s (min to max)':>24} {'p50 ms':>8} {'p95 ms':>8} | "
        f"{'computed':>9} {'of needed':>9} | {'swap-ins':>8} {'MiB':>5}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(row) for row in report.rows]
    lines += notes(
        "p50, p95: from the submission of all to a conversation's last verdict.",
        "of needed: tokens computed over the needed ones, which were not put to the engine before.",
        "swap-ins: adapters copied into a slot.",
        "order: first those conversations of which the cache holds more, or FCFS.",
    )
    return "\n".join([*lines, caption(report)])


def _line(row: PressureRow) -> str:
    return (
        f"{row.round:<5} {row.slots:>5} {row.order:>11} {row.demand:>5.1f}x "
        f"{row.cache_tokens:>13,} | {row.verdicts_per_second.text(1):>24} "
        f"{row.p50_ms:>8.0f} {row.p95_ms:>8.0f} | {row.computed_tokens:>9,} "
        f"{row.computed_tokens / row.needed_tokens:>9.1%} | "
        f"{row.swap_ins:>8} {row.swap_ins * row.adapter_mib:>5.0f}"
    )


def caption(report: PressureReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.conversations} conversations of {report.conversation_tokens:,} tokens at once, "
        f"{report.rules} rules each, then again with {report.new_tokens} more; {source(report)}; "
        f"random adapters; median of {report.repeats} repeats."
    )


def draw(report: PressureReport, path: Path) -> None:
    """Write the plot: verdicts per second against the demand."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    curves: dict[str, list[PressureRow]] = {}
    for row in report.rows:
        curves.setdefault(f"{row.round}, {row.slots} slots, {row.order}", []).append(row)
    for (label, rows), colour, marker in zip(curves.items(), COLOURS, "D^osvX", strict=True):
        spreads = [row.verdicts_per_second for row in rows]
        demands = [row.demand for row in rows]
        plot_spreads(axes, demands, spreads, color=colour, marker=marker, label=label)
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(DEMANDS, [f"{demand:g}x" for demand in DEMANDS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of all conversations over those the KV cache holds")
    axes.set_ylabel("verdicts per second")
    axes.grid(linewidth=0.4, alpha=0.6)
    save_figure(figure, caption(report), path)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--repeats", REPEATS, "runs in each engine")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    report = run(load_recipe(arguments.model), arguments.repeats)
    publish(report, arguments.runs / "pressure_bench.json", table, draw)
