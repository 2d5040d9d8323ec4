"""One adapter: its loss, what changes, and that the same seed gives the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.home import ROOT
from tests.train.conftest import MakeJob, calls_of, data, weights, with_settings
from train.adapter.steps import EarlyStopping
from train.adapter.trl import VerdictTrainer, fit, whole_checkpoint

pytestmark = pytest.mark.slow


@contextmanager
def spying_on_losses(monkeypatch: MonkeyPatch) -> Iterator[list[float]]:
    losses: list[float] = []
    original = VerdictTrainer.compute_loss

    def spy(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(VerdictTrainer, "compute_loss", spy)
        yield losses


def test_a_lora_that_diverges_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(max_steps=40, learning_rate=1e30, max_grad_norm=0)
    told = r"toy lora seed 0, step \d: the loss is NaN or infinite.*Lower the learning"
    with pytest.raises(GuardError, match=told):
        fit(job, data(job))


def test_nothing_is_reported_to_anyone() -> None:
    script = (
        "import train.run; from huggingface_hub import constants; "
        "assert constants.HF_HUB_DISABLE_TELEMETRY"
    )
    environment = dict(os.environ)
    environment.pop("HF_HUB_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_training_lowers_the_loss_whose_mean_each_epoch_tells_and_changes_the_adapter_alone(
    make_job: MakeJob, toy_base: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    job = make_job(max_steps=20)
    with spying_on_losses(monkeypatch) as losses:
        model = fit(job, data(job))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch" in line]
    told = [float(line.partition("loss ")[2].partition(",")[0]) for line in lines]
    epochs = (losses[:8], losses[8:16], losses[16:])
    assert told == pytest.approx([sum(part) / len(part) for part in epochs], abs=2e-3)

    assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)
    fresh = AutoModelForCausalLM.from_pretrained(toy_base).state_dict()
    for name, weight in model.unload().state_dict().items():
        assert torch.equal(weight, fresh[name]), name


def test_the_loss_is_a_mean(make_job: MakeJob, toy_base: Path, monkeypatch: MonkeyPatch) -> None:
    """Of 64 rows the last of accumulated batches may have fewer."""

    def of_one_step(rows: int, accumulated: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
        job = make_job(
            num_train_epochs=1,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulated,
            optim="sgd",
            learning_rate=1.0,
            runs=f"runs{rows}",
        )
        with spying_on_losses(monkeypatch) as losses:
            return losses, weights(fit(job, data(job)))

    losses, expected = of_one_step(72)
    job = make_job()
    base = AutoModelForCausalLM.from_pretrained(toy_base)
    by_hand: list[float] = []
    for row in data(job).train:
        with torch.inference_mode():
            log_p = base(torch.tensor([row.prompt.token_ids])).logits[0, -1].log_softmax(0)
        by_hand.append(-float(log_p[row.verdict_id(job.builder)]))
    assert losses == [pytest.approx(sum(by_hand) / len(by_hand), rel=1e-4)]
    cut = [of_one_step(16, 4), of_one_step(24, 3)]
    monkeypatch.setattr("train.adapter.trl.BATCH_TOKENS", 300)
    cut.append(of_one_step(64))
    assert [len(parts) for parts, _ in cut[:2]] == [4, 3] and len(cut[2][0]) > 8
    for parts, found in cut:
        assert sum(parts) == pytest.approx(losses[0], rel=1e-4)
        for name, weight in found.items():
            assert torch.allclose(weight, expected[name], atol=2e-4), name


def test_the_vocabulary_is_scored_once_a_row(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job, products = make_job(max_steps=2), calls_of(monkeypatch, torch.nn.functional, "linear")
    fit(job, data(job))
    scored = [x.shape[:-1].numel() for x, weight, *_ in products if weight.shape[0] == 16384]
    assert scored == [8, 8]


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(make_job: MakeJob) -> None:
    found = []
    for runs, seed in (("a", 0), ("b", 0), ("c", 1)):
        job = make_job(runs=runs, seed=seed, max_steps=3)
        found.append(weights(fit(job, data(job))))
    first, again, other = found
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not any(torch.equal(weight, other[name]) for name, weight in first.items())


def test_a_run_killed_after_its_last_step_takes_no_other(make_job: MakeJob) -> None:
    """Its scratch folder is left, as where it is killed while its weights are written."""
    job = make_job(max_steps=10, lr_scheduler_type="constant")
    first, resumed = (weights(fit(job, data(job))) for _ in range(2))
    assert whole_checkpoint(job.scratch) == str(job.scratch / "checkpoint-5")
    assert all(torch.equal(weight, resumed[name]) for name, weight in first.items())


def test_killed_after_it_stopped_early(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    """It stops at step 15, whose checkpoint is due, before an epoch's end that would be better."""
    losses = {8: 0.5, 16: 0.1}
    record = EarlyStopping.record
    monkeypatch.setattr(
        EarlyStopping, "record", lambda self, step, _, best: record(self, step, losses[step], best)
    )
    monkeypatch.setattr(EarlyStopping, "ended", lambda self, step: step >= 15)
    job = with_settings(
        make_job(max_steps=-1, lr_scheduler_type="constant"), early_stopping_patience=1
    )
    first, resumed = (weights(fit(job, data(job))) for _ in range(2))
    assert all(torch.equal(weight, resumed[name]) for name, weight in first.items())


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path: Path) -> None:
    assert whole_checkpoint(tmp_path) is None
    for step, state in ((5, "{}"), (10, "{}"), (15, '{"epo'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
