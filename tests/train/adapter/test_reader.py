"""An aLoRA that starts as its base's reader, with a head fitted beside the reader's answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from pytest import MonkeyPatch
from safetensors.numpy import load_file, save_file
from sklearn.metrics import roc_auc_score

from guard.errors import GuardError
from guard.method import HEAD, PEFT_WEIGHTS
from guard.recipe import Recipe
from guard.rule import text_hash
from guard.verdict import Calibration
from guard.weights.card import file_digests, load_card
from guard.weights.head import Head
from guard.weights.predictions import read_predictions
from tests.train import conftest as toys
from train.adapter.load import check_adapter
from train.adapter.reader import day_zero_logits
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter, save_adapter
from train.base import load_served_base
from train.examples import Row
from train.export import _card
from train.job import Job
from train.prefix import trainer as shared_prefix
from train.prefix.member import CHECKPOINT, Member
from train.prefix.readout import START
from train.run import finish, outdated_jobs

pytestmark = pytest.mark.slow

NATS = 1e-3
CPU = torch.device("cpu")


def save_reader(job: Job, folder: Path, seed: int = 0) -> Path:
    """Random weights and a random head, in the files of a reader."""
    generator = torch.Generator().manual_seed(seed)
    model = get_peft_model(load_served_base(job.recipe, CPU), lora_config(job))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    save_adapter(model, job.recipe, folder)
    head_weight = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
    save_file(Head(head_weight, 0.5).tensors(), folder / HEAD)
    _card(job, file_digests(folder, "alora"), Calibration(), {}, None).save(folder)
    return folder


def from_reader(job: Job, folder: Path) -> Job:
    folder = save_reader(job, folder)
    settings = job.settings.model_copy(update={"start": "reader", "head": {}})
    return toys.with_recipe(job, reader=str(folder), methods={"alora": settings})


def plain_logits(
    recipe: Recipe, rows: tuple[Row, ...], begun: dict[str, Any] | None = None
) -> list[float]:
    """By the reader's files alone, or with the head that training began with; in plain PEFT, prompt
    by prompt.
    """
    model = PeftModel.from_pretrained(load_served_base(recipe, CPU), str(recipe.reader)).eval()
    head = Head.of_tensors(load_file(Path(str(recipe.reader)) / HEAD), "", "")
    if begun:
        head = Head(begun["weight"].numpy(), float(begun["bias"]))
    logits: list[float] = []
    for row in rows:
        ids = torch.tensor([row.prompt.token_ids])
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        logits.append(float(states[0, -1].numpy() @ head.weight) + head.bias)
        if begun:
            logits[-1] += begun["word_logits"][row.id]
    return logits


def trained(job: Job) -> TrainedAdapter:
    """Present until the next is asked for, which never is."""
    adapter = next(shared_prefix.fit([(job, toys.data(job))]))
    assert isinstance(adapter, TrainedAdapter)
    return adapter


def test_it_starts_as_plain_peft_with_the_reader_s_files(
    make_job: toys.MakeJob, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    job = from_reader(make_job("alora", max_steps=1), tmp_path / "reader")
    rows = toys.data(job)
    assert job.rule_text == toys.RULE.text("reader") != toys.RULE.title
    expected = plain_logits(job.recipe, rows.validation)
    assert np.ptp(expected) > 1
    records = toys.calls_of(monkeypatch, Member, "record")
    trained(job)
    (_, start), (_, end) = records
    begun = torch.load(job.scratch / START, weights_only=True)
    assert start == pytest.approx(plain_logits(job.recipe, rows.validation, begun), abs=NATS)
    assert np.abs(np.subtract(end, start)).max() > 10 * NATS
    # A head that reads the rows' words too knows more than this reader, whose weights are random.
    labels = [row.label for row in rows.validation]
    assert roc_auc_score(labels, expected) < 0.8 < roc_auc_score(labels, start)
    # Another method's prompts say something else of the rule; the reader is told all of it.
    other = toys.data(toys.with_settings(job, start=None)).validation
    assert other[0].prompt != rows.validation[0].prompt
    assert day_zero_logits(job, other) == pytest.approx(expected, abs=NATS)


def test_a_training_that_only_loses_leaves_what_it_began_with(
    make_job: toys.MakeJob, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    job = from_reader(make_job("alora", max_steps=3), tmp_path / "reader")
    toys.record_losses(monkeypatch, float)
    adapter = trained(job)
    begun = torch.load(job.scratch / START, weights_only=True)
    adapter.save(tmp_path / "trained")
    kept, own = (load_file(tmp_path / folder / PEFT_WEIGHTS) for folder in ("reader", "trained"))
    assert kept.keys() == own.keys()
    assert all((kept[key] == own[key]).all() for key in kept)
    assert (load_file(tmp_path / "trained" / HEAD)["weight"] == begun["weight"].numpy()).all()


def test_an_interrupted_run_ends_with_the_same_bytes(
    make_job: toys.MakeJob, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    job = from_reader(make_job("alora", max_steps=8, save_steps=3), tmp_path / "reader")
    whole = toys.weights(trained(job).model)
    job.forget()
    update = Member.update

    def killed(member: Member, loss: float) -> None:
        if member.step == 4:
            raise KeyboardInterrupt
        update(member, loss)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Member, "update", killed)
        trained(job)
    assert (job.scratch / CHECKPOINT).is_file()
    assert toys.largest_difference(toys.weights(trained(job).model), whole) == 0


def test_the_card_says_what_training_brought(make_job: toys.MakeJob, tmp_path: Path) -> None:
    job = from_reader(make_job("alora", max_steps=24), tmp_path / "reader")
    rows = toys.data(job)
    finish(job, rows, trained(job))
    card = load_card(job.folder)
    assert card.rule_hash == text_hash(toys.RULE.text("reader"))
    assert card.recipe["start"] == load_card(tmp_path / "reader").version
    brought = card.metrics["day_zero"]
    assert brought["test"]["reader"]["auroc"] < 0.8 < brought["test"]["trained"]["auroc"]
    assert brought["loss_above_reader_ci95"][1] < 0
    assert not card.worse_than_reader
    kept = read_predictions(job.folder, "day zero test", "")
    expected = dict(zip([row.id for row in rows.test], plain_logits(job.recipe, rows.test)))  # noqa: B905
    assert kept == pytest.approx(expected, abs=NATS)
    assert (
        toys.with_recipe(job, reader=str(save_reader(job, tmp_path / "b", seed=1))).inputs
        != job.inputs
    )


def test_a_reader_that_an_adapter_cannot_start_as_is_refused(
    make_job: toys.MakeJob, tmp_path: Path
) -> None:
    folder = tmp_path / "reader"
    job = from_reader(make_job("alora"), folder)
    check_adapter(job)
    for lora, told in (
        ({"r": 8}, r"another r \(got 8, the reader 16\)"),
        ({"lora_alpha": 64}, r"another lora_alpha \(got 64, the reader 32\)"),
        ({"target_modules": ["q_proj"]}, r"another target_modules \(got {'q_proj'}, the reader"),
    ):
        with pytest.raises(GuardError, match=told):
            check_adapter(toys.with_lora(job, **lora))
    card = load_card(folder)
    for field, told in (("base_revision", "another base"), ("prompt_hash", "another prompt")):
        card.model_copy(update={field: "other"}).save(folder)
        with pytest.raises(GuardError, match=told):
            check_adapter(job)
    (folder / HEAD).unlink()
    card.model_copy(update={"files": file_digests(folder, "alora")}).save(folder)
    with pytest.raises(GuardError, match="a head without words"):
        check_adapter(job)


def test_rows_say_of_the_rule_what_the_method_reads(make_job: toys.MakeJob, tmp_path: Path) -> None:
    job = from_reader(make_job("alora"), tmp_path / "reader")
    lora = job.settings.model_copy(update={"start": None, "head": None})
    job = toys.with_recipe(job, methods=job.recipe.methods | {"lora": lora})
    jobs = [replace(job, method=method) for method in ("lora", "alora")]
    (_, of_lora), (_, of_alora) = outdated_jobs(jobs, force=True)[0]
    assert of_lora.test[0].prompt != of_alora.test[0].prompt == toys.data(job).test[0].prompt
