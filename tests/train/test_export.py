"""The adapter folder as others find it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from guard.layout import is_current
from guard.method import PEFT_WEIGHTS
from guard.rule import text_hash
from guard.verdict import Calibration
from guard.weights.card import CARD, load_card
from tests.train.conftest import ADAPTERS, RULE, MakeJob
from train.adapter.predict import verdict_logits
from train.adapter.trained import TrainedAdapter
from train.adapter.trl import fit
from train.calibration.validation import validation_metrics
from train.examples import load
from train.export import export, finish_export
from train.job import Job

pytestmark = pytest.mark.slow

METRICS = validation_metrics([-1.0, -0.5, 0.5, 1.0] * 8, [0, 1, 0, 1] * 8, Calibration())


def exported(job: Job) -> PeftModel:
    rows = load(job.data, RULE, job.recipe, job.builder)
    model = fit(job, rows)
    seen = (*rows.validation, *rows.test)
    logits = verdict_logits(model, [row.prompt for row in seen], job.builder)
    export(job, TrainedAdapter(model, job), seen, logits, Calibration(1.5, 0.4), METRICS, None)
    return model


@pytest.mark.parametrize("method", ADAPTERS)
def test_plain_peft_loads_the_folder_and_gives_the_logits_written_there(
    make_job: MakeJob, toy_base: Path, method: str
) -> None:
    job = make_job(method, max_steps=12)
    exported(job)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(toy_base), job.folder
    ).eval()
    rows = load(job.data, RULE, job.recipe, job.builder)
    written = [
        json.loads(line) for line in (job.folder / "predictions.jsonl").read_text().splitlines()
    ]
    for row, expected in list(zip((*rows.validation, *rows.test), written, strict=True))[::7]:
        with torch.inference_mode():
            log_p = (
                model(input_ids=torch.tensor([row.prompt.token_ids])).logits[0, -1].log_softmax(0)
            )
        assert expected["id"] == row.id
        assert expected["logit"] == pytest.approx(
            float(log_p[job.builder.yes_id] - log_p[job.builder.no_id]), abs=1e-4
        )


def test_the_folder_holds_peft_s_files_the_card_the_predictions_and_the_stamp(
    make_job: MakeJob,
) -> None:
    job = make_job("alora", max_steps=1)
    exported(job)
    assert sorted(path.name for path in job.folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "card.json",
        "predictions.jsonl",
        "reliability.png",
        "stage.json",
    ]
    card = load_card(job.folder)
    assert (card.rule, card.rule_hash, card.method, card.seed) == (
        "toy",
        text_hash(RULE.text()),
        "alora",
        0,
    )
    assert card.prompt_hash == job.builder.hash
    assert card.calibration == Calibration(1.5, 0.4)
    assert card.base_revision == job.recipe.base_revision
    assert {"torch", "transformers", "peft", "trl"} <= set(card.versions)
    assert is_current(job.folder, job.inputs)
    assert not job.scratch.exists()


def test_the_adapter_that_is_replaced_is_kept_beside_it(make_job: MakeJob) -> None:
    for steps in (1, 2, 3):
        exported(make_job(max_steps=steps))
        job = make_job(max_steps=steps)
    before = job.folder.parent / "before" / job.folder.name
    assert [
        load_card(folder).recipe["trainer"]["max_steps"] for folder in (before, job.folder)
    ] == [2, 3]


def test_a_damaged_adapter_does_not_take_the_place_of_the_good_one_before_it(
    make_job: MakeJob,
) -> None:
    for steps in (1, 2):
        exported(make_job(max_steps=steps))
    job = make_job(max_steps=3)
    (job.folder / PEFT_WEIGHTS).write_bytes(b"torn")
    exported(job)
    before = job.folder.parent / "before" / job.folder.name
    assert [
        load_card(folder).recipe["trainer"]["max_steps"] for folder in (before, job.folder)
    ] == [1, 3]


def test_good_weights_whose_card_is_of_another_version_are_kept_too(make_job: MakeJob) -> None:
    exported(make_job(max_steps=1))
    job = make_job(max_steps=2)
    card = json.loads((job.folder / CARD).read_text())
    (job.folder / CARD).write_text(json.dumps(card | {"of_another_version": 1}))
    exported(job)
    before = job.folder.parent / "before" / job.folder.name
    assert json.loads((before / CARD).read_text())["of_another_version"] == 1


def test_what_a_killed_run_had_written_whole_takes_its_place_if_it_is_of_these_inputs(
    make_job: MakeJob,
) -> None:
    job = make_job(max_steps=1)
    exported(job)
    job.scratch.mkdir()
    job.folder.rename(job.scratch / "export")
    finish_export(make_job(max_steps=2))
    assert not job.folder.exists()
    finish_export(job)
    assert load_card(job.folder) and is_current(job.folder, job.inputs)
    finish_export(job)  # where nothing is left to be done
    assert load_card(job.folder)


def test_the_base_is_called_what_the_recipe_calls_it_and_not_where_it_lay_here(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(max_steps=1)
    base = Path(job.recipe.base)
    monkeypatch.setattr(
        "guard.recipe.MODELS", base.parent / "recipes" / "models"
    )  # the checkout is where the toy base lies
    object.__setattr__(job, "recipe", job.recipe.model_copy(update={"base": base.name}))
    exported(job)
    assert (
        json.loads((job.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        == base.name
    )
    for path in job.folder.iterdir():
        assert str(base.parent).encode() not in path.read_bytes(), path.name


def test_an_older_adapter_is_replaced_whole(make_job: MakeJob) -> None:
    job = make_job(max_steps=1)
    job.folder.mkdir(parents=True)
    (job.folder / "left_over.txt").write_text("of an older version")
    exported(job)
    assert not (job.folder / "left_over.txt").exists()


def test_predictions_that_do_not_cover_the_rows_are_a_mistake_and_leave_the_old_adapter(
    make_job: MakeJob,
) -> None:
    job = make_job(max_steps=1)
    exported(job)
    before = (job.folder / "stage.json").read_bytes()
    rows = load(job.data, RULE, job.recipe, job.builder)
    job.open_scratch()
    with pytest.raises(ValueError, match="zip"):
        export(
            job, TrainedAdapter(fit(job, rows), job), rows.test, [0.0], Calibration(), METRICS, None
        )
    assert (job.folder / "stage.json").read_bytes() == before
