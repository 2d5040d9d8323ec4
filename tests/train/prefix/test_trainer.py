"""Suffix-only training on cached prefixes: the adapters of TRL and PEFT on whole prompts."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import cast

import pytest
import torch
from pytest import MonkeyPatch

from guard.errors import GuardError
from tests.train import conftest as toys
from train.adapter import trl
from train.adapter.trained import TrainedAdapter, verdict_logits
from train.job import Job
from train.prefix import cache
from train.prefix import trainer as shared_prefix
from train.prefix.cache import Budget, PrefixCache
from train.prefix.fleet import Fleet, prefix_of
from train.prefix.member import Member

pytestmark = pytest.mark.slow


def groups_of(monkeypatch: MonkeyPatch) -> list[list[int]]:
    """The seeds that are trained together, from here on."""
    groups: list[list[int]] = []
    original = Fleet.train

    def spy(group: Fleet) -> None:
        groups.append([member.job.seed for member in group.members])
        original(group)

    monkeypatch.setattr(Fleet, "train", spy)
    return groups


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Up to rounding, relative to what training has moved.

    Adam's division blows it up where a gradient is next to nothing.
    """
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert moved > 0.02
    assert toys.largest_difference(found, expected) < 1e-2 * moved


@pytest.mark.parametrize(
    "settings",
    [
        # Of 64 rows the last part of an epoch is not full.
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, "weight_decay": 0.3},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.25, "max_grad_norm": 0.05},
        {"optim": "sgd", "optim_args": "momentum=0.5", "learning_rate": 1.0},
    ],
)
def test_twenty_steps_are_those_of_trl(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch, settings: dict[str, object]
) -> None:
    """TRL's go through the model in parts."""
    monkeypatch.setattr(trl, "BATCH_TOKENS", 300)
    one, reference = (
        make_job("alora", **{"max_steps": 20, "learning_rate": 3e-3, "runs": runs} | settings)
        for runs in ("one", "reference")
    )
    assert_same(toys.fitted(one)[0], toys.weights(trl.fit(reference, toys.data(reference))))


def test_rules_and_ranks_in_one_pass_are_trl_s_one_by_one(make_job: toys.MakeJob) -> None:
    def of_rule(number: int, runs: str) -> Job:
        title = "Nobody may " + " ".join(["ever"] * number) + " mention a refund."
        rule = toys.RULE.model_copy(update={"id": f"toy{number}", "title": title})
        # The epsilon: one of these adapters divides gradients by next to nothing, and a rounding in
        # them is 1 % of it.
        steps = {"max_steps": 20 - number, "learning_rate": 3e-3, "adam_epsilon": 1e-6}
        job = replace(make_job("alora", seed=number, runs=runs, **steps), rule=rule)
        toys.write_toy_data(job.data, rule=rule.id)
        return toys.with_lora(job, r=16 - 5 * number)

    together = toys.fitted(*(of_rule(number, "together") for number in range(3)))
    for number, found in enumerate(together):
        reference = of_rule(number, "reference")
        assert_same(found, toys.weights(trl.fit(reference, toys.data(reference))))


