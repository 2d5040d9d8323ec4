"""The folder of finished weights: their files, the card, the predictions, the stamp. Knows nothing
of training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guard.coverage import Coverage
from guard.errors import GuardError
from guard.layout import is_current, mark_current
from guard.machine.provenance import versions
from guard.rule import text_hash
from guard.verdict import Calibration
from guard.weights.card import CARD, VERSION, Card, file_digests, load_card
from guard.weights.head import answer_hash
from guard.weights.predictions import write_predictions
from train.examples import Row
from train.job import Job
from train.methods import Trained

BEFORE = "before"
PART = "export"


def export(
    job: Job,
    trained: Trained,
    rows: Sequence[Row],
    logits: Sequence[float],
    calibration: Calibration,
    metrics: dict[str, Any],
    covered: Coverage | None,
) -> None:
    """Write the job's folder, whole or not at all. It is built in the scratch folder and then takes
    its place. The one that it replaces is kept in the folder `before` beside it, for `make
    compare`, unless it is damaged. `logits` (nats, uncalibrated) are those of `rows`, in the same
    order; of test rows from the method's reference.
    """
    part = job.scratch / PART
    shutil.rmtree(part, ignore_errors=True)
    trained.save(part)
    predictions = zip(rows, logits, strict=True)
    write_predictions(part, [(row.id, row.split, logit) for row, logit in predictions])
    _card(job, file_digests(part, job.method), calibration, metrics, covered).save(part)
    mark_current(part, job.inputs)
    _replace(job.folder, part)
    job.close_scratch()


def finish_export(job: Job) -> None:
    """Put the job's folder in its place if a run was killed that had written it whole."""
    part = job.scratch / PART
    if is_current(part, job.inputs):
        _replace(job.folder, part)


def damage_of(folder: Path) -> str:
    """What is missing, torn or edited of finished weights; empty if nothing is. A card with other
    keys than today's is no damage: they are good weights of another version.
    """
    try:
        content = json.loads((folder / CARD).read_bytes())
    except (OSError, ValueError) as error:
        return f"{CARD} cannot be read: {error}"
    if isinstance(content, dict) and set(content) != {*Card.model_fields, VERSION}:
        return ""
    try:
        load_card(folder)
    except GuardError as error:
        return error.problem
    return ""


def _replace(folder: Path, part: Path) -> None:
    """Put `part` in the place of the folder, which moves to where `make compare` finds it; a
    damaged one takes no good one's place there.
    """
    if folder.exists():
        before = folder.parent / BEFORE / folder.name
        if damage_of(folder):
            shutil.rmtree(folder)
        else:
            shutil.rmtree(before, ignore_errors=True)
            before.parent.mkdir(exist_ok=True)
            folder.rename(before)
    part.rename(folder)


def _card(
    job: Job,
    files: dict[str, str],
    calibration: Calibration,
    metrics: dict[str, Any],
    covered: Coverage | None,
) -> Card:
    return Card(
        rule=job.rule.id,
        rule_text=job.rule_text,
        rule_hash=text_hash(job.rule_text),
        prompt_hash=job.builder.hash,
        answer_hash=answer_hash(),
        reads=job.reads,
        method=job.method,
        model=job.recipe.name,
        base=job.recipe.base,
        base_revision=job.base_revision,
        data_hash=job.data_hash,
        test_sha256=job.test_sha256,
        seed=job.seed,
        recipe=job.recipe.training_settings(job.method),
        versions=versions(),
        metrics={"validation": metrics},
        temperature=calibration.temperature,
        bias=calibration.bias,
        threshold=calibration.threshold,
        uncertainty_band=calibration.uncertainty_band,
        coverage=covered,
        max_fpr=job.rule.max_fpr,
        files=files,
    )
