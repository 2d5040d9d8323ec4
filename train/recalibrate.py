"""Another threshold for a trained adapter, from the logits that were kept. Knows nothing of tensors."""

from __future__ import annotations

from guard.card import read_card
from guard.errors import GuardError
from guard.example import read_examples
from guard.predictions import PREDICTIONS, read_predictions
from train.calibrate import calibrate, validation_metrics
from train.job import Job
from train.picture import draw_reliability


def recalibrate(job: Job) -> None:
    """Make the card's calibration and validation metrics anew, for the rule's max_fpr as it is now; the weights stay.

    Raises GuardError where predictions are missing, or too few for the rate.
    """
    card = read_card(job.folder)
    again = f"Run `{card.retrain} FORCE=1`"
    rows, logits = (
        read_examples(job.data / "validation.jsonl"),
        read_predictions(job.folder, "validation", again),
    )
    if missing := [row.id for row in rows if row.id not in logits]:
        what = f"no prediction for {len(missing)} of {len(rows)} validation rows"
        raise GuardError(what, where=job.folder / PREDICTIONS, got=missing[0], remedy=again)
    validation, labels = [logits[row.id] for row in rows], [row.label for row in rows]
    calibration = calibrate(validation, labels, job.rule.max_fpr)
    metrics = validation_metrics(validation, labels, calibration)
    draw_reliability(
        metrics["reliability"], f"{job.name}, {metrics['n']} validation rows", job.folder
    )
    changed = {
        "temperature": calibration.temperature,
        "bias": calibration.bias,
        "threshold": calibration.threshold,
        "uncertainty_band": calibration.uncertainty_band,
        "max_fpr": job.rule.max_fpr,
        "metrics": card.metrics | {"validation": metrics},
    }
    card.model_copy(update=changed).save(job.folder)
