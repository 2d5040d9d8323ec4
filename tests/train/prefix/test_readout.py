"""An aLoRA that answers by a head: it begins as the frozen base's, and is trained as in PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from pytest import MonkeyPatch
from safetensors.numpy import load_file
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import set_seed

from guard.errors import GuardError
from guard.method import HEAD
from guard.prompt.ngrams import ngram_rows
from guard.recipe import MethodSettings
from guard.weights.head import Head
from tests.train import conftest as toys
from train.adapter.settings import lora_config
from train.adapter.trained import TrainedAdapter
from train.base import load_served_base
from train.examples import Row, Rows
from train.head import fit as head_fit
from train.head.fit import judged_words
from train.job import Job
from train.prefix import fleet, readout
from train.prefix import trainer as shared_prefix

pytestmark = pytest.mark.slow

NATS = 1e-3


def by_head(job: Job) -> Job:
    return toys.with_settings(job, head={})


def trained(job: Job, rows: Rows | None = None) -> TrainedAdapter:
    """Present until the next is asked for, which never is."""
    fitted = next(shared_prefix.fit([(job, rows or toys.data(job))]))
    assert isinstance(fitted, TrainedAdapter)
    return fitted


def head_of(job: Job, rows: Rows | None = None) -> head_fit.TrainedHead:
    """The head that is fitted without any adapter."""
    methods = job.recipe.methods | {"head": MethodSettings()}
    alone = replace(toys.with_recipe(job, methods=methods), method="head")
    fitted = next(head_fit.fit([(alone, rows or toys.data(job))]))
    assert isinstance(fitted, head_fit.TrainedHead)
    return fitted


def prompts_of(rows: tuple[Row, ...]) -> list[Any]:
    return [row.prompt for row in rows]


@pytest.mark.parametrize("base", ["qwen3", "llama, one KV head"])
def test_it_begins_as_the_head(make_job: toys.MakeJob, base: str) -> None:
    job = by_head(make_job("alora", base=base, learning_rate=1e-9, max_steps=2))
    tests = prompts_of(toys.data(job).test)
    assert trained(job).logits(tests) == pytest.approx(head_of(job).logits(tests), abs=NATS)


@pytest.mark.parametrize("turns", ["any", "last"])
def test_what_is_written_answers_as_what_was_trained(
    make_job: toys.MakeJob, tmp_path: Path, turns: str
) -> None:
    """And a study's rows, on cached prefixes, as plain PEFT on whole prompts."""
    job = replace(by_head(make_job("alora", max_steps=24)), of_study=True)
    job = replace(job, rule=toys.RULE.model_copy(update={"turns": turns}))
    adapter = trained(job)
    rows = toys.data(job)
    answered = prompts_of((*rows.validation, *rows.test))
    assert adapter.validation_logits == pytest.approx(adapter.logits(answered), abs=NATS)
    assert adapter.logits([]) == []  # as for a rule without long rows
    logits = adapter.logits(prompts_of(rows.test))
    assert np.abs(np.subtract(logits, head_of(job).logits(prompts_of(rows.test)))).max() > 0.1
    adapter.save(tmp_path)
    head = Head.of_tensors(load_file(tmp_path / HEAD), tmp_path, "")
    base = load_served_base(job.recipe, torch.device("cpu"))
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    for row, expected in zip(rows.test, logits, strict=True):
        state = last_states(loaded, [row])[0].detach().double().numpy()
        words = judged_words(job, row.prompt)
        assert (len(words.keys) < len(ngram_rows([row.prompt.token_ids]).keys) / 2) == (
            turns == "last"
        )
        assert head.logit(state[None], words) == pytest.approx(expected, abs=NATS)


def last_states(model: PeftModel, rows: list[Row]) -> torch.Tensor:
    """Plain PEFT's, [rows, hidden size], prompt by prompt."""
    states = []
    for row in rows:
        ids = torch.tensor([row.prompt.token_ids])
        states.append(model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1])
    return torch.stack(states)


