"""The adapter folder: PEFT's own files, the card, the predictions, the stamp. Knows nothing of training."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel

from guard.card import Card, weights_sha256
from guard.layout import mark_current
from guard.predictions import write_predictions
from guard.provenance import versions
from guard.rule import text_hash
from guard.verdict import Calibration
from train.examples import Row
from train.job import Job
from train.picture import draw_reliability

BEFORE = "before"


def export(
    job: Job,
    model: PeftModel,
    rows: Sequence[Row],
    logits: Sequence[float],
    calibration: Calibration,
    metrics: dict[str, Any],
) -> None:
    """Write the job's adapter folder, whole or not at all: it is built in the scratch folder and then takes its place.

    The adapter that it replaces is kept in the folder `before` beside it, for `make compare`.
    `logits` (log P(yes) - log P(no), nats, uncalibrated) are those of `rows`, in the same order; of test rows through plain PEFT.
    """
    part = job.scratch / "export"
    shutil.rmtree(part, ignore_errors=True)
    _save_weights(model, part, base=job.recipe.base)
    write_predictions(
        part, [(row.id, row.split, logit) for row, logit in zip(rows, logits, strict=True)]
    )
    _card(job, weights_sha256(part), calibration, metrics).save(part)
    draw_reliability(metrics["reliability"], f"{job.name}, {metrics['n']} validation rows", part)
    mark_current(part, job.inputs)
    if job.folder.exists():
        before = job.folder.parent / BEFORE / job.folder.name
        shutil.rmtree(before, ignore_errors=True)
        before.parent.mkdir(exist_ok=True)
        job.folder.rename(before)
    part.rename(job.folder)
    job.close_scratch()


def _save_weights(model: PeftModel, folder: Path, *, base: str) -> None:
    # As the recipe names the base, so that no path of this machine stands in adapter_config.json.
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(
        str(folder), save_embedding_layers=False
    )  # "auto" would look the base up on the hub
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty template: card.json is the card


def _card(job: Job, weights: str, calibration: Calibration, metrics: dict[str, Any]) -> Card:
    return Card(
        rule=job.rule.id,
        rule_text=job.rule_text,
        rule_hash=text_hash(job.rule_text),
        prompt_hash=job.builder.hash,
        method=job.method,
        model=job.recipe.name,
        base=job.recipe.base,
        base_revision=job.base_revision,
        data_hash=job.data_hash,
        test_sha256=job.test_sha256,
        seed=job.seed,
        recipe=job.recipe.trains(job.method),
        versions=versions(),
        metrics={"validation": metrics},
        temperature=calibration.temperature,
        bias=calibration.bias,
        threshold=calibration.threshold,
        uncertainty_band=calibration.uncertainty_band,
        max_fpr=job.rule.max_fpr,
        weights_sha256=weights,
    )
