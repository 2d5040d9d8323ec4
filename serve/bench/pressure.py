"""`make bench-pressure`: more conversations at once than the prefix cache holds. Knows nothing of what the verdicts mean.

Eight conversations are put to twenty rules each, all at the same moment, in engines whose KV cache holds twice, once, half and a quarter of
them; with a slot for every adapter, and with eight, so that a conversation's rules come in waves and others in between. Then all of them
come again, a turn longer, in the same order. The engines serve those first of which the cache holds more; once more, in the order asked.
What is computed is compared with what is needed: every conversation once, of one that comes again only the new turn, and every rule's
suffix (a little less, because all conversations begin with the same block). Were a conversation's blocks given up before all of its rules
had read them, it would be computed again, and the throughput would collapse. One that comes again finds what the others have left of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.example import Message
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.method import PEFT_WEIGHTS
from guard.prompt import PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from serve.bench.report import BenchReport, publish
from serve.bench.workload import conversation, told, wordings
from serve.engine import GuardEngine, Score, ScoreRequest

CONVERSATIONS, TOKENS, RULES = 8, 5000, 20  # each takes several steps
TURN_TOKENS = (
    100  # of the turn with which they come again, what all conversations begin with among them
)
ROUNDS = ("new", "again")
FEW_SLOTS = 8
DEMANDS = (0.5, 1.0, 2.0, 4.0)


class PressureRow(Strict):
    """One size of the cache and one round; medians over the repeats, latencies of the conversations of all repeats."""

    round: str
    slots: int  # adapters on the device at once
    resident_first: bool  # those go ahead of which the cache holds more
    demand: float  # tokens of all conversations over those the cache holds
    cache_tokens: int
    verdicts_per_second: float
    verdicts_per_second_min: float
    verdicts_per_second_max: float
    p50_ms: float
    p95_ms: float
    computed_tokens: int
    needed_tokens: int
    swap_ins: int  # copied into a slot
    adapter_mib: float


class PressureReport(BenchReport):
    """Everything in `runs/pressure_bench.json`."""

    conversations: int
    conversation_tokens: int
    new_tokens: int  # of the turn with which one comes again
    rules: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[PressureRow, ...]


def run(
    recipe: Recipe,
    repeats: int,
    conversations: int = CONVERSATIONS,
    tokens: int = TOKENS,
    rules: int = RULES,
) -> PressureReport:
    """Measure every demand in an engine of its own."""
    from vllm_alora.kv.resident import RESIDENT_FIRST

    from serve.bench.random_adapter import save_random_adapters

    prompts = PromptBuilder.of(recipe)
    texts, rows = wordings([told(recipe)], rules), list[PressureRow]()
    kinds = [(rules, True), (min(FEW_SLOTS, rules), True), (rules, False)]
    total = len(kinds) * len(DEMANDS) * (repeats + 1)
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=total, desc="measuring", unit="run") as bar,
    ):
        folders = {f"adapter-{number}": Path(scratch) / str(number) for number in range(rules)}
        save_random_adapters(folders.values(), recipe, "alora", prompts)
        adapter_mib = (folders["adapter-0"] / PEFT_WEIGHTS).stat().st_size / 2**20
        for demand in DEMANDS:
            for slots, resident_first in kinds:
                block = recipe.engine.get("block_size", 16)
                own = {
                    "max_loras": slots,
                    "max_model_len": tokens + TURN_TOKENS + 200,
                    "block_size": block,
                }
                own["num_gpu_blocks_override"] = round(conversations * tokens / demand / block)
                own["additional_config"] = {RESIDENT_FIRST: resident_first}
                with GuardEngine(recipe, folders, **own) as engine:
                    server = Server(engine, prompts, texts, list(folders))
                    samples = _samples(server, repeats, conversations, tokens, bar)
                    cache = {
                        "slots": slots,
                        "resident_first": resident_first,
                        "demand": demand,
                        "cache_tokens": engine.cache_tokens,
                    }
                    rows += [
                        _row(cache | {"round": name, "adapter_mib": adapter_mib}, found)
                        for name, found in samples.items()
                    ]
    rows.sort(key=lambda row: kinds.index((row.slots, row.resident_first)))
    needed = next(row for row in rows if row.round == "again").needed_tokens / conversations
    suffixes = sum(len(prompts.suffix_ids(text)) for text in texts)
    engine_args = {
        key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()
    }
    return PressureReport(
        **provenance(), model=recipe.name, peak_memory_mib=peak_memory_mib(), conversations=conversations, conversation_tokens=tokens,
        new_tokens=round(needed - suffixes), rules=rules, repeats=repeats, engine=engine_args, rows=tuple(rows),
    )  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One round: all conversations at once."""

    per_second: float  # verdicts
    latencies_ms: tuple[float, ...]  # of each conversation, from when all were asked
    computed_tokens: int
    needed_tokens: int
    swap_ins: int


