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


def test_adapters_are_checked_and_take_no_settings_of_a_head(make_job: MakeJob) -> None:
    job, recipe = make_job(), load_recipe("tiny")
    for method in recipe.methods:
        tiny = Job(job.rule, recipe, method, 0, job.builder, job.runs)
        trainer_of(tiny).check(tiny)
    for method in ("lora", "alora"):
        told = rf"methods\.{method}\.head: an adapter does not use head settings"
        with pytest.raises(GuardError, match=told):
            TRAINERS["decoder"][method].check(with_settings(make_job(method), head={"C": 1.0}))


def test_gliner2_is_trained_without_openings(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    asked: list[TrainingWork] = []
    monkeypatch.setattr("train.encoder.trainer.fit", lambda work: (asked.append(work), [])[1])
    job = make_job()
    job = replace(job, rule=job.rule.model_copy(update={"judged": "assistant"}))
    rows = data(job)
    assert list(TRAINERS["gliner2"]["lora"].fit([(job, rows)])) == []
    ((_, read),) = asked[0]
    assert read is rows
