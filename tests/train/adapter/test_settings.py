"""A recipe's settings of an adapter: passed through, or refused before anything expensive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard.errors import GuardError
from guard.recipe import MODELS, load_recipe
from tests.train.conftest import ADAPTERS, MakeJob, with_lora, with_settings
from train.adapter.settings import interval, lora_config, total_steps, trainer_config
from train.job import Job


def test_settings_pass_straight_through_to_peft_and_trl(make_job: MakeJob) -> None:
    job = make_job("alora", weight_decay=0.25)
    assert trainer_config(job).weight_decay == 0.25
    assert trainer_config(job).learning_rate == 1e-2
    assert (lora_config(job).r, lora_config(job).lora_alpha) == (16, 32)


@pytest.mark.parametrize(
    ("settings", "rows", "min_steps", "steps"),
    [
        ({"num_train_epochs": 3}, 64, 0, 24),
        ({"num_train_epochs": 3}, 64, 20, 24),
        ({"num_train_epochs": 3}, 64, 30, 30),
        ({"num_train_epochs": 0.5}, 60, 0, 4),
        ({"max_steps": 5}, 64, 0, 5),
    ],
)
def test_training_takes_its_epochs_at_least_the_floor_or_else_max_steps(
    make_job: MakeJob, settings: dict[str, float], rows: int, min_steps: int, steps: int
) -> None:
    assert total_steps(trainer_config(make_job(**settings)), rows, min_steps) == steps


def test_a_least_number_of_steps_beside_the_number_of_steps_is_refused(make_job: MakeJob) -> None:
    job = with_settings(make_job(max_steps=5), min_steps=30)
    with pytest.raises(GuardError, match=r"lora\.min_steps: .*30 beside max_steps 5.*Remove one"):
        trainer_config(job)


def test_an_interval_is_a_number_of_steps_or_a_share_of_all() -> None:
    assert [interval(every, 7) for every in (0, 0.25, 0.4, 1, 3, 50)] == [0, 2, 3, 1, 3, 50]


def test_only_the_alora_carries_the_invocation(make_job: MakeJob) -> None:
    assert lora_config(make_job("lora")).alora_invocation_tokens is None
    job = make_job("alora")
    assert lora_config(job).alora_invocation_tokens == list(job.builder.invocation(job.rule_text))


def test_an_unknown_trainer_key_is_named_with_the_nearest(make_job: MakeJob) -> None:
    with pytest.raises(
        GuardError,
        match=r"trainer: unknown key 'learning_rte' for SFTConfig. Did you mean 'learning_rate'",
    ):
        trainer_config(make_job(learning_rte=1e-3))
    with pytest.raises(GuardError, match=r"recipe toy: methods\.lora\.trainer: unknown key 'optm'"):
        trainer_config(with_settings(make_job(), trainer={"optm": "sgd"}))


def test_an_unknown_lora_key_is_named_with_the_nearest(make_job: MakeJob) -> None:
    with pytest.raises(
        GuardError,
        match=r"alora\.lora: unknown key 'lora_alfa' for LoraConfig. Did you mean 'lora_alpha'",
    ):
        lora_config(with_lora(make_job("alora"), lora_alfa=3))


@pytest.mark.parametrize(
    "key",
    [
        "packing",
        "output_dir",
        "dataloader_drop_last",
        "data_seed",
        "bf16",
        "max_length",
        "save_only_model",
        "ignore_data_skip",
    ],
)
def test_a_key_that_training_sets_itself_is_refused(make_job: MakeJob, key: str) -> None:
    with pytest.raises(GuardError, match=f"'{key}' is set by the training stage"):
        trainer_config(make_job(**{key: 1}))


def test_a_value_that_trl_or_peft_refuses_is_one_line(make_job: MakeJob) -> None:
    with pytest.raises(GuardError, match=r"SFTConfig rejected these values.*nonsense"):
        trainer_config(make_job(lr_scheduler_type="nonsense"))
    with pytest.raises(GuardError, match="LoraConfig rejected these values"):
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
        match=rf"aLoRA is trained without '{next(iter(setting))}'.*methods\.lora\.trainer",
    ):
        trainer_config(make_job("alora", **setting))


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize(
    "setting",
    [
        {"num_train_epochs": 0},
        {"eval_steps": -25},
        {"eval_steps": 0},
        {"per_device_train_batch_size": 0},
        {"per_device_train_batch_size": "many"},
        {"learning_rate": "fast"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"label_smoothing_factor": 0.2},
        {"max_grad_norm": None},
        {"max_grad_norm": -1},
        {"max_grad_norm": "some"},
    ],
)
def test_a_value_that_training_would_trip_over_or_ignore_is_refused_first(
    make_job: MakeJob, method: str, setting: dict[str, object]
) -> None:
    with pytest.raises(GuardError, match=r"recipe toy"):
        trainer_config(make_job(method, **setting))


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_waits_for_a_metric_is_refused(make_job: MakeJob, schedule: str) -> None:
    job = make_job(lr_scheduler_type=schedule, eval_strategy="steps", eval_steps=5)
    with pytest.raises(GuardError, match=rf"needs a metric.*{schedule}.*such as cosine"):
        trainer_config(job)


def test_what_only_trl_reads_is_left_to_the_lora(make_job: MakeJob) -> None:
    assert trainer_config(make_job(dataloader_num_workers=1)).dataloader_num_workers == 1
    with pytest.raises(GuardError, match="aLoRA is trained without 'dataloader_num_workers'"):
        trainer_config(make_job("alora", dataloader_num_workers=1))


@pytest.mark.parametrize("setting", [{"r": "16"}, {"rank_pattern": None}])
def test_a_rank_that_is_no_number_is_refused(make_job: MakeJob, setting: dict[str, object]) -> None:
    with pytest.raises(GuardError, match=r"methods\.lora\.lora: LoraConfig rejected these values"):
        lora_config(with_lora(make_job(), **setting))


def test_an_alora_on_a_base_in_float16_is_refused(make_job: MakeJob) -> None:
    job = make_job("alora")
    with pytest.raises(GuardError, match=r"without 'fp16'.*bfloat16"):
        trainer_config(replace(job, recipe=job.recipe.model_copy(update={"dtype": "float16"})))


@pytest.mark.parametrize("method", ADAPTERS)
def test_an_optimizer_whose_package_is_missing_is_refused_before_anything_is_loaded(
    make_job: MakeJob, method: str
) -> None:
    with pytest.raises(GuardError, match=r"optimizer or schedule rejected these values.*lomo"):
        trainer_config(make_job(method, optim="lomo"))


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_shipped_recipe_can_be_trained_on_this_machine(make_job: MakeJob, name: str) -> None:
    job, recipe = make_job(), load_recipe(name)
    for method in recipe.adapter_methods:
        shipped = Job(job.rule, recipe, method, 0, job.builder, job.runs)
        assert trainer_config(shipped).num_train_epochs > 0
        assert lora_config(shipped).r > 0
