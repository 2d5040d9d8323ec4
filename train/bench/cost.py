"""What training aLoRAs costs: `python -m train.bench.cost`, entry of `make bench-train`. Suffixes on cached prefixes against TRL and PEFT.

Both sides train on the same rows of random words, in batches of similar length and parts of bounded size, and take turns. Every
measurement is a process of its own, so that its peak memory is its own. All figures of a report come from one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from guard.errors import exits_cleanly
from guard.example import SPLITS, Message
from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.prompt import Prompt, PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import Rule
from train.examples import Row, Rows
from train.job import Job

if TYPE_CHECKING:
    from train.prefix.fleet import Fleet

Base = Literal["tiny", "25M"]
SUFFIX = 24
BATCH = 4  # rows of a step whose time is measured
MEDIAN = 300  # tokens of a conversation of the pool
RULE = Rule(
    id="bench",
    title="Bench.",
    policy="A benchmark.",
    judged="conversation",
    violates=("a",),
    allows=("b",),
)


@dataclass(frozen=True)
class Grid:
    """How much to measure."""

    bases: tuple[Base, ...] = ("tiny", "25M")
    prefixes: tuple[int, ...] = (200, 1000, 4000)
    repeats: int = 3
    steps: int = 5
    examples: int = 1000
    epochs: int = 3
    rules: tuple[int, ...] = (1, 10, 100)
    adapter_steps: int = 600  # at most so many steps of a fleet are measured, counted over its adapters; the others take as long


QUICK = Grid(
    bases=("tiny",),
    prefixes=(200, 1000),
    repeats=1,
    steps=2,
    examples=64,
    rules=(1, 10),
    adapter_steps=40,
)


@dataclass(frozen=True)
class StepCell:
    """Seconds of a step of BATCH rows, median (lowest, highest) over the processes, each the median of its steps; peak MiB above the base.

    `cached_first_s` is a step of the first epoch, with computing its prefixes; `cached_s` one of a later epoch.
    """

    base: Base
    prefix: int
    suffix: int
    trl_s: tuple[float, float, float]
    cached_first_s: tuple[float, float, float]
    cached_s: tuple[float, float, float]
    trl_mib: float
    cached_mib: float


@dataclass(frozen=True)
class RunCell:
    """Seconds to train `rules` rules on one pool of conversations, tiny base and recipe; `measured` is the share of steps done."""

    side: Literal["TRL + PEFT", "cached prefixes"]
    rules: int
    seconds: float
    measured: float


def random_rows(builder: PromptBuilder, lengths: Sequence[int]) -> tuple[Row, ...]:
    """A row for each prefix length in tokens, of random words within the scaffold; every other one violates."""
    rng = random.Random(0)
    head, asked = builder.prefix_ids(()), builder.suffix_ids(RULE.title)
    scaffold = {*builder.prefix_ids([Message("user", "")]), *asked}
    words = [token for token in range(1000, 10_000) if token not in scaffold]
    header = len(builder.invocation(RULE.title))
    rows = []
    for number, length in enumerate(lengths):
        prefix = (*head, *rng.choices(words, k=length - len(head)))
        suffix = (*asked[:header], *rng.choices(words, k=SUFFIX - len(asked)), *asked[header:])
        rows.append(Row(str(number), "train", number % 2, Prompt((*prefix, *suffix), length)))
    return tuple(rows)


def pool(builder: PromptBuilder, count: int) -> tuple[Row, ...]:
    """Rows as long as conversations are: log-normal about MEDIAN, 40 to 2,000 tokens."""
    rng = random.Random(1)
    return random_rows(
        builder,
        [round(min(2000, max(40, MEDIAN * rng.lognormvariate(0, 0.6)))) for _ in range(count)],
    )


def job_of(base: Base, folder: Path, **trainer: Any) -> Job:
    """An aLoRA as the tiny recipe trains it, on `base`, with these trainer settings."""
    recipe = _recipe(base)
    adapter = recipe.methods["alora"]
    changed = adapter.model_copy(
        update={"trainer": adapter.trainer | {"save_steps": 10**6} | trainer}
    )
    recipe = recipe.model_copy(update={"adapters": {**recipe.methods, "alora": changed}})
    builder = PromptBuilder.from_base(recipe.base_path, answer_prefix=recipe.answer_prefix)
    job = Job(RULE, recipe, "alora", 0, builder, Runs(folder))
    job.data.mkdir(parents=True)
    for split in SPLITS:  # its rows are made, not read
        (job.data / f"{split}.jsonl").touch()
    return job


def trl_steps(base: Base, prefix: int, steps: int) -> dict[str, Any]:
    """Steps of TRL and PEFT on whole prompts; the first is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(base, Path(folder), max_steps=steps + 1, per_device_train_batch_size=BATCH)
        return _timed_trl(job, Rows(random_rows(job.builder, [prefix] * BATCH), (), ()))


