"""`make bench-pressure`: more conversations at once than the prefix cache holds. Knows nothing of what the verdicts mean.

Twelve conversations are put to twenty rules each, all at the same moment, in engines whose KV cache holds twice, once, half and a quarter
of them; with a slot for every adapter, and with eight, so that a conversation's rules come in waves and others in between. What is computed
is compared with what is needed: every conversation once, and every rule's suffix (a little less, because all conversations begin with the
same block). Were a conversation's blocks given up before all of its rules had read them, it would be computed again, and the throughput
would collapse.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from guard.card import WEIGHTS
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.prompt import PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from guard.yaml_file import Strict
from serve.bench_report import BenchReport, publish
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.workload import conversation, told, wordings

CONVERSATIONS, TOKENS, RULES = 12, 2000, 20
FEW_SLOTS = 8
DEMANDS = (0.5, 1.0, 2.0, 4.0)


class PressureRow(Strict):
    """One size of the cache; medians over the repeats, latencies of the conversations of all repeats."""

    slots: int  # adapters on the device at once
    demand: float  # tokens of all conversations over those the cache holds
    cache_tokens: int
    verdicts_per_second: float
    verdicts_per_second_min: float
    verdicts_per_second_max: float
    p50_ms: float
    p95_ms: float
    computed_tokens: int
    needed_tokens: int
    adapters_brought: int  # copied into a slot
    adapter_mib: float


class PressureReport(BenchReport):
    """Everything in `runs/pressure_bench.json`."""

    conversations: int
    conversation_tokens: int
    rules: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[PressureRow, ...]


def run(recipe: Recipe, repeats: int, conversations: int = CONVERSATIONS, tokens: int = TOKENS, rules: int = RULES) -> PressureReport:
    """Measure every demand in an engine of its own."""
    from serve.random_adapter import save_random_adapters

    prompts = PromptBuilder.from_base(recipe.base_path, revision=recipe.commit, answer_prefix=recipe.answer_prefix)
    rows = []
    total = 2 * len(DEMANDS) * (repeats + 1)
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=total, desc="measuring", unit="run") as bar:
        folders = {f"adapter-{number}": Path(scratch) / str(number) for number in range(rules)}
        save_random_adapters(folders.values(), recipe, "alora", prompts)
        for slots in (rules, min(FEW_SLOTS, rules)):
            rows += [_row(recipe, prompts, folders, slots, demand, repeats, conversations, tokens, bar) for demand in DEMANDS]
    engine = {key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()}
    return PressureReport(
        **provenance(), model=recipe.name, peak_memory_mib=peak_memory_mib(), conversations=conversations, conversation_tokens=tokens,
        rules=rules, repeats=repeats, engine=engine, rows=tuple(rows),
    )  # fmt: skip


def _row(
    recipe: Recipe,
    prompts: PromptBuilder,
    folders: dict[str, Path],
    slots: int,
    demand: float,
    repeats: int,
    conversations: int,
    tokens: int,
    bar: tqdm,
) -> PressureRow:
    texts = wordings([told(recipe)], len(folders))
    suffixes = sum(len(prompts.suffix_ids(text)) for text in texts)
    rates, latencies_ms, computed, needed, brought = list[float](), list[float](), list[int](), list[int](), list[int]()
    block = recipe.engine.get("block_size", 16)
    blocks = round(conversations * tokens / demand / block)
    own = {"max_loras": slots, "max_model_len": tokens + 200, "block_size": block, "num_gpu_blocks_override": blocks}
    with GuardEngine(recipe, folders, **own) as engine:
        for repeat in range(-1, repeats):  # the first is a warm-up
            seed = 1000 * (repeat + 1)
            asked_of = [conversation(prompts, tokens, seed + number) for number in range(conversations)]
            engine.forget()
            started, before, filled = time.perf_counter(), engine.scheduled_tokens, engine.slots_filled
            under_way = [
                engine.ask([ScoreRequest(messages, text, name) for text, name in zip(texts, folders, strict=True)]) for messages in asked_of
            ]
            while not all(asked.done for asked in under_way):
                engine.step()
            wall_s = time.perf_counter() - started
            scores = [outcome for asked in under_way for outcome in asked.results() if isinstance(outcome, Score)]
            if len(scores) < conversations * len(folders):
                raise GuardError("a benchmark request was refused", where=f"demand {demand}", remedy="Run `make doctor`")
            bar.update()
            if repeat >= 0:
                rates.append(len(scores) / wall_s)
                latencies_ms += [1000 * (asked.finished - started) for asked in under_way]
                computed.append(engine.scheduled_tokens - before)
                brought.append(engine.slots_filled - filled)
                needed.append(sum(len(prompts.prefix_ids(messages)) for messages in asked_of) + conversations * suffixes)
        cache_tokens = engine.cache_tokens
    return PressureRow(
        slots=slots,
        demand=demand,
        cache_tokens=cache_tokens,
        verdicts_per_second=statistics.median(rates),
        verdicts_per_second_min=min(rates),
        verdicts_per_second_max=max(rates),
        p50_ms=float(np.percentile(latencies_ms, 50)),
        p95_ms=float(np.percentile(latencies_ms, 95)),
        computed_tokens=round(statistics.median(computed)),
        needed_tokens=round(statistics.median(needed)),
        adapters_brought=round(statistics.median(brought)),
        adapter_mib=next(iter(folders.values())).joinpath(WEIGHTS).stat().st_size / 2**20,
    )


def table(report: PressureReport) -> str:
    """The report as text."""
    head = f"{'slots':>5} {'demand':>6} {'cache, tokens':>13} | {'verdicts/s (min to max)':>24} {'p50 ms':>8} {'p95 ms':>8} | "
    head += f"{'computed':>9} {'of needed':>9} | {'brought':>7} {'MiB':>5}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        rate = f"{row.verdicts_per_second:.1f} ({row.verdicts_per_second_min:.1f} to {row.verdicts_per_second_max:.1f})"
        lines.append(
            f"{row.slots:>5} {row.demand:>5.1f}x {row.cache_tokens:>13,} | {rate:>24} {row.p50_ms:>8.0f} {row.p95_ms:>8.0f} | "
            f"{row.computed_tokens:>9,} {row.computed_tokens / row.needed_tokens:>9.1%} | "
            f"{row.adapters_brought:>7} {row.adapters_brought * row.adapter_mib:>5.0f}"
        )
    return "\n".join(
        [
            *lines,
            "p50, p95: from when all were asked to a conversation's last verdict. brought: adapters copied into a slot.",
            caption(report),
        ]
    )


def caption(report: PressureReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.conversations} conversations of {report.conversation_tokens:,} tokens at once, {report.rules} rules each; "
        f"{report.model} on {report.hardware}; commit {report.commit}; random adapters; median of {report.repeats} repeats."
    )


def draw(report: PressureReport, path: Path) -> None:
    """Write the plot: verdicts per second against the demand."""
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    x = list(DEMANDS)
    for slots, colour, marker in zip(sorted({row.slots for row in report.rows}, reverse=True), ("#D55E00", "#0072B2"), "Do", strict=False):
        rows = [row for row in report.rows if row.slots == slots]
        low, high = [row.verdicts_per_second_min for row in rows], [row.verdicts_per_second_max for row in rows]
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, [row.verdicts_per_second for row in rows], color=colour, marker=marker, label=f"{slots} slots")
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
        prog="python -m serve.pressure_bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a base model of recipes/models (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs at each demand (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)")
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
