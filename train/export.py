"""The folder of finished weights: their files, the card, the predictions, the stamp. Knows nothing
of training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from guard.coverage import Coverage
from guard.errors import GuardError
from guard.layout import is_current, mark_current
from guard.machine.provenance import versions
from guard.rule import Rule
from guard.verdict import Calibration
from guard.weights.card import CARD, LEFT_OUT, VERSION, Card, file_digests, load_card, read_card
from guard.weights.predictions import write_predictions
from guard.weights.version_zero import card_of_reader, identity_of
from serve.registry.registry import Registry, publishing, user_name
from train.job import Job
from train.methods import Trained

PART = "export"


def export(
    job: Job,
    trained: Trained,
    predictions: Sequence[tuple[str, str, float]],
    calibration: Calibration,
    metrics: dict[str, Any],
    covered: Coverage | None,
) -> None:
    """Write the job's folder, whole or not at all. It is built in the scratch folder and then takes
    its place; both are versions of the registry (`_replace`). `predictions` are rows' ids, splits
    and logits (nats, uncalibrated); of test rows from the method's reference.
    """
    part = job.scratch / PART
    shutil.rmtree(part, ignore_errors=True)
    trained.save(part)
    write_predictions(part, predictions)
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
    if isinstance(content, dict) and set(content) | LEFT_OUT != {*Card.model_fields, VERSION}:
        return ""
    try:
        load_card(folder)
    except GuardError as error:
        return error.problem
    return ""


def _replace(job: Job, part: Path) -> None:
    """Put `part` in the place of the job's folder. Both are versions of the registry first; what
    another version of this program wrote, of whose card the keys are others, lies on as
    METHOD.older.
    """
    register(job, job.folder, "found beside its successor")
    register(job, part, "trained")
    if job.folder.exists():
        older = job.folder.with_name(f"{job.folder.name}.older")
        if not _has_todays_card(job.folder) and not damage_of(job.folder):
            shutil.rmtree(older, ignore_errors=True)
            job.folder.rename(older)
        shutil.rmtree(job.folder, ignore_errors=True)
    part.rename(job.folder)


def register(job: Job, folder: Path, note: str) -> None:
    """Make whole weights of the job a version of the registry, if they may be served: they are of
    seed 0 and of no study.
    """
    if job.seed or job.of_study or not _has_todays_card(folder):
        return
    registry, reader, card = Registry(job.runs), job.recipe.reader_folder, load_card(folder)
    if reader is not None and card.worse_than_reader and read_card(reader).method == job.method:
        zero = card_of_reader(read_card(reader), job.rule.id, job.rule.text("reader"))
        registry.register_zero(zero, reader, actor=user_name(), note="better than what is trained")
    why = _held_back(job.rule, card)
    version = registry.register(folder, actor=user_name(), note=note, follows_zero=not why)
    if registry.aliases(version.rule).get("candidate") == version.id:
        told = f"{version.id[:12]} is not served{why}: {publishing(version.rule)}"
        print(f"{job.name}: {told}", flush=True)


def _held_back(rule: Rule, card: Card) -> str:
    """Why the weights replace no version 0 by themselves, in words; else empty."""
    if rule.approvals > 1:
        return f", it needs {rule.approvals} approvals"
    rate, largest = card.twin_rate("test"), rule.max_fpr_twins
    if rate is None or largest is None or rate.is_within(largest):
        return ""
    return f", it flags {rate} of twins, max_fpr_twins {largest:g}"


def _has_todays_card(folder: Path) -> bool:
    """Whether the folder has whole weights and a card of this program's."""
    try:
        load_card(folder)
    except GuardError:
        return False
    return True


def _card(
    job: Job,
    files: dict[str, str],
    calibration: Calibration,
    metrics: dict[str, Any],
    covered: Coverage | None,
) -> Card:
    identity = identity_of(job.recipe, job.builder, job.method, job.rule.id, job.rule_text)
    return Card(
        **identity | {"base_revision": job.base_revision},
        reads=job.reads,
        data_hash=job.data_hash,
        test_sha256=job.test_sha256,
        seed=job.seed,
        recipe=job.recipe.training_settings(job.method),
        versions=versions(),
        metrics=metrics,
        **vars(replace(calibration, coverage=covered)),
        max_fpr=job.rule.max_fpr,
        max_fpr_twins=job.rule.max_fpr_twins,
        composed_of=job.composed_of,
        files=files,
    )