def _samples(
    server: Server, repeats: int, conversations: int, tokens: int, bar: tqdm
) -> dict[str, list[Sample]]:
    """Of every round; each repeat has conversations of its own."""
    samples: dict[str, list[Sample]] = {name: [] for name in ROUNDS}
    for repeat in range(-1, repeats):  # the first is a warm-up
        seeds = [1000 * (repeat + 1) + number for number in range(conversations)]
        first = [conversation(server.prompts, tokens, seed) for seed in seeds]
        turns = [conversation(server.prompts, TURN_TOKENS, 7 + seed) for seed in seeds]
        server.engine.forget()
        new = server.round(first, [()] * conversations)
        again = server.round(
            [(*messages, *turn) for messages, turn in zip(first, turns, strict=True)], first
        )
        bar.update()
        if repeat >= 0:
            samples["new"].append(new)
            samples["again"].append(again)
    return samples


class Server:
    """An engine and the rules that every conversation is put to."""

    def __init__(
        self,
        engine: GuardEngine,
        prompts: PromptBuilder,
        texts: Sequence[str],
        names: Sequence[str],
    ) -> None:
        self.engine, self.prompts, self._rules = (
            engine,
            prompts,
            list(zip(texts, names, strict=True)),
        )
        self._suffixes = sum(len(prompts.suffix_ids(text)) for text in texts)

    def round(
        self, asked_of: Sequence[tuple[Message, ...]], known: Sequence[tuple[Message, ...]]
    ) -> Sample:
        """Put all conversations to all rules at once; of each, `known` was asked about before. Raises GuardError for a refusal."""
        engine = self.engine
        before, filled, started = engine.scheduled_tokens, engine.swap_ins, time.perf_counter()
        under_way = [
            engine.submit([ScoreRequest(messages, text, name) for text, name in self._rules])
            for messages in asked_of
        ]
        while not all(asked.done for asked in under_way):
            engine.step()
        wall_s = time.perf_counter() - started
        scores = [
            outcome
            for asked in under_way
            for outcome in asked.results()
            if isinstance(outcome, Score)
        ]
        if len(scores) < len(asked_of) * len(self._rules):
            raise GuardError(
                "a benchmark request was refused", where="pressure", remedy="Run `make doctor`"
            )
        return Sample(
            per_second=len(scores) / wall_s,
            latencies_ms=tuple(1000 * (asked.finished - started) for asked in under_way),
            computed_tokens=engine.scheduled_tokens - before,
            needed_tokens=sum(map(self._new_tokens, asked_of, known))
            + len(asked_of) * self._suffixes,
            swap_ins=engine.swap_ins - filled,
        )

    def _new_tokens(self, messages: tuple[Message, ...], known: tuple[Message, ...]) -> int:
        """Tokens of the conversation behind those with which the known one begins too."""
        token_ids, before = (
            self.prompts.prefix_ids(messages),
            self.prompts.prefix_ids(known) if known else [],
        )
        alike = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(token_ids, before, strict=False)
        )
        return len(token_ids) - sum(1 for _ in alike)


