"""Every method that a recipe may list can be trained, and refuses what another one reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.method import METHODS
from guard.recipe import KINDS, MODELS, load_recipe
from tests.train.conftest import MakeJob, data, with_settings
from train.job import Job
from train.methods import TRAINERS, TrainingWork, trainer_of


def test_every_method_has_a_trainer_and_no_other_name_has() -> None:
    assert set(TRAINERS) == set(KINDS)
    for kind, trainers in TRAINERS.items():
        assert set(trainers) == {
            name for name, method in METHODS.items() if method.acts_from in KINDS[kind].acts_from
        }


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.yaml")))
def test_every_shipped_recipe_has_the_methods_that_the_readme_promises(name: str) -> None:
    recipe = load_recipe(name)
    assert set(TRAINERS[recipe.kind]) <= set(recipe.methods)


def test_of_adapters_an_alora_alone_takes_settings_of_a_head(make_job: MakeJob) -> None:
    job, recipe = make_job(), load_recipe("tiny")
    for method in recipe.methods:
        tiny = Job(job.rule, recipe, method, 0, job.builder, job.runs)
        trainer_of(tiny).check(tiny)
    TRAINERS["decoder"]["alora"].check(with_settings(make_job("alora"), head={"C": 1.0}))
    for method, head, told in (
        ("lora", {"C": 1.0}, r"methods\.lora\.head: only an aLoRA and a method that is a head"),
        ("alora", {"c": 1.0}, r"methods\.alora\.head: unknown key 'c'"),
    ):
        with pytest.raises(GuardError, match=told):
            TRAINERS["decoder"][method].check(with_settings(make_job(method), head=head))


def test_gliner2_is_trained_without_openings(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    asked: list[TrainingWork] = []
    monkeypatch.setattr("train.encoder.trainer.fit", lambda work: (asked.append(work), [])[1])
    job = make_job()
    job = replace(job, rule=job.rule.model_copy(update={"judged": "assistant"}))
    rows = data(job)
    assert list(TRAINERS["gliner2"]["lora"].fit([(job, rows)])) == []
    ((_, read),) = asked[0]
    assert read is rows
