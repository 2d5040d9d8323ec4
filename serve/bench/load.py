"""`make bench-load`: conversations that arrive when they like, not when the server is ready. Knows nothing of what the verdicts mean.

Conversations arrive by a Poisson process, as long as those of the Schema-Guided Dialogue data set are, each with 5 to 20 rules. What counts
is the time from a conversation's arrival to its last verdict. LoRA and aLoRA get the same traffic in one engine, one after the other. A
method that cannot keep up with a rate is not asked at higher ones: its queue would only grow with the length of the run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.example import Message
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.method import METHODS
from guard.prompt import PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from serve.bench.report import BenchReport, publish
from serve.bench.traffic import Done, Timed, open_loop, poisson
from serve.bench.workload import conversation, told, wordings
from serve.engine import Call, GuardEngine, Score, ScoreRequest

RATES = (1.0, 2.0, 4.0, 8.0, 16.0)  # conversations per second
CHECKS = 200  # conversations at each rate
RULES = (5, 20)  # of a conversation, least and most
REPEATS = 3  # runs at each rate, each with traffic of its own
KEEPS_UP = 2.0  # a server whose last third of conversations waits longer than so many times its first third is overloaded
# The 0, 5, 10, … 100 % quantiles of the prompts' lengths in the tiny base's tokens: every eighth of SGD's 17,193 dialogues (Rastogi
# et al., 2020).
LENGTHS = (
    87,
    163,
    185,
    206,
    221,
    236,
    251,
    265,
    278,
    289,
    302,
    315,
    326,
    339,
    354,
    371,
    392,
    416,
    443,
    490,
    740,
)
COLOURS: dict[str, str] = {"lora": "#0072B2", "alora": "#D55E00"}
NAMES: dict[str, str] = {"lora": "LoRA", "alora": "aLoRA"}


class LoadRow(Strict):
    """One method at one rate, all runs. Latencies from a conversation's arrival to its last verdict."""

    method: str
    offered_per_second: float
    answered_per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    growth: float  # median latency of the last third of a run's conversations over that of the first third; median of the runs
    verdicts: int
    computed_tokens: int
    needed_tokens: int  # every conversation once, and every rule's suffix
    swap_ins: int  # copied into a slot: each has its own

    @property
    def keeps_up(self) -> bool:
        """Whether the queue did not grow for the whole run."""
        return self.growth < KEEPS_UP


class LoadReport(BenchReport):
    """Everything in `runs/load_bench.json`."""

    checks: int
    repeats: int
    rules: tuple[int, int]
    engine: dict[str, str]
    rows: tuple[LoadRow, ...]


@dataclass(frozen=True)
class Arrival:
    """A conversation, when it arrives in seconds from the start, and the numbers of its rules."""

    messages: tuple[Message, ...]
    due_s: float
    rules: tuple[int, ...]


def arrivals(prompts: PromptBuilder, rate: float, checks: int, seed: int) -> list[Arrival]:
    """Conversations of real lengths with 5 to 20 rules each, by a Poisson process."""
    draw = random.Random(seed)
    lengths = [
        round(float(np.interp(draw.uniform(0, 100), np.linspace(0, 100, len(LENGTHS)), LENGTHS)))
        for _ in range(checks)
    ]
    return [
        Arrival(
            conversation(prompts, length, 1000 * seed + number),
            due_s,
            tuple(draw.sample(range(RULES[1]), draw.randint(*RULES))),
        )
        for number, (length, due_s) in enumerate(
            zip(lengths, poisson(rate, checks, seed), strict=True)
        )
    ]