def _row(measured: Mapping[str, Any], samples: Sequence[Sample]) -> PressureRow:
    """What was measured, and medians over the repeats."""
    rates = [sample.per_second for sample in samples]
    latencies_ms = [latency for sample in samples for latency in sample.latencies_ms]
    return PressureRow(
        **measured,
        verdicts_per_second=statistics.median(rates),
        verdicts_per_second_min=min(rates),
        verdicts_per_second_max=max(rates),
        p50_ms=float(np.percentile(latencies_ms, 50)),
        p95_ms=float(np.percentile(latencies_ms, 95)),
        computed_tokens=round(statistics.median(sample.computed_tokens for sample in samples)),
        needed_tokens=round(statistics.median(sample.needed_tokens for sample in samples)),
        swap_ins=round(statistics.median(sample.swap_ins for sample in samples)),
    )


def table(report: PressureReport) -> str:
    """The report as text."""
    head = f"{'round':<5} {'slots':>5} {'served':>8} {'demand':>6} {'cache, tokens':>13} | "
    head += f"{'verdicts/s (min to max)':>24} {'p50 ms':>8} {'p95 ms':>8} | "
    head += f"{'computed':>9} {'of needed':>9} | {'brought':>7} {'MiB':>5}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        rate = f"{row.verdicts_per_second:.1f} ({row.verdicts_per_second_min:.1f} to {row.verdicts_per_second_max:.1f})"
        lines.append(
            f"{row.round:<5} {row.slots:>5} {_served(row):>8} {row.demand:>5.1f}x {row.cache_tokens:>13,} | {rate:>24} "
            f"{row.p50_ms:>8.0f} {row.p95_ms:>8.0f} | {row.computed_tokens:>9,} {row.computed_tokens / row.needed_tokens:>9.1%} | "
            f"{row.swap_ins:>7} {row.swap_ins * row.adapter_mib:>5.0f}"
        )
    notes = [
        "p50, p95: from when all were asked to a conversation's last verdict. of needed: tokens computed over those that nobody had asked",
        "about before. brought: adapters copied into a slot. served: those first of which the cache holds more, or as they were asked.",
    ]
    return "\n".join([*lines, *notes, caption(report)])


def _served(row: PressureRow) -> str:
    return "resident" if row.resident_first else "as asked"


def caption(report: PressureReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.conversations} conversations of {report.conversation_tokens:,} tokens at once, {report.rules} rules each, then again "
        f"with {report.new_tokens} more; "
        f"{report.model} on {report.hardware}; commit {report.commit}; random adapters; median of {report.repeats} repeats."
    )


def draw(report: PressureReport, path: Path) -> None:
    """Write the plot: verdicts per second against the demand."""
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    x = list(DEMANDS)
    lines: dict[str, list[PressureRow]] = {}
    for row in report.rows:
        order = "" if row.resident_first else ", served as asked"
        lines.setdefault(f"{row.round}, {row.slots} slots{order}", []).append(row)
    colours = ("#D55E00", "#0072B2", "#E69F00", "#56B4E9", "#7A3300", "#003A5D")
    for (label, rows), colour, marker in zip(lines.items(), colours, "D^osvX", strict=False):
        low, high = (
            [row.verdicts_per_second_min for row in rows],
            [row.verdicts_per_second_max for row in rows],
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            x, [row.verdicts_per_second for row in rows], color=colour, marker=marker, label=label
        )
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{demand:g}x" for demand in x])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of all conversations over those the KV cache holds")
    axes.set_ylabel("verdicts per second")
    axes.grid(linewidth=0.4, alpha=0.6)
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 120)), fontsize=7, color="#444444")
    figure.savefig(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs at each demand (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    arguments = _arguments()
    report = run(load_recipe(arguments.model), arguments.repeats)
    publish(report, arguments.runs / "pressure_bench.json", draw, table)


if __name__ == "__main__":
    main()
