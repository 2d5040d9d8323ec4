"""Another threshold for trained weights, from the logits that were kept.

Knows nothing of tensors.
"""

from __future__ import annotations

from guard.card import read_card
from guard.errors import GuardError
from guard.example import read_examples
from guard.own_rows import for_calibration
from guard.predictions import PREDICTIONS, read_predictions
from train.calibration.calibrate import calibrate
from train.calibration.validation import validation_metrics
from train.job import Job
from train.picture import draw_reliability


def recalibrate(job: Job) -> int:
    """Make the card's calibration and validation metrics anew; the weights stay.

    For the rule's max_fpr as it is now; returns on how many validation rows. Raises GuardError
    where predictions are missing, or too few for the rate.
    """
    card = read_card(job.folder)
    retrain = f"Run `{card.retrain} FORCE=1`"
    rows = read_examples(job.data / "validation.jsonl")
    predictions = read_predictions(job.folder, "validation", retrain)
    missing = [row.id for row in rows if row.id not in predictions]
    if missing:
        problem = f"no prediction for {len(missing)} of {len(rows)} validation rows"
        where = job.folder / PREDICTIONS
        raise GuardError(problem, where=where, got=missing[0], remedy=retrain)
    logits, labels = for_calibration(
        [predictions[row.id] for row in rows],
        [row.label for row in rows],
        [row.is_generated for row in rows],
        job.rule.max_fpr,
    )
    calibration = calibrate(logits, labels, job.rule.max_fpr)
    metrics = validation_metrics(logits, labels, calibration)
    title = f"{job.name}, {metrics['n']} validation rows"
    draw_reliability(metrics["reliability"], title, job.folder)
    changed = {
        "temperature": calibration.temperature,
        "bias": calibration.bias,
        "threshold": calibration.threshold,
        "uncertainty_band": calibration.uncertainty_band,
        "max_fpr": job.rule.max_fpr,
        "metrics": card.metrics | {"validation": metrics},
    }
    card.model_copy(update=changed).save(job.folder)
    return len(labels)
