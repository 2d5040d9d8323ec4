"""The adapter folder as others find it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM

from guard.layout import is_current
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS
from guard.rule import text_hash
from guard.verdict import Calibration
from guard.weights.card import CARD, load_card
from tests.train.conftest import ADAPTERS, RULE, MakeJob, RankedWeights, data, finish_at_once
from train.adapter.trained import TrainedAdapter, verdict_logits
from train.adapter.trl import fit
from train.calibration.validation import validation_metrics
from train.export import export, finish_export
from train.job import Job

METRICS = validation_metrics([-1.0, -0.5, 0.5, 1.0] * 8, [0, 1, 0, 1] * 8, Calibration())


def of_steps(make_job: MakeJob, steps: int) -> Job:
    job = make_job(max_steps=steps)
    finish_at_once(job)
    return job


def before(job: Job) -> Path:
    return job.folder.parent / "before" / job.folder.name


def steps_of(folder: Path) -> int:
    steps: int = load_card(folder).recipe["trainer"]["max_steps"]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTERS)
def test_the_folder_is_complete_and_plain_peft_gives_the_logits_written_there(
    make_job: MakeJob, toy_base: Path, method: str, monkeypatch: MonkeyPatch
) -> None:
    """The base is called what the recipe calls it, and not where it lay here."""
    job = make_job(method, max_steps=6)
    base = Path(job.recipe.base)
    # The checkout is where the toy base lies.
    monkeypatch.setattr("guard.recipe.MODELS", base.parent / "recipes" / "models")
    object.__setattr__(job, "recipe", job.recipe.model_copy(update={"base": base.name}))
    rows = data(job)
    trained = fit(job, rows)
    seen = (*rows.validation, *rows.test)
    logits = verdict_logits(trained, [row.prompt for row in seen], job.builder)
    export(job, TrainedAdapter(trained, job), seen, logits, Calibration(1.5, 0.4), METRICS, None)
    names = [PEFT_CONFIG, PEFT_WEIGHTS, CARD, "predictions.jsonl", "stage.json"]
    assert sorted(path.name for path in job.folder.iterdir()) == names
    config = json.loads((job.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base.name
    for path in job.folder.iterdir():
        assert str(base.parent).encode() not in path.read_bytes(), path.name
    assert is_current(job.folder, job.inputs) and not job.scratch.exists()
    card = load_card(job.folder)
    found = (card.rule, card.rule_hash, card.method, card.seed)
    assert found == ("toy", text_hash(RULE.text()), method, 0)
    assert (card.prompt_hash, card.calibration) == (job.builder.hash, Calibration(1.5, 0.4))
    assert card.base_revision == job.recipe.base_revision
    assert {"torch", "transformers", "peft", "trl"} <= set(card.versions)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_base), job.folder)
    lines = (job.folder / "predictions.jsonl").read_text().splitlines()
    for row, line in list(zip(seen, lines, strict=True))[::7]:
        with torch.inference_mode():
            last = model.eval()(input_ids=torch.tensor([row.prompt.token_ids])).logits[0, -1]
        log_p = last.log_softmax(0)
        expected = float(log_p[job.builder.yes_id] - log_p[job.builder.no_id])
        written = json.loads(line)
        assert written["id"] == row.id
        assert written["logit"] == pytest.approx(expected, abs=1e-4)


def test_the_good_adapter_that_is_replaced_is_kept_beside_it(make_job: MakeJob) -> None:
    for steps in (1, 2, 3):
        job = of_steps(make_job, steps)
    assert [steps_of(folder) for folder in (before(job), job.folder)] == [2, 3]
    (job.folder / PEFT_WEIGHTS).write_bytes(b"torn")
    of_steps(make_job, 4)  # a damaged one takes no good one's place
    assert [steps_of(folder) for folder in (before(job), job.folder)] == [2, 4]
    card = json.loads((job.folder / CARD).read_text())
    (job.folder / CARD).write_text(json.dumps(card | {"of_another_version": 1}))
    of_steps(make_job, 5)
    assert json.loads((before(job) / CARD).read_text())["of_another_version"] == 1


def test_a_killed_run_s_whole_folder_of_these_inputs_is_taken(make_job: MakeJob) -> None:
    job = of_steps(make_job, 1)
    job.scratch.mkdir()
    job.folder.rename(job.scratch / "export")
    finish_export(make_job(max_steps=2))
    assert not job.folder.exists()
    for _ in range(2):  # and again, where nothing is left to be done
        finish_export(job)
        assert load_card(job.folder) and is_current(job.folder, job.inputs)


def test_an_older_adapter_is_replaced_whole_or_not_at_all(make_job: MakeJob) -> None:
    job = make_job()
    job.folder.mkdir(parents=True)
    (job.folder / "left_over.txt").write_text("of an older version")
    finish_at_once(job)
    assert not (job.folder / "left_over.txt").exists()
    stamp = (job.folder / "stage.json").read_bytes()
    rows = data(job)
    with pytest.raises(ValueError, match="zip"):  # predictions that do not cover the rows
        export(job, RankedWeights(rows), rows.test, [0.0], Calibration(), METRICS, None)
    assert (job.folder / "stage.json").read_bytes() == stamp
