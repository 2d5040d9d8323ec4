"""Whether suffixes on cached prefixes train as good an aLoRA as TRL and PEFT on whole prompts: `python -m train.bench.accuracy`.

Both train on the first rows of a rule's training split, with the recipe's settings and the same seeds, and answer its test split in
plain PEFT. `make data` first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from guard.errors import GuardError, exits_cleanly
from guard.example import SPLITS
from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.prompt import PromptBuilder
from guard.provenance import provenance
from guard.recipe import load_recipe
from guard.rule import load_rule
from train.examples import Rows, load
from train.job import Job

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Pair:
    """One seed on both sides, TRL's first: share of right verdicts at even odds, AUROC, seconds of training. Logits in nats."""

    seed: int
    accuracy: tuple[float, float]
    auroc: tuple[float, float]
    seconds: tuple[float, float]
    flips: int  # verdicts of the test split that differ
    largest_logit: float
    largest_difference: float


def compare(job: Job, rows: Rows) -> Pair:
    """Train `job` both ways on `rows` and answer the test split."""
    from sklearn.metrics import roc_auc_score

    from train.adapter import trl as adapter
    from train.adapter.predict import verdict_logits
    from train.prefix import trainer as shared_prefix

    def answered(fit: Callable[[Job, Rows], Iterable[PeftModel]]) -> tuple[list[float], float]:
        with tempfile.TemporaryDirectory() as folder:
            here = replace(job, runs=Runs(Path(folder)))
            here.data.mkdir(parents=True)
            for split in SPLITS:  # the rows are given, not read
                (here.data / f"{split}.jsonl").touch()
            started = time.perf_counter()
            for model in fit(here, rows):
                seconds = time.perf_counter() - started
                return verdict_logits(
                    model, [row.prompt for row in rows.test], job.builder
                ), seconds
        raise AssertionError("no adapter")

    def cached_prefixes(here: Job, rows: Rows) -> Iterator[PeftModel]:
        for fitted in shared_prefix.fit([(here, rows)]):
            if isinstance(fitted, GuardError):
                raise fitted
            yield fitted.model

    trl, trl_s = answered(lambda here, rows: [adapter.fit(here, rows)])
    cached, cached_s = answered(cached_prefixes)
    labels = [row.label for row in rows.test]

    def accuracy(logits: Sequence[float]) -> float:
        return statistics.fmean(
            (logit > 0) == bool(label) for logit, label in zip(logits, labels, strict=True)
        )

    return Pair(
        job.seed,
        accuracy=(accuracy(trl), accuracy(cached)),
        auroc=(float(roc_auc_score(labels, trl)), float(roc_auc_score(labels, cached))),
        seconds=(trl_s, cached_s),
        flips=sum((one > 0) != (other > 0) for one, other in zip(trl, cached, strict=True)),
        largest_logit=max(map(abs, trl)),
        largest_difference=max(abs(one - other) for one, other in zip(trl, cached, strict=True)),
    )


def table(pairs: Sequence[Pair]) -> str:
    """The pairs as Markdown, TRL's figures first."""
    lines = [
        "| seed | accuracy, %: TRL + PEFT / cached prefixes | AUROC | seconds | verdicts that differ | largest difference of logits |",
        "|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        one, other = pair.accuracy
        lines.append(
            f"| {pair.seed} | {100 * one:.2f} / {100 * other:.2f} | {pair.auroc[0]:.4f} / {pair.auroc[1]:.4f} | "
            f"{pair.seconds[0]:,.0f} / {pair.seconds[1]:,.0f} | {pair.flips} | {pair.largest_difference:.2g} of {pair.largest_logit:.2g} |"
        )
    means = [statistics.fmean(pair.accuracy[side] for pair in pairs) for side in (0, 1)]
    return "\n".join([*lines, f"\nmean accuracy {100 * means[0]:.2f} and {100 * means[1]:.2f} %"])


@exits_cleanly
def main() -> None:
    """Train, answer, write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m train.bench.accuracy",
        description="aLoRA by TRL and PEFT, and on cached prefixes.",
    )
    parser.add_argument(
        "--rule", default="medical_advice", help="a rule with data (default: %(default)s)"
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=1200,
        help="the first so many training rows (default: %(default)s)",
    )
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Runs().root / "train_accuracy.json", help="default: %(default)s"
    )
    arguments = parser.parse_args()
    rule, recipe = load_rule(arguments.rule), load_recipe(arguments.model)
    builder = PromptBuilder.of(recipe)
    rows = load(Runs().data(rule.id), rule, recipe, builder)
    rows = replace(rows, train=rows.train[: arguments.examples])
    pairs = [
        compare(Job(rule, recipe, "alora", int(seed), builder, Runs()), rows)
        for seed in arguments.seeds.split(",")
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **provenance(),
        "rule": rule.id,
        "examples": len(rows.train),
        "test": len(rows.test),
        "pairs": [asdict(pair) for pair in pairs],
    }
    with atomic_write(arguments.out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{table(pairs)}\n\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