def run(
    recipe: Recipe, rates: Sequence[float] = RATES, checks: int = CHECKS, repeats: int = REPEATS
) -> LoadReport:
    """Both methods at every rate that they keep up with, and the first that they do not, in one engine."""
    from serve.bench.random_adapter import save_random_adapters

    prompts = PromptBuilder.of(recipe)
    rows: list[LoadRow] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(
            total=len(rates) * len(METHODS) * repeats * checks, desc="measuring", unit="check"
        ) as bar,
    ):
        folders = {
            f"{method}-{number}": Path(scratch) / method / str(number)
            for method in METHODS
            for number in range(RULES[1])
        }
        for method in METHODS:
            save_random_adapters(
                [folder for name, folder in folders.items() if name.startswith(f"{method}-")],
                recipe,
                method,
                prompts,
            )
        with GuardEngine(recipe, folders, max_loras=len(folders)) as engine:
            server = Server(engine, prompts, wordings([told(recipe)], RULES[1]))
            for method in METHODS:
                server.run(
                    method, arrivals(prompts, 1000.0, 8, seed=0)
                )  # first times are slow everywhere
            for number, rate in enumerate(rates):
                asked = [
                    arrivals(prompts, rate, checks, seed)
                    for seed in range(1 + number * repeats, 1 + (number + 1) * repeats)
                ]
                runs: dict[str, list[Run]] = {method: [] for method in METHODS}
                keep_up = [
                    method
                    for method in METHODS
                    if all(row.keeps_up for row in rows if row.method == method)
                ]
                for turn, traffic in enumerate(asked):
                    for method in keep_up if turn % 2 else keep_up[::-1]:
                        bar.set_postfix_str(f"{rate:g} per second, {NAMES[method]}", refresh=False)
                        runs[method].append(server.run(method, traffic))
                        bar.update(checks)
                rows += [_row(method, runs[method]) for method in keep_up]
                bar.update((len(METHODS) - len(keep_up)) * repeats * checks)
    engine_args = {
        key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()
    }
    return LoadReport(
        **provenance(),
        model=recipe.name,
        peak_memory_mib=peak_memory_mib(),
        checks=checks,
        repeats=repeats,
        rules=RULES,
        engine=engine_args,
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Run:
    """One method under one run of traffic."""

    offered_per_second: float
    timed: Timed
    verdicts: int
    computed_tokens: int
    needed_tokens: int
    swap_ins: int

    @property
    def growth(self) -> float:
        """How much longer the last third of the conversations waited than the first."""
        third = max(1, len(self.timed.latencies_s) // 3)
        return float(
            np.median(self.timed.latencies_s[-third:]) / np.median(self.timed.latencies_s[:third])
        )


class Server:
    """The engine behind the traffic."""

    def __init__(self, engine: GuardEngine, prompts: PromptBuilder, texts: Sequence[str]) -> None:
        self._engine, self._prompts, self._texts = engine, prompts, texts

    def run(self, method: str, asked: Sequence[Arrival]) -> Run:
        """Put the conversations to the method's adapters as they arrive. Raises GuardError if a request is refused."""
        self._engine.forget()
        filled = self._engine.swap_ins
        checks: list[Call] = []

        def submit(number: int) -> Done:
            arrival = asked[number]
            requests = [
                ScoreRequest(arrival.messages, self._texts[rule], f"{method}-{rule}")
                for rule in arrival.rules
            ]
            checks.append(check := self._engine.submit(requests))
            return lambda: check.done

        timed = open_loop(submit, self._engine.step, [arrival.due_s for arrival in asked])
        outcomes = [outcome for check in checks for outcome in check.results()]
        scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
        if len(scores) < len(outcomes):
            raise GuardError(
                "a benchmark request was refused", where=method, remedy="Run `make doctor`"
            )
        return Run(
            offered_per_second=len(asked) / asked[-1].due_s,
            timed=timed,
            verdicts=len(scores),
            computed_tokens=sum(score.computed_tokens for score in scores),
            needed_tokens=sum(self._needed(arrival) for arrival in asked),
            swap_ins=self._engine.swap_ins - filled,
        )

    def _needed(self, arrival: Arrival) -> int:
        """Tokens of the conversation once, and of every suffix."""
        suffixes = sum(len(self._prompts.suffix_ids(self._texts[rule])) for rule in arrival.rules)
        return len(self._prompts.prefix_ids(arrival.messages)) + suffixes


def _row(method: str, runs: Sequence[Run]) -> LoadRow:
    latencies_ms = [1000 * latency for run in runs for latency in run.timed.latencies_s]
    p50, p95, p99 = (float(np.percentile(latencies_ms, percent)) for percent in (50, 95, 99))
    return LoadRow(
        method=method,
        offered_per_second=float(np.median([run.offered_per_second for run in runs])),
        answered_per_second=float(np.median([run.timed.per_second for run in runs])),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        growth=float(np.median([run.growth for run in runs])),
        verdicts=sum(run.verdicts for run in runs),
        computed_tokens=sum(run.computed_tokens for run in runs),
        needed_tokens=sum(run.needed_tokens for run in runs),
        swap_ins=sum(run.swap_ins for run in runs),
    )


def table(report: LoadReport) -> str:
    """The report as text."""
    head = f"{'conversations/s':>15} {'method':>7} | {'answered/s':>10} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'growth':>6} | "
    head += f"{'tokens/verdict':>14} {'of needed':>9} {'brought':>7}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        lines.append(
            f"{row.offered_per_second:>15.1f} {NAMES[row.method]:>7} | {row.answered_per_second:>10.1f} {row.p50_ms:>8.0f} "
            f"{row.p95_ms:>8.0f} {row.p99_ms:>8.0f} {row.growth:>6.1f} | {row.computed_tokens / row.verdicts:>14.0f} "
            f"{row.computed_tokens / row.needed_tokens:>9.1%} {row.swap_ins:>7}"
            f"{'' if row.keeps_up else '  does not keep up'}"
        )
    notes = [
        "p50, p95, p99: from a conversation's arrival to its last verdict. growth: how much longer the last third of a run's conversations",
        f"waited than the first; from {KEEPS_UP:g} on the server does not keep up. of needed: tokens computed over those of every",
        "conversation once and every rule's suffix. brought: adapters copied into a slot while the clock ran.",
    ]
    return "\n".join([*lines, *notes, caption(report)])


def caption(report: LoadReport) -> str:
    """Where the numbers come from, in one line."""
    least, most = report.rules
    return (
        f"{report.repeats} runs of {report.checks} conversations at each rate, Poisson arrivals, "
        f"{LENGTHS[0]} to {LENGTHS[-1]} tokens (median {LENGTHS[10]}), "
        f"{least} to {most} rules each; {report.model} on {report.hardware}; commit {report.commit}; random adapters."
    )


def draw(report: LoadReport, path: Path) -> None:
    """Write the plot: median and 95th percentile of the latency against the rate."""
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for method in METHODS:
        rows = [row for row in report.rows if row.method == method]
        rates = [row.offered_per_second for row in rows]
        axes.plot(
            rates,
            [row.p50_ms for row in rows],
            color=COLOURS[method],
            marker="o",
            label=f"{NAMES[method]}, median",
        )
        axes.plot(
            rates,
            [row.p95_ms for row in rows],
            color=COLOURS[method],
            marker="^",
            linestyle="--",
            label=f"{NAMES[method]}, 95 %",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("conversations per second")
    axes.set_ylabel("ms from arrival to the last verdict")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.legend()
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 120)), fontsize=7, color="#444444")
    figure.savefig(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--checks",
        type=int,
        default=CHECKS,
        help="conversations at each rate (default: %(default)s)",
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.checks < 1:
        parser.error("--checks must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    arguments = _arguments()
    report = run(load_recipe(arguments.model), checks=arguments.checks)
    publish(report, arguments.runs / "load_bench.json", draw, table)


if __name__ == "__main__":
    main()
