"""What makes an adapter outdated, and what an interrupted run may leave to the next."""

from __future__ import annotations

import fcntl
from dataclasses import replace

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.layout import Runs, mark_current
from tests.train.conftest import (
    MakeEncoderJob,
    MakeJob,
    with_recipe,
    with_settings,
)
from train.job import LOCK, Job


def with_one_method(job: Job) -> Job:
    """All its methods have the settings of one."""
    settings = job.recipe.methods["lora"]
    return with_recipe(job, methods=dict.fromkeys(job.recipe.methods, settings))


def with_rule(job: Job, **update: object) -> Job:
    return replace(job, rule=job.rule.model_copy(update=update))


def test_all_that_decides_is_fingerprinted_and_nothing_else(make_job: MakeJob) -> None:
    job = make_job()
    inputs, lora = job.inputs, job.recipe.methods["lora"]
    for name, changed in {
        "seed": replace(job, seed=1),
        "method": replace(job, method="alora"),
        "title": with_rule(job, title="Nobody may mention a return."),
        "dtype": with_recipe(job, dtype="bfloat16"),
        "trainer": with_recipe(job, trainer={**job.recipe.trainer, "weight_decay": 0.1}),
        "base": with_recipe(job, base="someone/else", revision="0" * 40),
        "4 bits": with_recipe(job, quantization="nf4"),
        "method of one name": replace(with_one_method(job), method="alora"),
    }.items():
        assert changed.inputs != inputs, name
    for name, changed in {
        "policy": with_rule(job, policy="Another policy"),
        "max_fpr": with_rule(job, max_fpr=0.02),
        "engine": with_recipe(job, engine={"max_lora_rank": 64}),
        "the other method": with_recipe(job, methods=job.recipe.methods | {"alora": lora}),
    }.items():
        assert changed.inputs == inputs, name
    for split in ("train", "validation", "test"):
        before = replace(job).inputs
        with (job.data / f"{split}.jsonl").open("a") as file:
            file.write("\n")
        assert replace(job).inputs != before, split


def test_who_is_judged_decides(
    make_job: MakeJob,
    make_encoder_job: MakeEncoderJob,
) -> None:
    of_encoder = make_encoder_job(judged="assistant")
    assert of_encoder.reads == "assistant"
    assert of_encoder.inputs != make_encoder_job(judged="user").inputs
    job = make_job()
    of_user = replace(job, rule=job.rule.model_copy(update={"judged": "user"}))
    assert of_user.reads == "conversation" and of_user.inputs == job.inputs


def test_checkpoints_of_the_same_inputs_alone_stay(make_job: MakeJob) -> None:
    job = make_job()
    job.open_scratch()
    left = job.scratch / "checkpoint-5"
    for is_cut_off in (False, True):
        left.mkdir()
        job.open_scratch()
        assert left.is_dir()
        if is_cut_off:
            (job.scratch / "inputs.json").write_text("")
        else:
            with_rule(job, title="Nobody may mention a return.").open_scratch()
        job.open_scratch()
        assert not left.exists() and job.scratch.is_dir()


def test_a_forgotten_job_keeps_its_adapter_until_replaced(make_job: MakeJob) -> None:
    job = make_job()
    job.folder.mkdir(parents=True)
    weights = job.folder / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    mark_current(job.folder, job.inputs)
    job.open_scratch()
    job.forget()
    assert weights.is_file()
    assert not (job.folder / "stage.json").exists()
    assert not list(job.scratch.iterdir())


def test_a_floor_of_steps_is_an_input_and_stands_on_the_card(make_job: MakeJob) -> None:
    job = make_job()
    floored = with_settings(job, min_steps=300)
    assert (job.min_steps, floored.min_steps) == (0, 300) and floored.inputs != job.inputs
    assert floored.recipe.training_settings("lora")["min_steps"] == 300
    assert "min_steps" not in job.recipe.training_settings("lora")


def test_two_commands_do_not_train_the_same_adapter(make_job: MakeJob) -> None:
    job = make_job()
    job.scratch.mkdir(parents=True)
    with (job.scratch / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(GuardError, match=r"toy lora seed 0: another command is training this"):
            job.claim()
    job.claim()
    job.open_scratch()
    job.forget()
    with (job.scratch / LOCK).open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        job.close_scratch()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_scratch_folder_is_beside_the_adapter(make_job: MakeJob) -> None:
    job: Job = make_job("alora", seed=2)
    assert job.folder.name == "alora-seed2"
    job.open_scratch()
    assert job.scratch.parent == job.folder.parent
    assert not list(job.folder.parent.glob("alora*"))
    assert replace(job, runs=Runs(job.runs.root, "20 rows")).name == f"{job.name}, 20 rows"


def test_another_way_to_read_words_outdates(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    adapter = make_job("lora")
    methods = adapter.recipe.methods | {"head": type(adapter.recipe.methods["lora"])()}
    recipe = adapter.recipe.model_copy(update={"methods": methods})
    head = replace(adapter, recipe=recipe, method="head")
    before = head.inputs, adapter.inputs
    monkeypatch.setattr("guard.weights.head.MOST_NGRAMS", 100)
    assert replace(head).inputs != before[0]
    assert replace(adapter).inputs != before[1]  # an encoder's adapter reads words too
