"""A rule whose adapter is other rules' as one: PEFT's own concatenation, the folder, the card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel, PeftModelForCausalLM
from pydantic import ValidationError
from pytest import CaptureFixture
from transformers import AutoModelForCausalLM

from data.generator.generate import Counts
from data.study import StudyRequest, build_study
from guard.errors import GuardError
from guard.method import PEFT_CONFIG
from guard.rule import Rule
from guard.weights.card import COMPOSITION, load_card
from guard.weights.low_rank import NOT_SUMMED, write_sum
from guard.weights.predictions import read_predictions
from serve.registry.registry import RegisteredRule, Registry
from tests.train.conftest import RULE, MakeJob, data, with_lora, with_recipe, write_toy_data
from train.adapter.composed import check
from train.adapter.settings import lora_config
from train.adapter.trained import verdict_logits
from train.job import Job
from train.run import run

PARENTS = ("first", "second")


def base_of(job: Job) -> Any:
    return AutoModelForCausalLM.from_pretrained(job.recipe.base_path, dtype=torch.float32)


def random_adapters(job: Job, folder: Path) -> Any:
    """Two of other ranks, scalings and layers, saved by their names."""
    torch.manual_seed(0)
    job = with_lora(job, init_lora_weights=False)
    first = with_lora(job, r=8, target_modules=["q_proj", "up_proj"])
    second = with_lora(job, r=4, target_modules=["q_proj"], layers_to_transform=[1])
    model = PeftModelForCausalLM(base_of(job), lora_config(first), PARENTS[0])
    model.add_adapter(PARENTS[1], lora_config(second))
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return model.eval()


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.8, 0.6), (1.0, -1.0)])
@pytest.mark.parametrize("method", ["lora", "alora"])
def test_a_sum_is_what_peft_concatenates(
    method: str, factors: tuple[float, float], make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(method)
    model = random_adapters(job, tmp_path)
    model.add_weighted_adapter(list(PARENTS), list(factors), "cat", combination_type="cat")
    parents = [(tmp_path / name, it) for name, it in zip(PARENTS, factors, strict=True)]
    prompts = [row.prompt for row in data(job).test[:8]]
    for ordered in (parents, parents[::-1]):
        write_sum(dict(ordered), tmp_path / "sum")
        ours = PeftModel.from_pretrained(base_of(job), str(tmp_path / "sum")).eval()
        answers = verdict_logits(ours, prompts, job.builder)
        for name in ("cat", *PARENTS):
            model.set_adapter(name)
            logits = verdict_logits(model, prompts, job.builder)
            assert (answers == pytest.approx(logits, abs=1e-5)) is (name == "cat")


def composed_job(job: Job, rules: Path, **rule: object) -> Job:
    """A job of a rule that is composed of two others, which differ in their data, none trained."""
    recipe = with_recipe(job, engine={"max_lora_rank": 32}).recipe
    of_toy = RULE.model_dump(mode="json")
    for name in PARENTS:
        (rules / f"{name}.yaml").write_text(yaml.safe_dump(of_toy | {"id": name}))
    composed = RULE.model_copy(update={"compose": PARENTS, **rule})
    (rules / "toy.yaml").write_text(yaml.safe_dump(composed.model_dump(mode="json")))
    for name, rows in zip(PARENTS, (64, 96), strict=True):
        write_toy_data(job.runs.data(name), rows, rule=name)
    return replace(job, recipe=recipe, rule=composed)


def train(job: Job, rules: Path, names: str, **options: Any) -> None:
    run(names, job.recipe, methods=[job.method], runs=job.runs, rules=rules, **options)


@pytest.mark.slow
def test_a_composed_rule_is_made_of_its_parents_and_made_again_when_one_changes(
    make_job: MakeJob, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    """Named before them: they are trained first."""
    job = composed_job(make_job("alora", max_steps=12), tmp_path)
    train(job, tmp_path, "toy,first,second")
    folders = {name: job.runs.adapter("toy", name, "alora") for name in PARENTS}
    card = load_card(job.folder)
    assert card.composed_of == {name: load_card(folders[name]).version for name in PARENTS}
    assert json.loads((job.folder / PEFT_CONFIG).read_text())["r"] == 32
    measured = card.metrics[COMPOSITION]
    assert (measured["n"], list(measured["adapters"])) == (32, ["composed", *PARENTS])
    # The parents answer as their own predictions say, told their own titles.
    written = read_predictions(folders["first"], "test", "")
    calibration, right = load_card(folders["first"]).calibration, 0
    for index, logit in enumerate(written.values()):
        right += calibration.verdict("", logit).violates == bool(index % 2)
    assert measured["adapters"]["first"]["accuracy"] == pytest.approx(right / 32, abs=1e-4)
    train(job, tmp_path, "toy")
    assert "toy alora seed 0: up to date" in capsys.readouterr().out
    write_toy_data(job.runs.data("second"), 80, rule="second")
    train(job, tmp_path, "second,toy")  # what is not published is not served, nor composed
    assert load_card(job.folder).composed_of == card.composed_of
    second = RegisteredRule("toy", "second", "alora")
    Registry(job.runs).publish(second, "candidate", actor="a", reason="better")
    train(job, tmp_path, "toy")
    again = load_card(job.folder).composed_of
    assert again == card.composed_of | {"second": load_card(folders["second"]).version}
    assert again != card.composed_of


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        (r"only trained adapters.*first by reader\)", {"untrained": "reader", "by": "reader"}),
        (r"first by lora, itself composed", {"composed_of": {"a": "1"}}),
        ("first has another base ", {"base_revision": "other"}),
        ("first has another prompt ", {"prompt_hash": "other"}),
        ("first has another choice of turns to read", {"reads": "user"}),
        ("first has another invocation", {"alora_invocation_tokens": [1, 2]}),
        (r"(?s)above the engine's max_lora_rank \(got 37 > 32\).* to 37", {"r": 33}),
    ],
)
def test_what_cannot_be_one_adapter_is_refused(
    make_job: MakeJob, tmp_path: Path, why: str, changed: dict[str, object]
) -> None:
    job = composed_job(make_job(), tmp_path)
    random_adapters(job, tmp_path)
    fields = {"base_revision": job.base_revision, "prompt_hash": job.builder.hash, "by": "lora"}
    fields |= {"reads": job.reads, "untrained": None, "composed_of": None, "remedy": "Train it"}
    cards = {name: SimpleNamespace(rule=name, **fields) for name in PARENTS}
    vars(job)["parents"] = {tmp_path / name: card for name, card in cards.items()}
    check(job)
    file = tmp_path / "first" / PEFT_CONFIG
    vars(cards["first"]).update(changed)
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(GuardError, match=why):
        check(job)


@pytest.mark.parametrize("key", NOT_SUMMED)
def test_an_update_of_another_kind_is_in_no_sum(
    make_job: MakeJob, tmp_path: Path, key: str
) -> None:
    random_adapters(make_job(), tmp_path)
    file = tmp_path / "second" / PEFT_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: {"q_proj": 4}}))
    with pytest.raises(GuardError, match=f"second: an adapter with {key} is in no sum"):
        write_sum({tmp_path / name: 1 for name in PARENTS}, tmp_path / "sum")
    assert not (tmp_path / "sum").exists()


def test_a_composed_rule_needs_its_parents_and_learns_nothing_from_rows(
    make_job: MakeJob, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    job = composed_job(make_job(), tmp_path)
    write_toy_data(job.data)
    with pytest.raises(GuardError, match="not trained: toy"):
        train(job, tmp_path, "toy")
    assert "first/lora: no card.json" in capsys.readouterr().out
    (tmp_path / "second.yaml").unlink()
    with pytest.raises(GuardError, match="not trained: toy"):
        train(job, tmp_path, "toy")
    assert "no such file" in capsys.readouterr().out
    study = StudyRequest(job.rule, "rows.jsonl", (20,), (0,), 10, Counts(), job.runs)
    with pytest.raises(GuardError, match=r"no rows train a composed rule \(got toy\)"):
        build_study(study)
    for names in (("first",), ("first", "first")):
        with pytest.raises(ValidationError, match="two or more rules, each once"):
            Rule(**RULE.model_dump() | {"compose": names})
