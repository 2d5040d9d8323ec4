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
from serve.registry.registry import Registry, user_name
from train.examples import Row
from train.job import Job
from train.methods import Trained

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
    its place. What it replaces is a version of the registry, as is what it leaves (seed 0),
    unless it is damaged. `logits` (nats, uncalibrated) are those of `rows`, in the same
    order; of test rows from the method's reference.
    """
    part = job.scratch / PART
    shutil.rmtree(part, ignore_errors=True)
    trained.save(part)
    predictions = zip(rows, logits, strict=True)
    write_predictions(part, [(row.id, row.split, logit) for row, logit in predictions])
    _card(job, file_digests(part, job.method), calibration, metrics, covered).save(part)
    mark_current(part, job.inputs)
    _replace(job, part)
    job.close_scratch()


def finish_export(job: Job) -> None:
    """Put the job's folder in its place if a run was killed that had written it whole."""
    part = job.scratch / PART
    if is_current(part, job.inputs):
        _replace(job, part)


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


def _replace(job: Job, part: Path) -> None:
    """Put `part` in the place of the job's folder. Both are registered: nothing is lost."""
    register(job, "found beside its successor")
    if job.folder.exists():
        shutil.rmtree(job.folder)
    part.rename(job.folder)
    register(job, "trained")


def register(job: Job, note: str) -> None:
    """Make the weights in the job's folder a version of the registry: those that may be served, of
    seed 0 and no study, that are whole and have a card of today's keys.
    """
    if job.seed or job.of_study:
        return
    try:
        load_card(job.folder)
    except GuardError:
        return
    registry = Registry(job.runs)
    version = registry.register(job.folder, actor=user_name(), note=note)
    if registry.aliases(version.rule).get("candidate") == version.id:
        serve_it = f"to serve it: make publish RULE={job.rule.id}"
        print(f"{job.name}: {version.id[:12]} is a candidate; {serve_it}", flush=True)


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
