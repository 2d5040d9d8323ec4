"""One adapter: its settings, its loss, what changes, and that the same seed gives the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.layout import ROOT
from guard.method import METHODS
from guard.recipe import MODELS, load_recipe
from train.adapter.trl import (
    LengthGrouped,
    VerdictTrainer,
    fit,
    lora_config,
    trainer_config,
    try_on,
    whole_checkpoint,
)
from train.job import Job

from .conftest import MakeJob, data, weights, with_adapters, with_lora


@contextmanager
def spying_on_losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    losses: list[float] = []
    original = VerdictTrainer.compute_loss

    def spy(self: VerdictTrainer, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(VerdictTrainer, "compute_loss", spy)
        yield losses


def test_settings_pass_straight_through_to_peft_and_trl(make_job: MakeJob) -> None:
    job = make_job("alora", weight_decay=0.25)
    assert trainer_config(job).weight_decay == 0.25
    assert trainer_config(job).learning_rate == 1e-2
    assert (lora_config(job).r, lora_config(job).lora_alpha) == (16, 32)


def test_only_the_alora_carries_the_invocation(make_job: MakeJob) -> None:
    assert lora_config(make_job("lora")).alora_invocation_tokens is None
    job = make_job("alora")
    assert lora_config(job).alora_invocation_tokens == list(job.builder.invocation(job.rule_text))


def test_an_unknown_trainer_key_is_named_with_the_nearest(make_job: MakeJob) -> None:
    with pytest.raises(
        GuardError,
        match=r"'toy', trainer: unknown key 'learning_rte' for SFTConfig. Did you mean 'learning_rate'",
    ):
        trainer_config(make_job(learning_rte=1e-3))
    with pytest.raises(GuardError, match=r"'toy', adapters\.lora\.trainer: unknown key 'optm'"):
        trainer_config(with_adapters(make_job(), trainer={"optm": "sgd"}))


def test_an_unknown_lora_key_is_named_with_the_nearest(make_job: MakeJob) -> None:
    with pytest.raises(
        GuardError,
        match=r"adapters\.alora\.lora: unknown key 'lora_alfa' for LoraConfig. Did you mean 'lora_alpha'",
    ):
        lora_config(with_lora(make_job("alora"), lora_alfa=3))


@pytest.mark.parametrize(
    "key", ["packing", "output_dir", "dataloader_drop_last", "data_seed", "bf16", "max_length"]
)
def test_a_key_that_training_sets_itself_is_refused(make_job: MakeJob, key: str) -> None:
    with pytest.raises(GuardError, match=f"'{key}' is set by the training stage"):
        trainer_config(make_job(**{key: 1}))


def test_a_value_that_trl_or_peft_refuses_is_one_line(make_job: MakeJob) -> None:
    with pytest.raises(GuardError, match=r"SFTConfig refuses its values.*nonsense"):
        trainer_config(make_job(lr_scheduler_type="nonsense"))
    with pytest.raises(GuardError, match="LoraConfig refuses its values"):
        lora_config(
            with_lora(make_job(), layers_to_transform=[0])
        )  # not together with "all-linear"


def test_a_rank_that_the_engine_would_refuse_is_refused_before_training(make_job: MakeJob) -> None:
    with pytest.raises(GuardError, match=r"max_lora_rank.*32 > 16"):
        lora_config(with_lora(make_job(), r=32))


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 64}},
        {"trainable_token_indices": [1]},
    ]
    + [{"init_lora_weights": name} for name in ("pissa", "olora", "pissa_niter_4", "corda")],
)
def test_an_adapter_that_vllm_would_refuse_is_refused_before_training(
    make_job: MakeJob, setting: dict[str, object]
) -> None:
    with pytest.raises(GuardError, match="could not be served"):
        lora_config(with_lora(make_job(), **setting))


@pytest.mark.parametrize(
    "setting", [{"bias": "none"}, {"init_lora_weights": "orthogonal"}, {"init_lora_weights": False}]
)
def test_a_low_rank_update_of_an_unchanged_base_is_served_however_it_starts(
    make_job: MakeJob, setting: dict[str, object]
) -> None:
    key, value = next(iter(setting.items()))
    assert getattr(lora_config(with_lora(make_job(), **setting)), key) == value


@pytest.mark.parametrize(
    "setting", [{"gradient_checkpointing": True}, {"neftune_noise_alpha": 5.0}]
)
def test_what_an_alora_would_be_trained_without_is_refused_and_left_to_the_lora(
    make_job: MakeJob, setting: dict[str, object]
) -> None:
    assert trainer_config(make_job(**setting))
    with pytest.raises(
        GuardError,
        match=rf"an aLoRA is trained without '{next(iter(setting))}'.*adapters\.lora\.trainer",
    ):
        trainer_config(make_job("alora", **setting))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "setting",
    [
        {"num_train_epochs": 0},
        {"per_device_train_batch_size": 0},
        {"per_device_train_batch_size": "many"},
        {"learning_rate": "fast"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"label_smoothing_factor": 0.2},
    ],
)
def test_a_value_that_training_would_trip_over_or_ignore_is_refused_first(
    make_job: MakeJob, method: str, setting: dict[str, object]
) -> None:
    with pytest.raises(GuardError, match=r"recipe 'toy'"):
        trainer_config(make_job(method, **setting))


def test_what_only_trl_reads_is_left_to_the_lora(make_job: MakeJob) -> None:
    assert trainer_config(make_job(dataloader_num_workers=1)).dataloader_num_workers == 1
    with pytest.raises(GuardError, match="an aLoRA is trained without 'dataloader_num_workers'"):
        trainer_config(make_job("alora", dataloader_num_workers=1))


@pytest.mark.parametrize("setting", [{"r": "16"}, {"rank_pattern": None}])
def test_a_rank_that_is_no_number_is_refused(make_job: MakeJob, setting: dict[str, object]) -> None:
    with pytest.raises(GuardError, match=r"adapters\.lora\.lora: LoraConfig refuses its values"):
        lora_config(with_lora(make_job(), **setting))


@pytest.mark.parametrize("method", METHODS)
def test_modules_that_the_base_has_not_are_found_without_its_weights(
    make_job: MakeJob, method: str
) -> None:
    try_on(make_job(method))
    with pytest.raises(GuardError, match=rf"adapters\.{method}\.lora.*q_prj"):
        try_on(with_lora(make_job(method), target_modules=["q_prj"]))


def test_a_lora_that_diverges_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(max_steps=40, learning_rate=1e30, max_grad_norm=0)
    with pytest.raises(
        GuardError,
        match=r"toy lora seed 0, step \d: the loss is not a number any more.*Lower the learning rate",
    ):
        fit(job, data(job))


def test_an_alora_on_a_base_in_float16_is_refused(make_job: MakeJob) -> None:
    job = make_job("alora")
    with pytest.raises(GuardError, match=r"without 'fp16'.*bfloat16"):
        trainer_config(replace(job, recipe=job.recipe.model_copy(update={"dtype": "float16"})))


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_whose_package_is_missing_is_refused_before_anything_is_loaded(
    make_job: MakeJob, method: str
) -> None:
    with pytest.raises(GuardError, match=r"optimizer or schedule refuses its values.*lomo"):
        trainer_config(make_job(method, optim="lomo"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_shipped_recipe_can_be_trained_on_this_machine(
    make_job: MakeJob, name: str, method: str
) -> None:
    job = make_job(method)
    job = Job(job.rule, load_recipe(name), method, 0, job.builder, job.runs)
    assert trainer_config(job).num_train_epochs > 0
    assert lora_config(job).r > 0


def test_nothing_is_reported_to_anyone(make_job: MakeJob) -> None:
    assert trainer_config(make_job()).report_to == []
    told_nothing = "import train.run; from huggingface_hub import constants; assert constants.HF_HUB_DISABLE_TELEMETRY"
    environment = {
        name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"
    }
    subprocess.run([sys.executable, "-c", told_nothing], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize("method", METHODS)
def test_training_lowers_the_loss_and_changes_adapter_weights_only(
    make_job: MakeJob, toy_base: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(method)
    with spying_on_losses(monkeypatch) as losses:
        model = fit(job, data(job))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])

    assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)
    fresh = AutoModelForCausalLM.from_pretrained(toy_base).state_dict()
    for name, weight in model.unload().state_dict().items():
        assert torch.equal(weight, fresh[name]), name


def test_the_loss_is_the_cross_entropy_of_the_verdict_after_each_unpadded_prompt(
    make_job: MakeJob, toy_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(
        num_train_epochs=1, per_device_train_batch_size=64
    )  # one batch: the loss before any step
    rows = data(job).train
    with spying_on_losses(monkeypatch) as losses:
        fit(job, data(job))
    base = AutoModelForCausalLM.from_pretrained(toy_base)
    with torch.inference_mode():
        log_p = [
            base(torch.tensor([row.prompt.token_ids])).logits[0, -1].log_softmax(0) for row in rows
        ]
    by_hand = [
        float(-p[job.builder.yes_id if row.label else job.builder.no_id])
        for p, row in zip(log_p, rows, strict=True)
    ]
    assert losses == [pytest.approx(sum(by_hand) / len(by_hand), rel=1e-4)]


def test_the_line_of_an_epoch_holds_the_mean_of_all_its_losses(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(max_steps=20)
    with spying_on_losses(monkeypatch) as losses:
        fit(job, data(job))
    found = [
        float(line.partition("loss ")[2].partition(",")[0])
        for line in capsys.readouterr().out.splitlines()
        if "epoch" in line
    ]
    assert found == [
        pytest.approx(sum(part) / len(part), abs=2e-3)
        for part in (losses[:8], losses[8:16], losses[16:])
    ]


@pytest.mark.parametrize(
    ("rows", "steps"), [(16, 4), (24, 3)]
)  # of 64 rows the last part may have fewer
def test_accumulated_batches_weigh_as_much_as_one(make_job: MakeJob, rows: int, steps: int) -> None:
    whole = make_job(
        num_train_epochs=1,
        per_device_train_batch_size=72,
        optim="sgd",
        learning_rate=1.0,
        runs="whole",
    )
    parts = make_job(
        num_train_epochs=1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        optim="sgd",
        learning_rate=1.0,
        runs="parts",
    )
    expected = weights(fit(whole, data(whole)))
    for name, weight in weights(fit(parts, data(parts))).items():
        assert torch.allclose(weight, expected[name], atol=2e-4), name


def test_a_batch_that_goes_through_in_parts_weighs_as_much_as_one(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (
        make_job(num_train_epochs=1, per_device_train_batch_size=64, runs=runs)
        for runs in ("whole", "parts")
    )
    with spying_on_losses(monkeypatch) as losses:
        expected = weights(fit(whole, data(whole)))
        monkeypatch.setattr("train.adapter.trl.BATCH_TOKENS", 300)
        found = weights(fit(parts, data(parts)))
    assert len(losses) > 8
    assert sum(losses[1:]) == pytest.approx(losses[0], rel=1e-4)
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], atol=2e-4), name


def test_the_vocabulary_is_scored_once_per_row(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, scored = make_job(max_steps=2), []
    original = torch.nn.functional.linear

    def spy(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.shape[0] == 16384:
            scored.append(x.shape[:-1].numel())
        return original(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    fit(job, data(job))
    assert scored == [8, 8]


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(make_job: MakeJob) -> None:
    first, again, other = (
        weights(fit(job, data(job)))
        for job in (
            make_job("alora", runs="a", max_steps=6),
            make_job("alora", runs="b", max_steps=6),
            make_job("alora", seed=1, max_steps=6),
        )
    )
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not any(torch.equal(weight, other[name]) for name, weight in first.items())


def test_an_epoch_holds_every_row_once_with_neighbours_of_similar_length() -> None:
    lengths = [(index * 37) % 101 for index in range(96)]
    order = list(LengthGrouped(lengths, batch_rows=8, seed=0))
    assert sorted(order) == list(range(96))
    spread = [
        max(lengths[i] for i in order[at : at + 8]) - min(lengths[i] for i in order[at : at + 8])
        for at in range(0, 96, 8)
    ]
    assert sorted(spread)[len(spread) // 2] < 40  # of 100 in random order


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = LengthGrouped(list(range(64)), batch_rows=4, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(1)  # the global generator is elsewhere in a resumed run
        return list(sampler)

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path: Path) -> None:
    assert whole_checkpoint(tmp_path) is None
    for step, state in ((5, "{}"), (10, "{}"), (15, '{"epo'), (20, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