def cached_steps(base: Base, prefix: int, steps: int) -> dict[str, Any]:
    """Steps on cached prefixes, the first not counted, and the seconds for the batch's prefixes."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(base, Path(folder), max_steps=steps + 1, per_device_train_batch_size=BATCH)
        fleet = _fleet([job], Rows(random_rows(job.builder, [prefix] * BATCH), (), ()))
        before = _peak_mib()
        prefixes = _seconds(fleet.begin)
        taken = [_seconds(lambda: list(fleet.step())) for _ in range(steps + 1)]
    return {"prefixes": prefixes, "seconds": taken[1:], "mib": _peak_mib() - before}


def trl_run(grid: Grid) -> RunCell:
    """The first epoch of one rule with TRL and PEFT; the others take as long."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of("tiny", Path(folder), num_train_epochs=1)
        taken = _timed_trl(job, Rows(pool(job.builder, grid.examples), (), ()))["all"]
    return RunCell("TRL + PEFT", 1, taken * grid.epochs, 1 / grid.epochs)


def cached_run(grid: Grid, rules: int) -> RunCell:
    """`rules` rules on one pool: all prefixes and as many steps as the grid allows."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            job_of("tiny", Path(folder) / str(rule), num_train_epochs=grid.epochs)
            for rule in range(rules)
        ]
        fleet = _fleet(jobs, Rows(pool(jobs[0].builder, grid.examples), (), ()))
        prefixes = _seconds(fleet.begin)
        steps = fleet.members[0].steps
        done = min(steps, max(2, grid.adapter_steps // rules))
        taken = _seconds(
            lambda: _steps_at(fleet, [number * steps // done for number in range(done)])
        )
    return RunCell("cached prefixes", rules, prefixes + taken * steps / done, done / steps)


def _steps_at(fleet: Fleet, steps: Iterable[int]) -> None:
    """The steps of these numbers, to be spread over the epochs: their batches are not equally long."""
    for step in steps:
        for member in fleet.members:
            member.step = step
        list(fleet.step())


def _timed_trl(job: Job, rows: Rows) -> dict[str, Any]:
    from transformers import TrainerCallback

    from train.adapter.trl import trainer_of

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.started)

    trainer = trainer_of(job, rows)
    trainer.add_callback(Clock())
    before = _peak_mib()
    taken = _seconds(trainer.train)
    return {"all": taken, "seconds": seconds[1:], "mib": _peak_mib() - before}


def _fleet(jobs: Sequence[Job], rows: Rows) -> Fleet:
    from train.adapter.load import load_base
    from train.adapter.settings import trainer_config
    from train.prefix.cache import Budget
    from train.prefix.fleet import Fleet
    from train.prefix.member import Member

    members = [Member(job, rows, trainer_config(job)) for job in jobs]
    return Fleet(load_base(jobs[0].recipe, members[0].config.device), members, Budget(host=2**36))


def _recipe(base: Base) -> Recipe:
    """The tiny recipe with a rule's turn, or the same on random weights: 25 M parameters of Qwen3's shape, made once."""
    recipe = load_recipe("tiny").model_copy(update={"rule_turn": "title"})
    if base == "tiny":
        return recipe
    folder = Path(tempfile.gettempdir()) / "train-bench-25M"
    if not (folder / "tokenizer.json").is_file():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
            head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(folder)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copy(Path(recipe.base_path) / name, folder / name)
    return recipe.model_copy(update={"base": str(folder)})


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _peak_mib() -> float:
    """The most memory that this process has had: of the GPU if there is one, else resident."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory_mib()


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def measure(grid: Grid) -> tuple[list[StepCell], list[RunCell]]:
    """The whole grid, the two sides in turns."""
    points = list(itertools.product(grid.bases, grid.prefixes))
    steps, runs = [], []
    with tqdm(
        total=2 * len(points) * grid.repeats + 1 + len(grid.rules), desc="bench", unit="run"
    ) as bar:

        def told(work: Callable[..., Any], *arguments: Any) -> Any:
            result = _alone(work, *arguments)
            bar.update()
            return result

        for base, prefix in points:
            pairs = [
                (
                    told(trl_steps, base, prefix, grid.steps),
                    told(cached_steps, base, prefix, grid.steps),
                )
                for _ in range(grid.repeats)
            ]
            steps.append(
                _cell(base, prefix, [trl for trl, _ in pairs], [cached for _, cached in pairs])
            )
        runs.append(told(trl_run, grid))
        runs += [told(cached_run, grid, rules) for rules in grid.rules]
    return steps, runs


