"""Another threshold for trained weights, in seconds: `make calibrate RULE=pii_leak MAX_FPR=0.02`.

It is chosen anew from the logits that were kept beside the weights, by the rule's file, for a
false-positive rate, or as it is stated; the weights stay. What it does to recall and false-positive
rate is printed, on the validation rows that chose it and on the test rows that did not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from guard.conversation.example import Split, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from guard.rule import load_rule, rule_names
from guard.weights.card import Card, ThresholdBy, check_rule, load_card
from guard.weights.predictions import read_predictions
from train.calibration.recalibrate import recalibrate
from train.job import Job

SHOWN: tuple[Split, ...] = ("validation", "test")


class ThresholdChoice(NamedTuple):
    """How a threshold is chosen: for a rate, as stated, or, without both, by the rule's file."""

    max_fpr: float | None = None
    threshold: float | None = None

    @property
    def by(self) -> ThresholdBy:
        """What the card says of it."""
        if self.threshold is not None:
            return "threshold"
        return "rule" if self.max_fpr is None else "max_fpr"


def calibrate_rules(
    selection: str, recipe: Recipe, methods: Sequence[str], choice: ThresholdChoice, runs: Runs
) -> None:
    """Choose the thresholds of the rules' trained weights, of seed 0, and print what that changes.

    Raises GuardError where a rule has no weights by any of the methods, or a threshold cannot be
    chosen; what was done before stands.
    """
    builder = prompt_builder(recipe)
    for name in rule_names(selection):
        rule = load_rule(name)
        jobs = [Job(rule, recipe, method, 0, builder, runs) for method in methods]
        trained = [job for job in jobs if job.folder.is_dir()]
        if not trained:
            wanted = f"make train RULE={name} MODEL={recipe.name}"
            raise GuardError(
                "the rule has no weights to calibrate",
                where=runs.adapter(recipe.name, name, "").parent,
                got=", ".join(methods),
                remedy=f"Run `{wanted}`",
            )
        for job in trained:
            print(_calibrated(job, choice), flush=True)


def _calibrated(job: Job, choice: ThresholdChoice) -> str:
    """The job's weights with another threshold, and what that changes, in lines."""
    before = load_card(job.folder)
    check_rule(before, job.rule.id, job.folder)
    rule = job.rule
    if choice.by != "rule":
        rule = rule.model_copy(update={"max_fpr": choice.max_fpr})
    recalibrate(replace(job, rule=rule), choice.threshold, choice.by)
    after = load_card(job.folder)
    lines = [f"{job.name}: threshold {before.threshold:.3f} -> {after.threshold:.3f}"]
    lines[0] += f", {_reason(after)}; version {before.version[:12]} -> {after.version[:12]}"
    for split in SHOWN:
        lines.append(f"  {split:<10} before  {_rates(job, before, split)}")
        lines.append(f"  {'':<10} after   {_rates(job, after, split)}")
    return "\n".join(lines)


def _reason(card: Card) -> str:
    """How the card's threshold was chosen, in words."""
    if card.threshold_by == "threshold":
        return "as stated"
    by_whom = "by the rule's file" if card.threshold_by == "rule" else "as asked"
    if card.max_fpr is None:
        return f"balanced, {by_whom}"
    return f"for at most {100 * card.max_fpr:g} % false positives, {by_whom}"


def _rates(job: Job, card: Card, split: Split) -> str:
    """Recall and false-positive rate of the card's verdicts, with the numbers of rows."""
    rows = read_examples(job.data / f"{split}.jsonl")
    logits = read_predictions(job.folder, split, f"Run `{card.retrain} FORCE=1`")
    flagged, total = [0, 0], [0, 0]
    for row in rows:
        if row.id in logits:
            total[row.label] += 1
            flagged[row.label] += card.calibration.verdict("", logits[row.id]).violates
    return f"recall {_share(flagged[1], total[1])}, FPR {_share(flagged[0], total[0])}"


def _share(part: int, rows: int) -> str:
    if not rows:
        return "unknown (no rows)"
    return f"{100 * part / rows:5.1f} % ({part} of {rows})"


def _probability(text: str) -> float:
    """A share between 0 and 1, of which neither is one."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, as 0.02; got {text!r}")
    return value


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m train.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rule = "a rule in recipes/rules, several separated by commas, or 'all'"
    parser.add_argument("--rule", required=True, help=rule)
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    method = "a method of the recipe (default: all that are trained)"
    parser.add_argument("--method", help=method)
    either = parser.add_mutually_exclusive_group()
    rate = "the share of allowed conversations that may be flagged"
    either.add_argument("--max-fpr", type=_probability, help=rate)
    stated = "the probability from which on it is a violation"
    either.add_argument("--threshold", type=_probability, help=stated)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.model)
    methods = list(recipe.methods)
    if arguments.method:
        recipe.settings(arguments.method)
        methods = [arguments.method]
    choice = ThresholdChoice(arguments.max_fpr, arguments.threshold)
    calibrate_rules(arguments.rule, recipe, methods, choice, Runs())


if __name__ == "__main__":
    main()