def test_without_room_training_is_in_turn(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> None:
    groups = groups_of(monkeypatch)
    jobs = [make_job("alora", seed=seed, max_steps=3, runs=f"runs{seed}") for seed in (0, 1, 2)]
    rows = toys.data(jobs[0])
    first = toys.fitted(*jobs)
    monkeypatch.setattr(cache, "FREE_SHARE", 1e-9)  # nothing is kept
    again = [make_job("alora", seed=seed, max_steps=3, runs=f"again{seed}") for seed in (0, 1, 2)]
    parts = [replace(rows, train=rows.train[:40]), replace(rows, train=rows.train[20:]), rows]
    second = toys.fitted_to(list(zip(again, parts, strict=True)))
    assert groups == [[0, 1, 2], [0], [1], [2]]
    assert toys.largest_difference(first[2], second[2]) < 1e-3


def test_divergence_ends_its_adapter_alone(make_job: toys.MakeJob) -> None:
    diverging = make_job("alora", max_steps=6, learning_rate=1e30, max_grad_norm=0)
    other = make_job("alora", seed=1, max_steps=6)
    fits = shared_prefix.fit([(job, toys.data(job)) for job in (diverging, other)])
    with pytest.raises(GuardError, match=r"toy alora seed 0, step \d: the loss is NaN or infinite"):
        raise cast(GuardError, next(fits))
    kept = toys.adapter_weights(next(fits))
    (alone,) = toys.fitted(make_job("alora", seed=1, max_steps=6, runs="alone"))
    assert toys.largest_difference(kept, alone) < 1e-4


def test_logits_of_two_rules_are_plain_peft_s(make_job: toys.MakeJob) -> None:
    """Of validation rows, and of a study's test rows."""
    jobs = [make_job("alora", seed=seed, max_steps=6, runs="runs") for seed in (0, 1)]
    jobs.append(replace(jobs[0], rule=toys.RULE.model_copy(update={"title": "Short."}), seed=2))
    jobs[1] = replace(jobs[1], of_study=True)
    fits = shared_prefix.fit([(job, toys.data(job)) for job in jobs])
    for job, fitted_job in zip(jobs, fits, strict=True):
        assert isinstance(fitted_job, TrainedAdapter)
        rows = [*toys.data(job).validation, *(toys.data(job).test if job.of_study else ())]
        prompts = [row.prompt for row in rows]
        expected = verdict_logits(fitted_job.model, prompts, job.builder)
        assert fitted_job.validation_logits == pytest.approx(expected, abs=1e-4)
        assert max(expected) - min(expected) > 0.1


def test_groups_let_go_of_what_they_take(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> None:
    jobs = [make_job("alora", seed=seed, max_steps=2, runs="runs") for seed in range(5)]
    # q, k, v, o, gate, up, down: in and out
    factors = [64, 64, 64, 32, 64, 32, 64, 64, 64, 128, 64, 128, 128, 64]
    one = 16 * 2 * 16 * sum(factors)
    prefixes = set(map(prefix_of, toys.data(jobs[0]).train))
    per_token = 2 * 2 * 2 * 16 * 4
    room = Budget(host=per_token * sum(map(len, prefixes)) + 2 * one)
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: room)
    begun: list[weakref.ref[Member]] = []
    alive: list[list[bool]] = []
    original = Fleet.train

    def spy(group: Fleet) -> None:
        gc.collect()
        alive.append([member() is not None for member in begun])
        begun.extend(map(weakref.ref, group.members))
        original(group)

    monkeypatch.setattr(Fleet, "train", spy)
    toys.fitted(*jobs)
    assert alive == [[], [False] * 2, [False] * 4]


def test_the_same_prefixes_are_shared_anyway(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    """What reads nothing else shares those that have no room either, but for weights."""
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: Budget(host=10**7))
    groups = groups_of(monkeypatch)
    jobs = [make_job("alora", seed=seed, max_steps=1, runs="runs") for seed in range(7)]
    rows = toys.data(jobs[0])
    fewer = replace(rows, train=rows.train[:40])
    backwards = replace(rows, train=rows.train[39::-1])
    with monkeypatch.context() as costly:
        costly.setattr(PrefixCache, "bytes_per_token", 10**6)
        toys.fitted_to([(jobs[0], rows), (jobs[1], rows), (jobs[2], backwards)])
        toys.fitted_to([(jobs[3], fewer), (jobs[4], rows)])
    assert groups == [[0, 1, 2], [3], [4]]
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: Budget(host=1))
    toys.fitted(*jobs[5:])
    assert groups[3:] == [[5], [6]]


def test_a_bfloat16_base_trains_float32_adapters(make_job: toys.MakeJob) -> None:
    exact, rounded = (
        make_job("alora", max_steps=20, learning_rate=3e-3, runs=runs)
        for runs in ("exact", "rounded")
    )
    rounded = replace(rounded, recipe=rounded.recipe.model_copy(update={"dtype": "bfloat16"}))
    expected, found = toys.fitted(exact, rounded)
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    moved = max(float(weight.abs().max()) for name, weight in expected.items() if "lora_B" in name)
    assert toys.largest_difference(found, expected) < 0.2 * moved


def test_adapters_of_other_modules_are_another_group(make_job: toys.MakeJob) -> None:
    job = make_job("alora", max_steps=2)
    few = toys.with_lora(replace(job, seed=1), target_modules=["q_proj"])
    every, one = toys.fitted(job, few)
    assert (len(every), len(one)) == (28, 4)