def _cell(
    base: Base, prefix: int, trl: Sequence[dict[str, Any]], cached: Sequence[dict[str, Any]]
) -> StepCell:
    def spread(values: Sequence[float]) -> tuple[float, float, float]:
        return statistics.median(values), min(values), max(values)

    return StepCell(
        base, prefix, SUFFIX,
        trl_s=spread([statistics.median(each["seconds"]) for each in trl]),
        cached_first_s=spread([each["prefixes"] + statistics.median(each["seconds"]) for each in cached]),
        cached_s=spread([statistics.median(each["seconds"]) for each in cached]),
        trl_mib=statistics.median(each["mib"] for each in trl),
        cached_mib=statistics.median(each["mib"] for each in cached),
    )  # fmt: skip


def table(steps: Sequence[StepCell], runs: Sequence[RunCell]) -> str:
    """Both tables as Markdown, times as median (lowest to highest)."""

    def ms(seconds: tuple[float, float, float]) -> str:
        middle, low, high = (f"{1000 * value:,.0f}" for value in seconds)
        return f"{middle} ({low} to {high})"

    lines = [
        f"A step of {BATCH} rows with a suffix of {SUFFIX} tokens, in ms; peak memory above the loaded base, in MiB.", "",
        "| base | prefix | TRL + PEFT | cached, first epoch | ratio | cached, later | ratio | TRL + PEFT MiB | cached MiB | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {cell.base} | {cell.prefix:,} | {ms(cell.trl_s)} | {ms(cell.cached_first_s)} | {cell.trl_s[0] / cell.cached_first_s[0]:.1f}x | "
        f"{ms(cell.cached_s)} | {cell.trl_s[0] / cell.cached_s[0]:.1f}x | {cell.trl_mib:,.0f} | {cell.cached_mib:,.0f} | "
        f"{cell.cached_mib / cell.trl_mib:.0%} |"
        for cell in steps
    ]
    one = next(run for run in runs if run.side == "cached prefixes" and run.rules == 1)
    lines += [
        "",
        f"Whole trainings on one pool of conversations, median {MEDIAN} tokens, tiny base and recipe.",
        "",
    ]
    lines += [
        "| | rules | seconds | of one rule on cached prefixes | steps measured |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.side} | {run.rules} | {run.seconds:,.0f} | {run.seconds / one.seconds:.1f}x | {run.measured:.0%} |"
        for run in runs
    ]
    return "\n".join(lines)


def draw(steps: Sequence[StepCell], runs: Sequence[RunCell], path: Path) -> None:
    """Step time over the prefix's length, and the time of whole trainings over the number of rules."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for base in dict.fromkeys(cell.base for cell in steps):
        cells, line = [cell for cell in steps if cell.base == base], "-" if base == "tiny" else "--"
        for name, colour, values in (
            ("TRL + PEFT", "#0072B2", [cell.trl_s[0] for cell in cells]),
            ("cached, first epoch", "#E69F00", [cell.cached_first_s[0] for cell in cells]),
            ("cached, later epochs", "#D55E00", [cell.cached_s[0] for cell in cells]),
        ):
            left.plot(
                [cell.prefix for cell in cells],
                values,
                line,
                marker="o",
                color=colour,
                label=f"{name}, {base} base",
            )
    left.set(
        xlabel="tokens of the conversation",
        ylabel=f"seconds a step of {BATCH} rows",
        xscale="log",
        yscale="log",
    )
    cached = [run for run in runs if run.side == "cached prefixes"]
    right.plot(
        [run.rules for run in cached],
        [run.seconds for run in cached],
        marker="o",
        color="#D55E00",
        label="cached prefixes",
    )
    trl = next(run for run in runs if run.side == "TRL + PEFT")
    right.plot(
        [run.rules for run in cached],
        [trl.seconds * run.rules for run in cached],
        "--",
        color="#0072B2",
        label="TRL + PEFT, one after another",
    )
    right.set(
        xlabel="rules on one pool of conversations", ylabel="seconds", xscale="log", yscale="log"
    )
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(linewidth=0.4, alpha=0.6)
    figure.savefig(path)


@exits_cleanly
def main() -> None:
    """Measure and write the report, its tables and its picture."""
    parser = argparse.ArgumentParser(
        prog="python -m train.bench.cost",
        description="Time and memory of training aLoRAs: cached prefixes against TRL.",
    )
    parser.add_argument("--quick", action="store_true", help="a coarse grid of about three minutes")
    parser.add_argument(
        "--out", type=Path, default=Runs().root / "train_bench.json", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    steps, runs = measure(QUICK if arguments.quick else Grid())
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **provenance(),
        "steps": [asdict(cell) for cell in steps],
        "runs": [asdict(run) for run in runs],
    }
    with atomic_write(out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(table(steps, runs) + "\n", encoding="utf-8")
    draw(steps, runs, out.with_suffix(".png"))
    print(f"{table(steps, runs)}\n\nwritten to {out}, .md and .png")


if __name__ == "__main__":
    main()