def test_its_gradients_are_plain_peft_s(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> None:
    """Of two rules in one pass, from a random second factor: from zero the first has none."""
    sgd = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0, "max_steps": 1}
    jobs: list[Job] = []
    for number in range(2):
        job = by_head(
            make_job("alora", seed=number, runs="runs", lr_scheduler_type="constant", **sgd)
        )
        job = replace(job, rule=toys.RULE.model_copy(update={"id": f"toy{number}"}))
        toys.write_toy_data(job.data, n_train=(64, 60)[number], rule=job.rule.id)
        jobs.append(toys.with_lora(job, init_lora_weights=False))
    toys.record_losses(monkeypatch, lambda step: -float(step))  # the last step is the best
    batches = toys.calls_of(monkeypatch, readout.HeadReadout, "losses")
    starts: list[readout.HeadInTraining] = []

    def kept(file: Path, device: torch.device) -> readout.HeadInTraining:
        starts.append(readout.head_in(file, device))
        return readout.head_in(file, device)

    monkeypatch.setattr(fleet, "head_in", kept)
    fits = shared_prefix.fit([(job, toys.data(job)) for job in jobs])
    for number, (job, fitted) in enumerate(zip(jobs, fits, strict=True)):
        assert isinstance(fitted, TrainedAdapter)
        (_, _, both, _), *_ = batches
        rows = both[len(both) // 2 * number :][: len(both) // 2]
        found = toys.weights(fitted.model)
        expected, weight = plain_step(job, starts[number], rows)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
        assert fitted.head is not None
        np.testing.assert_allclose(fitted.head.weight, weight.detach(), rtol=1e-3, atol=1e-5)


def plain_step(
    job: Job, start: readout.HeadInTraining, rows: list[Row]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The adapter and the head's weight after a step of size 1 against the loss's gradient."""
    set_seed(job.seed)
    base = load_served_base(job.recipe, torch.device("cpu"))
    model = cast(PeftModel, get_peft_model(base, lora_config(job)))
    weight = start.weight
    logits = last_states(model, rows) @ weight + start.bias
    logits = logits + torch.tensor([start.word_logits[row.id] for row in rows])
    labels = torch.tensor([float(row.label) for row in rows])
    binary_cross_entropy_with_logits(logits, labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
        assert weight.grad is not None
        stepped = weight - weight.grad
    return toys.weights(model), stepped


def test_a_rule_that_reads_other_turns_has_a_head_of_its_own(make_job: toys.MakeJob) -> None:
    """Beside one of the same rows and text."""
    jobs = [by_head(make_job("alora", max_steps=1, runs=turns)) for turns in ("any", "last")]
    jobs[1] = replace(jobs[1], rule=toys.RULE.model_copy(update={"turns": "last"}))
    known: list[int] = []
    for fitted in shared_prefix.fit([(job, toys.data(job)) for job in jobs]):
        assert isinstance(fitted, TrainedAdapter) and fitted.head is not None
        known.append(len(fitted.head.words.weights))
    assert known == [len(head_of(job).head.words.weights) for job in jobs]
    assert known[0] != known[1]


def test_a_training_that_only_loses_is_undone(make_job: toys.MakeJob) -> None:
    job = by_head(make_job("alora", learning_rate=30.0, max_steps=16))
    tests = prompts_of(toys.data(job).test)
    assert trained(job).logits(tests) == pytest.approx(head_of(job).logits(tests), abs=NATS)


def test_training_rows_have_the_words_of_other_rows(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    job = by_head(make_job("alora", max_steps=1))
    starts = toys.calls_of(monkeypatch, fleet, "HeadReadout")
    trained(job)
    ((_, (start,)),) = starts
    rows = toys.data(job)
    plain = {
        row.id: float(start.words.logits(judged_words(job, row.prompt))[0]) for row in rows.train
    }
    held_out = [start.word_logits[row.id] for row in rows.train]
    # What a fit to itself knows by heart, the others' does not.
    own = np.array([plain[row.id] * (2 * row.label - 1) for row in rows.train])
    others = np.array(held_out) * [2 * row.label - 1 for row in rows.train]
    assert own.mean() > others.mean() + 0.05


def test_the_head_is_fitted_again_to_enough_own_rows(make_job: toys.MakeJob) -> None:
    """Beside generated ones, as an encoder's; the threshold is of the fit before."""
    job = by_head(make_job("alora", max_steps=8, n_train=96))
    rows = toys.data(job)
    few, many = toys.mostly_generated(rows, 2, 2), toys.mostly_generated(rows, 40, 24)
    alone = trained(replace(job, seed=1), few)
    assert alone.head is not None
    refitted = trained(job, many)
    assert refitted.head is not None
    assert not np.allclose(alone.head.weight, refitted.head.weight, atol=1e-3)
    of_head = refitted.logits(prompts_of(many.validation))
    assert refitted.validation_logits != pytest.approx(of_head, abs=NATS)


def two_seeds(make_job: toys.MakeJob) -> list[tuple[Job, Rows]]:
    work: list[tuple[Job, Rows]] = []
    for seed in (0, 1):
        job = by_head(make_job("alora", seed=seed, max_steps=2, runs="runs"))
        work.append((job, toys.data(job)))
    return work


def test_a_rule_whose_states_are_not_finite_fails_alone(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    begin = fleet.begin_head

    def refused(job: Job, *arguments: Any) -> Path:
        if job.seed == 0:
            raise GuardError("the base's states are not finite")
        return begin(job, *arguments)

    monkeypatch.setattr(fleet, "begin_head", refused)
    lost, kept = shared_prefix.fit(two_seeds(make_job))
    assert isinstance(lost, GuardError) and isinstance(kept, TrainedAdapter)


def test_seeds_begin_as_one_fit(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> None:
    fits = toys.calls_of(monkeypatch, readout, "fitted_with_held_out_words")
    first, second = shared_prefix.fit(two_seeds(make_job))
    assert isinstance(first, TrainedAdapter) and isinstance(second, TrainedAdapter)
    assert first.head is not None and second.head is not None and len(fits) == 1
    assert not np.array_equal(first.head.weight, second.head.weight)
