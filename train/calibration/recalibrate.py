"""Another threshold for trained weights, from the logits that were kept.

Knows nothing of tensors.
"""

from __future__ import annotations

from guard.calibration_rows import for_calibration, own_rows_decide
from guard.card import read_card
from guard.errors import GuardError
from guard.example import read_examples
from guard.predictions import PREDICTIONS, read_predictions
from train.calibration.calibrate import calibrate
from train.calibration.validation import validation_metrics
from train.job import Job
from train.picture import draw_reliability


def recalibrate(job: Job) -> int:
    """Make the card's calibration and validation metrics anew; the weights stay.

    For the rule's max_fpr as it is now; returns on how many validation rows. Raises GuardError
    where predictions are missing, or too few for the rate, or where the rate changes whether own
    rows decide, by which a head is fitted.
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
    labels = [row.label for row in rows]
    is_generated = [row.is_generated for row in rows]
    own_decided = own_rows_decide(labels, is_generated, card.max_fpr)
    if own_rows_decide(labels, is_generated, job.rule.max_fpr) != own_decided:
        problem = (
            "with this max_fpr a threshold is for other validation rows than these weights are"
        )
        got = f"max_fpr {job.rule.max_fpr}, before {card.max_fpr}"
        raise GuardError(problem, where=job.folder, got=got, remedy=retrain)
    of_rows = [predictions[row.id] for row in rows]
    logits, labels = for_calibration(of_rows, labels, is_generated, job.rule.max_fpr)
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
