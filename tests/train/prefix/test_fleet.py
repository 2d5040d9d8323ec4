"""Adapters that are trained together: what a pass holds and reads, how they end and resume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from tests.train import conftest as toys
from train.adapter import trl
from train.adapter.steps import Progress
from train.job import Job
from train.prefix import fleet, readout
from train.prefix import trainer as shared_prefix
from train.prefix.cache import Budget, PrefixCache
from train.prefix.fleet import Fleet, longest_suffix, prefix_of
from train.prefix.member import CHECKPOINT, Member
from train.prefix.prefixes import Prefixes
from train.prefix.stacked import StackedModel

pytestmark = pytest.mark.slow


def test_prefixes_go_through_the_base_once(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    """For all epochs, seeds and rules."""
    computed = toys.calls_of(monkeypatch, PrefixCache, "_computed")
    jobs = [make_job("alora", seed=seed, num_train_epochs=2, runs=f"runs{seed}") for seed in (0, 1)]
    distinct = set()
    for job in jobs:
        distinct.update(map(prefix_of, (*toys.data(job).train, *toys.data(job).validation)))
    toys.fitted(*jobs)
    # One alone measures what a token takes.
    assert sum(len(prefixes) for _, prefixes in computed if len(prefixes) > 1) == len(distinct)


def test_a_long_suffix_bounds_the_last_pass(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    job = make_job("alora", max_steps=1, runs="runs")
    longest = longest_suffix(toys.data(job).validation)
    monkeypatch.setattr(fleet, "SUFFIX_TOKENS", 2 * longest)
    passes = toys.calls_of(monkeypatch, Fleet, "_verdict_logits")
    toys.fitted(*(replace(job, seed=seed) for seed in range(5)))
    held = [(len(adapters), len(rows)) for _, adapters, rows in passes]
    assert held == [(2, 32), (2, 32), (1, 32)]


@pytest.mark.parametrize("limit", ["SUFFIX_TOKENS", "READ_BYTES"])
@pytest.mark.parametrize("rows", [1, 8])
def test_bounded_passes(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch, rows: int, limit: str
) -> None:
    """What reads the same shares them."""

    def job(seed: int, runs: str) -> Job:
        steps = {"max_steps": 2, "per_device_train_batch_size": rows}
        return make_job("alora", seed=seed, runs=runs, **steps)

    (expected,) = toys.fitted(job(1, "alone"))
    passes: list[tuple[int, int, int]] = []
    original = StackedModel.logits

    def spy(stacked: StackedModel, adapters: Any, prefixes: Prefixes, suffixes: Any) -> Any:
        if torch.is_grad_enabled():
            read = sum(states.nbytes for states in prefixes.states)
            passes.append((len(adapters), len(suffixes), read))
        return original(stacked, adapters, prefixes, suffixes)

    monkeypatch.setattr(StackedModel, "logits", spy)
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: Budget(host=10**9))
    monkeypatch.setattr(
        PrefixCache, "bytes_to_fetch", lambda cache, prefix: cache.bytes_per_token * len(prefix)
    )
    longest = longest_suffix(toys.data(job(0, "alone")).train)
    monkeypatch.setattr(fleet, limit, 3 * longest if limit == "SUFFIX_TOKENS" else 40_000)
    # Of a seed: the same conversations in the same order.
    found = toys.fitted(*(job(seed, runs) for seed in (0, 1) for runs in "ab"))
    for each in found[2:]:
        assert toys.largest_difference(each, expected) < 1e-3
    if limit == "SUFFIX_TOKENS":
        assert max(suffixes for _, suffixes, _ in passes) <= 3
    else:
        assert max(taken for _, _, taken in passes) <= 40_000
        assert min(adapters for adapters, _, _ in passes) == 2


def test_validation_logits_are_float32(make_job: toys.MakeJob, monkeypatch: MonkeyPatch) -> None:
    """As the engine's and plain PEFT's are: thresholds are made of them."""
    job = make_job("alora", max_steps=1)
    made = toys.calls_of(monkeypatch, readout, "yes_minus_no")
    toys.fitted(toys.with_recipe(job, dtype="bfloat16"))
    assert {logits.dtype for logits, _ in made} == {torch.float32}


@dataclass(frozen=True)
class Company:
    """Adapters of these ranks that are trained together, and how the killed ones go on."""

    ranks: tuple[int, ...]
    is_alone_later: bool = False
    dropout: float = 0.0
    head: dict[str, object] | None = None


@pytest.mark.parametrize(
    "company",
    [
        Company((1, 16), is_alone_later=True),
        Company((4, 16)),
        Company((16,), dropout=0.3),
        Company((4, 16), head={}),
    ],
)
def test_killed_adapters_go_on_in_whatever_company_to_what_they_would_have_been(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch, company: Company
) -> None:
    def jobs(runs: str) -> list[Job]:
        made: list[Job] = []
        for seed, rank in enumerate(company.ranks):
            steps = {"max_steps": 20 - 4 * seed, "save_steps": 5 - 2 * seed}
            job = make_job("alora", runs=f"{runs}{seed}", seed=seed, learning_rate=3e-3, **steps)
            job = toys.with_lora(job, r=rank, lora_dropout=company.dropout)
            made.append(toys.with_settings(job, head=company.head))
        return made

    update, done = Member.update, []

    def killed(member: Member, loss: float) -> None:
        if member.step == 12:
            raise KeyboardInterrupt
        update(member, loss)

    def counted(member: Member, loss: float) -> None:
        done.append(member.step)
        update(member, loss)

    # A head is averaged: its last evaluation tells of all steps.
    toys.record_losses(monkeypatch, lambda step: 0.3 if step == 20 else 0.4)
    expected = toys.fitted(*jobs("whole"))
    monkeypatch.setattr(Member, "update", killed)
    with pytest.raises(KeyboardInterrupt):
        toys.fitted(*jobs("killed"))
    monkeypatch.setattr(Member, "update", counted)
    left = jobs("killed")
    steps = [torch.load(job.scratch / CHECKPOINT)["step"] for job in left]
    assert steps == [10, 12][: len(left)]
    found = [toys.fitted(job)[0] for job in left] if company.is_alone_later else toys.fitted(*left)
    assert 0 not in done and max(done) == 19
    for one, other in zip(found, expected, strict=True):
        largest = max(float(weight.abs().max()) for weight in other.values())
        assert toys.largest_difference(one, other) < 2e-3 * largest


def test_no_bound_on_the_gradients_means_none(make_job: toys.MakeJob) -> None:
    found, expected = (
        toys.fitted(make_job("alora", max_steps=4, max_grad_norm=norm, runs=str(norm)))[0]
        for norm in (0, 1e9)
    )
    assert toys.largest_difference(found, expected) == 0


def test_a_checkpoint_each_share_of_the_steps(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(
        torch, "save", lambda state, path: (saved.append(state["step"]), path.touch())
    )
    toys.fitted(make_job("alora", max_steps=7, save_steps=0.4))
    toys.fitted(make_job("alora", max_steps=7, save_steps=0, runs="never"))
    assert saved == [3, 6]


@pytest.mark.parametrize("method", toys.ADAPTERS)
def test_training_takes_the_least_steps(
    make_job: toys.MakeJob, monkeypatch: MonkeyPatch, method: str
) -> None:
    losses = toys.calls_of(monkeypatch, Progress, "loss")
    job = toys.with_settings(make_job(method, n_train=16, num_train_epochs=1), min_steps=7)
    toys.fitted(job) if method == "alora" else trl.fit(job, toys.data(job))
    assert len(losses) == 7
