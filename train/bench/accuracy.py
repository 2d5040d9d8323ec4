"""Whether suffixes on cached prefixes train as good an aLoRA as TRL and PEFT on whole prompts:
`python -m train.bench.accuracy`.

Both train on the first rows of a rule's training split, with the recipe's settings and the same
seeds, and answer its test split in plain PEFT. `make data` first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from guard.arguments import count, whole_numbers
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from guard.rule import load_rule
from train.bench.workload import in_folder
from train.examples import Row, Rows, load
from train.job import Job

if TYPE_CHECKING:
    from peft import PeftModel

HEADER = """\
| seed | accuracy, %: TRL + PEFT / cached prefixes | AUROC | seconds | verdicts that differ \
| largest difference of logits |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class SeedComparison:
    """One seed on both sides, TRL's first: share of right verdicts at even odds, AUROC, seconds of
    training. Logits in nats.
    """

    seed: int
    accuracy: tuple[float, float]
    auroc: tuple[float, float]
    seconds: tuple[float, float]
    flips: int  # verdicts of the test split that differ
    largest_logit: float
    largest_difference: float


def compare(job: Job, rows: Rows) -> SeedComparison:
    """Train `job` both ways on `rows` and answer the test split."""
    from sklearn.metrics import roc_auc_score

    trl, trl_s = _test_logits(_fit_trl, job, rows)
    cached, cached_s = _test_logits(_fit_cached, job, rows)
    labels = [row.label for row in rows.test]
    flips = 0
    differences: list[float] = []
    for trl_logit, cached_logit in zip(trl, cached, strict=True):
        flips += (trl_logit > 0) != (cached_logit > 0)
        differences.append(abs(trl_logit - cached_logit))
    return SeedComparison(
        seed=job.seed,
        accuracy=(_accuracy(trl, rows.test), _accuracy(cached, rows.test)),
        auroc=(float(roc_auc_score(labels, trl)), float(roc_auc_score(labels, cached))),
        seconds=(trl_s, cached_s),
        flips=flips,
        largest_logit=max(map(abs, trl)),
        largest_difference=max(differences),
    )


def _fit_trl(job: Job, rows: Rows) -> PeftModel:
    from train.adapter.trl import fit

    return fit(job, rows)


def _fit_cached(job: Job, rows: Rows) -> PeftModel:
    from train.prefix.trainer import fit

    fitted = next(fit([(job, rows)]))
    if isinstance(fitted, GuardError):
        raise fitted
    return fitted.model


def _test_logits(
    fit: Callable[[Job, Rows], PeftModel], job: Job, rows: Rows
) -> tuple[list[float], float]:
    """The adapter's logits of the test split, in nats, and the seconds to train it."""
    from train.adapter.predict import verdict_logits

    prompts = [row.prompt for row in rows.test]
    with tempfile.TemporaryDirectory() as folder:
        job = in_folder(job, Path(folder))
        started = time.perf_counter()
        model = fit(job, rows)
        seconds = time.perf_counter() - started
        return verdict_logits(model, prompts, job.builder), seconds


def _accuracy(logits: Sequence[float], rows: Sequence[Row]) -> float:
    pairs = zip(logits, rows, strict=True)
    return statistics.fmean((logit > 0) == bool(row.label) for logit, row in pairs)


def table(comparisons: Sequence[SeedComparison]) -> str:
    """The comparisons as Markdown, TRL's figures first."""
    lines = [HEADER, *map(_table_row, comparisons)]
    trl = statistics.fmean(comparison.accuracy[0] for comparison in comparisons)
    cached = statistics.fmean(comparison.accuracy[1] for comparison in comparisons)
    return "\n".join([*lines, f"\nmean accuracy {100 * trl:.2f} and {100 * cached:.2f} %"])


def _table_row(comparison: SeedComparison) -> str:
    trl, cached = comparison.accuracy
    trl_auroc, cached_auroc = comparison.auroc
    trl_s, cached_s = comparison.seconds
    cells = (
        str(comparison.seed),
        f"{100 * trl:.2f} / {100 * cached:.2f}",
        f"{trl_auroc:.4f} / {cached_auroc:.4f}",
        f"{trl_s:,.0f} / {cached_s:,.0f}",
        str(comparison.flips),
        f"{comparison.largest_difference:.2g} of {comparison.largest_logit:.2g}",
    )
    return f"| {' | '.join(cells)} |"


@exits_cleanly
def main() -> None:
    """Train, answer, write the figures."""
    arguments = _arguments()
    rule = load_rule(arguments.rule)
    recipe = load_recipe(arguments.model)
    builder = PromptBuilder.of(recipe)
    rows = load(Runs().data(rule.id), rule, recipe, builder)
    rows = replace(rows, train=rows.train[: arguments.examples])
    comparisons = []
    for seed in arguments.seeds:
        job = Job(rule, recipe, recipe.sharing_method, seed, builder, Runs())
        comparisons.append(compare(job, rows))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **provenance(),
        "rule": rule.id,
        "examples": len(rows.train),
        "test": len(rows.test),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    with atomic_write(arguments.out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{table(comparisons)}\n\nwritten to {arguments.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train.bench.accuracy",
        description="aLoRA by TRL and PEFT, and on cached prefixes.",
    )
    add = parser.add_argument
    add("--rule", default="medical_advice", help="a rule with data (default: %(default)s)")
    model = "a base model of recipes/models (default: %(default)s)"
    add("--model", default="tiny", help=model)
    examples = "the first so many training rows (default: %(default)s)"
    add("--examples", type=count, default=1200, help=examples)
    add("--seeds", type=whole_numbers, default=(0, 1, 2), help="default: %(default)s")
    out = Runs().root / "train_accuracy.json"
    add("--out", type=Path, default=out, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
