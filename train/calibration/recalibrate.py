"""A new threshold for trained weights, from their stored logits.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from guard.calibrate import calibrate
from guard.calibration_rows import check_rows_for_rate, for_calibration, own_rows_decide
from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.method import METHODS
from guard.weights.card import Card, ThresholdBy, read_card
from guard.weights.predictions import PREDICTIONS, read_predictions
from train.calibration.validation import validation_metrics
from train.job import Job
from train.picture import draw_reliability


def recalibrate(job: Job, threshold: float | None = None, by: ThresholdBy = "rule") -> int:
    """Make the card's calibration and validation metrics anew; the weights stay.

    For the max_fpr of the job's rule, or for a `threshold` that is stated; `by` says who wants it.
    Returns on how many validation rows. Raises GuardError where predictions are missing, or too few
    for the rate, or where the rate changes whether own rows decide, by which a head was fitted.
    """
    card = read_card(job.folder)
    retrain = f"Run `{card.retrain} FORCE=1`"
    validation = job.data / "validation.jsonl"
    rows = read_examples(validation)
    predictions = read_predictions(job.folder, "validation", retrain)
    missing = [row.id for row in rows if row.id not in predictions]
    if missing:
        problem = f"no prediction for {len(missing)} of {len(rows)} validation rows"
        where = job.folder / PREDICTIONS
        raise GuardError(problem, where=where, got=missing[0], remedy=retrain)
    labels = [row.label for row in rows]
    is_generated = [row.is_generated for row in rows]
    if METHODS[job.method].acts_from == "output" or job.recipe.kind == "encoder":
        _check_same_rows_decide(job, card, labels, is_generated)
    row_logits = [predictions[row.id] for row in rows]
    logits, labels = for_calibration(row_logits, labels, is_generated, job.rule.max_fpr)
    check_rows_for_rate(labels.count(0), job.rule.max_fpr, where=validation)
    calibration = calibrate(logits, labels, job.rule.max_fpr, threshold)
    metrics = validation_metrics(logits, labels, calibration)
    title = f"{job.name}, {metrics['n']} validation rows"
    draw_reliability(metrics["reliability"], title, job.folder)
    changed = {
        "temperature": calibration.temperature,
        "bias": calibration.bias,
        "threshold": calibration.threshold,
        "uncertainty_band": calibration.uncertainty_band,
        "max_fpr": job.rule.max_fpr,
        "threshold_by": by,
        "metrics": card.metrics | {"validation": metrics},
    }
    card.model_copy(update=changed).save(job.folder)
    return len(labels)


def _check_same_rows_decide(
    job: Job, card: Card, labels: Sequence[int], is_generated: Sequence[bool]
) -> None:
    """Raise GuardError if the rule's current max_fpr would have a head fitted to other rows."""
    own_decided = own_rows_decide(labels, is_generated, card.max_fpr)
    if own_rows_decide(labels, is_generated, job.rule.max_fpr) != own_decided:
        raise GuardError(
            "this max_fpr selects other validation rows than the weights were fitted for",
            where=job.folder,
            got=f"max_fpr {job.rule.max_fpr}, before {card.max_fpr}",
            remedy=f"Run `{card.retrain} FORCE=1`",
        )
