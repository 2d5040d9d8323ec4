"""Another threshold for trained weights, in seconds: `make calibrate RULE=pii_leak MAX_FPR=0.02`.

It is chosen anew from the logits that were kept beside the weights, by the rule's file, for a
false-positive rate, or as it is stated; the weights stay. What it does to recall and false-positive
rate is printed, on the validation rows that chose it and on the test rows that did not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from guard.calibrate import calibrate
from guard.calibration_rows import LabelledRow, check_rows, for_calibration, own_rows_decide
from guard.conversation.example import Example, Split, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.method import HEAD, METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from guard.rule import Rule, load_rule, rule_names
from guard.twins import of_twins
from guard.verdict import Calibration
from guard.weights.card import Card, ThresholdBy, check_rule, load_card, read_card
from guard.weights.predictions import PREDICTIONS, read_predictions
from train.calibration.validation import twin_metrics, validation_metrics
from train.export import register
from train.job import Job

SHOWN: tuple[Split, ...] = ("validation", "test")


def calibrated(
    logits: Sequence[float], rows: Sequence[LabelledRow], rule: Rule, threshold: float | None = None
) -> tuple[Calibration, dict[str, Any]]:
    """Calibration and metrics from the validation rows that set a threshold, of all these rows with
    their logits in nats. A `threshold` that is stated is taken as it is. Twins are always all.
    """
    chosen = for_calibration(logits, rows, rule.max_fpr)
    twins = of_twins(logits, rows)
    calibration = calibrate(*chosen, rule.max_fpr, threshold, twins, rule.max_fpr_twins)
    return calibration, validation_metrics(*chosen, calibration) | twin_metrics(twins, calibration)


def recalibrate(job: Job, threshold: float | None = None, by: ThresholdBy = "rule") -> int:
    """Make the card's calibration and its metrics anew; the weights stay. For the rates of the
    job's rule, or for a `threshold` that is stated; `by` says who wants it. Returns on how many
    validation rows. Raises GuardError where predictions are missing, or too few for the rate, or
    where the rate changes whether own rows decide, by which a head was fitted.
    """
    card = read_card(job.folder)
    retrain = f"Run `{card.retrain} FORCE=1`"
    rows, logits = _kept(job, "validation", retrain)
    is_head = METHODS[job.method].acts_from == "output" or HEAD in card.files
    if is_head or job.recipe.kind == "encoder":
        _check_same_rows_decide(job, card, rows)
    check_rows(rows, job.rule, where=job.data / "validation.jsonl")
    calibration, metrics = calibrated(logits, rows, job.rule, threshold)
    tested, test_logits = _kept(job, "test", retrain)
    test = twin_metrics(of_twins(test_logits, tested), calibration)
    changed = {
        **vars(replace(calibration, coverage=card.coverage)),
        "max_fpr": job.rule.max_fpr,
        "max_fpr_twins": job.rule.max_fpr_twins,
        "threshold_by": by,
        "metrics": card.metrics | {"validation": metrics, "test": test},
    }
    register(job, job.folder, "found before it was calibrated")
    card.model_copy(update=changed).save(job.folder)
    register(job, job.folder, f"calibrated: threshold {calibration.threshold:.3f}")
    return int(metrics["n"])


def _kept(job: Job, split: Split, retrain: str) -> tuple[list[Example], list[float]]:
    """The rows of a split and their logits. Raises GuardError for a row of which none was kept."""
    rows = read_examples(job.data / f"{split}.jsonl")
    predictions = read_predictions(job.folder, split, retrain)
    missing = [row.id for row in rows if row.id not in predictions]
    if missing:
        problem = f"no prediction for {len(missing)} of {len(rows)} {split} rows"
        where = job.folder / PREDICTIONS
        raise GuardError(problem, where=where, got=missing[0], remedy=retrain)
    return rows, [predictions[row.id] for row in rows]


def _check_same_rows_decide(job: Job, card: Card, rows: Sequence[LabelledRow]) -> None:
    """Raise GuardError if the rule's current max_fpr would have a head fitted to other rows."""
    own_decided = own_rows_decide(rows, card.max_fpr)
    if own_rows_decide(rows, job.rule.max_fpr) != own_decided:
        problem = "this max_fpr selects other validation rows than the weights were fitted for"
        got = f"max_fpr {job.rule.max_fpr}, before {card.max_fpr}"
        raise GuardError(problem, where=job.folder, got=got, remedy=f"Run `{card.retrain} FORCE=1`")


def calibrate_rules(
    selection: str,
    recipe: Recipe,
    methods: Sequence[str],
    runs: Runs,
    *,
    max_fpr: float | None = None,
    threshold: float | None = None,
) -> None:
    """Choose the thresholds of the rules' trained weights, of seed 0, and print what that changes:
    for a rate, as stated, or, without both, by the rule's file. Raises GuardError where a rule has
    no weights by any of the methods, or a threshold cannot be chosen; what was done before stands.
    """
    builder = prompt_builder(recipe)
    for name in rule_names(selection):
        rule = load_rule(name)
        jobs = [Job(rule, recipe, method, 0, builder, runs) for method in methods]
        trained = [job for job in jobs if job.folder.is_dir()]
        if not trained:
            wanted = f"make train RULE={name} MODEL={recipe.name}"
            problem = "the rule has no weights to calibrate"
            where = runs.adapter(recipe.name, name, "").parent
            got = ", ".join(methods)
            remedy = f"Run `{wanted}`"
            raise GuardError(problem, where=where, got=got, remedy=remedy)
        for job in trained:
            print(_changed(job, max_fpr, threshold), flush=True)


def _changed(job: Job, max_fpr: float | None, threshold: float | None) -> str:
    """Give the job's weights another threshold; what that changes, in lines."""
    before = load_card(job.folder)
    check_rule(before, job.rule.id, job.folder)
    by: ThresholdBy = "rule"
    rule = job.rule
    if threshold is not None:
        by, rule = "threshold", rule.balanced
    elif max_fpr is not None:
        by, rule = "max_fpr", rule.model_copy(update={"max_fpr": max_fpr})
    recalibrate(replace(job, rule=rule), threshold, by)
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
    return f"{wanted_rate(card)}, {by_whom}"


def wanted_rate(stated: Rule | Card) -> str:
    wanted = "balanced"
    if stated.max_fpr is not None:
        wanted = f"for at most {100 * stated.max_fpr:g} % false positives"
    if stated.max_fpr_twins is not None:
        wanted += f", at most {100 * stated.max_fpr_twins:g} % of twins"
    return wanted


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
    parser = argparse.ArgumentParser(
        prog="python -m train.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rule", required=True, help="rules separated by commas, or 'all'")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    parser.add_argument("--method", help="a method of the recipe (default: all that are trained)")
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
    calibrate_rules(
        arguments.rule,
        recipe,
        methods,
        Runs(),
        max_fpr=arguments.max_fpr,
        threshold=arguments.threshold,
    )


if __name__ == "__main__":
    main()
