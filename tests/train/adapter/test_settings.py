"""A recipe's settings of an adapter: passed through, or refused before anything expensive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard.errors import GuardError
from guard.recipe import MODELS, load_recipe
from tests.train.conftest import ADAPTERS, MakeJob, with_lora, with_settings
from train.adapter.settings import lora_config, trainer_config
from train.job import Job
from train.methods import TRAINERS

OWNED = (
    *("packing", "output_dir", "dataloader_drop_last", "data_seed", "bf16", "max_length"),
    *("save_only_model", "ignore_data_skip"),
)


@pytest.mark.parametrize(
    ("trainer", "told"),
    [
        (
            {"learning_rte": 1e-3},
            "trainer: unknown key 'learning_rte' for SFTConfig. Did you mean 'learning_rate'",
        ),
        *(({key: 1}, f"'{key}' is set by the training stage") for key in OWNED),
        ({"lr_scheduler_type": "nonsense"}, "SFTConfig rejected these values.*nonsense"),
        ({"num_train_epochs": 0}, "recipe toy.*'num_train_epochs' must be above 0"),
        ({"eval_steps": 0}, "recipe toy.*'eval_steps' must be above 0"),
        ({"per_device_train_batch_size": 0}, "recipe toy.*batch_size' must be above 0"),
        ({"per_device_train_batch_size": "many"}, "recipe toy"),
        ({"learning_rate": "fast"}, "recipe toy"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "recipe toy"),
        ({"label_smoothing_factor": 0.2}, "recipe toy.*trained without 'label_smoothing_factor'"),
        ({"max_grad_norm": None}, "recipe toy.*'max_grad_norm' must be a number"),
        ({"max_grad_norm": -1}, "recipe toy.*'max_grad_norm' must be a number"),
        ({"max_grad_norm": "some"}, "recipe toy"),
        ({"optim": "lomo"}, "optimizer or schedule rejected these values.*lomo"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "needs a metric.*plateau.*such as cosine"),
        ({"lr_scheduler_type": "greedy"}, "needs a metric.*greedy.*such as cosine"),
    ],
)
@pytest.mark.parametrize("method", ADAPTERS)
def test_bad_settings_of_the_trainer_are_refused_before_anything_is_loaded(
    make_job: MakeJob, method: str, trainer: dict[str, object], told: str
) -> None:
    with pytest.raises(GuardError, match=told):
        trainer_config(make_job(method, **trainer))


def test_bad_settings_of_one_method_are_refused_where_they_stand(make_job: MakeJob) -> None:
    with pytest.raises(GuardError, match=r"recipe toy: methods\.lora\.trainer: unknown key 'optm'"):
        trainer_config(with_settings(make_job(), trainer={"optm": "sgd"}))
    job = with_settings(make_job(max_steps=5), min_steps=30)
    with pytest.raises(GuardError, match=r"lora\.min_steps: .*30 beside max_steps 5.*Remove one"):
        trainer_config(job)
    job = make_job("alora")
    with pytest.raises(GuardError, match=r"without 'fp16'.*bfloat16"):
        trainer_config(replace(job, recipe=job.recipe.model_copy(update={"dtype": "float16"})))


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"lora_alfa": 3}, "unknown key 'lora_alfa' for LoraConfig. Did you mean 'lora_alpha'"),
        # Not together with "all-linear".
        ({"layers_to_transform": [0]}, "LoraConfig rejected these values"),
        ({"r": "16"}, "LoraConfig rejected these values"),
        ({"rank_pattern": None}, "LoraConfig rejected these values"),
        ({"r": 32}, "max_lora_rank.*32 > 16"),
        ({"rank_pattern": {"q_proj": 64}}, "could not be served.*64 > 16"),
        ({"use_dora": True}, "could not be served"),
        ({"bias": "all"}, "could not be served"),
        ({"modules_to_save": ["lm_head"]}, "could not be served"),
        ({"trainable_token_indices": [1]}, "could not be served"),
        ({"init_lora_weights": "pissa_niter_4"}, "could not be served"),
        ({"init_lora_weights": "olora"}, "could not be served"),
    ],
)
def test_what_is_not_served_stops(make_job: MakeJob, lora: dict[str, object], told: str) -> None:
    with pytest.raises(GuardError, match=rf"methods\.lora\.lora: .*{told}"):
        lora_config(with_lora(make_job(), **lora))


@pytest.mark.parametrize(
    ("key", "value"), [("bias", "none"), ("init_lora_weights", "orthogonal"), ("r", 1)]
)
def test_low_rank_updates_are_served(make_job: MakeJob, key: str, value: object) -> None:
    """However they start."""
    assert getattr(lora_config(with_lora(make_job(), **{key: value})), key) == value
    assert lora_config(with_lora(make_job(), init_lora_weights=False)).init_lora_weights is False


LEFT_TO_THE_LORA = {"gradient_checkpointing": True, "neftune_noise_alpha": 5.0}
LEFT_TO_THE_LORA |= {"dataloader_num_workers": 1}


@pytest.mark.parametrize(("key", "value"), LEFT_TO_THE_LORA.items())
def test_an_alora_leaves_some_to_the_lora(make_job: MakeJob, key: str, value: object) -> None:
    assert getattr(trainer_config(make_job(**{key: value})), key) == value
    with pytest.raises(GuardError, match=rf"aLoRA is trained without '{key}'.*lora\.trainer"):
        trainer_config(make_job("alora", **{key: value}))


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_shipped_recipe_has_all_methods_and_can_be_trained_on_this_machine(
    make_job: MakeJob, name: str
) -> None:
    job, recipe = make_job(), load_recipe(name)
    assert set(TRAINERS[recipe.kind]) <= set(recipe.methods)
    for method in recipe.adapter_methods:
        shipped = Job(job.rule, recipe, method, 0, job.builder, job.runs)
        assert trainer_config(shipped).num_train_epochs > 0
        assert lora_config(shipped).r > 0
