"""Steps of adapters that are trained together: what a pass holds, and what it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from guard.prompt.decoder import PromptBuilder
from tests.train.conftest import MakeJob, calls_of, data, fitted, largest_difference
from train.adapter.load import load_base
from train.adapter.settings import trainer_config
from train.job import Job
from train.prefix import fleet, readout
from train.prefix import trainer as shared_prefix
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.fleet import Fleet, Pack, Packer, longest_suffix, prefix_of
from train.prefix.member import Member
from train.prefix.prefixes import Prefixes
from train.prefix.stacked import StackedModel

pytestmark = pytest.mark.slow


def test_prefixes_go_through_the_base_once(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    """For all epochs, seeds and rules, and before the clock starts."""
    filled = calls_of(monkeypatch, PrefixCache, "fill")
    begun_after: list[int] = []
    begin = Member.begin
    monkeypatch.setattr(
        Member, "begin", lambda *args: (begun_after.append(len(filled)), begin(*args))[1]
    )
    computed = calls_of(monkeypatch, PrefixCache, "_computed")
    jobs = [make_job("alora", seed=seed, num_train_epochs=2, runs=f"runs{seed}") for seed in (0, 1)]
    distinct = set()
    for job in jobs:
        distinct.update(map(prefix_of, (*data(job).train, *data(job).validation)))
    fitted(*jobs)
    # One alone measures what a token takes.
    assert sum(len(prefixes) for _, prefixes in computed if len(prefixes) > 1) == len(distinct)
    assert begun_after == [1, 1]


def test_adapters_are_the_same_in_place_or_padded(make_job: MakeJob) -> None:
    def trained(*, in_place: bool) -> list[torch.Tensor]:
        name = str(in_place)
        jobs = [make_job("alora", seed=seed, max_steps=8, runs=f"{name}{seed}") for seed in (0, 1)]
        members = [Member(job, data(job), trainer_config(job)) for job in jobs]
        model = load_base(jobs[0].recipe, members[0].config.device)
        Fleet(model, members, Budget(host=10**9), in_place=in_place).train()
        return [weight.detach() for weight in (*members[0].weights, *members[1].weights)]

    for weight, expected in zip(trained(in_place=False), trained(in_place=True), strict=True):
        assert float((weight - expected).abs().max()) < 2e-3 * float(expected.abs().max())


def test_an_adapter_at_rest_is_left_out(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    passes = calls_of(monkeypatch, StackedModel, "logits")
    seeds = calls_of(monkeypatch, torch, "manual_seed")
    fitted(
        *(make_job("alora", seed=seed, max_steps=2 * seed, runs=f"runs{seed}") for seed in (1, 2))
    )
    assert [adapters for _, adapters, *_ in passes[:4]] == [[0, 1], [0, 1], [1], [1]]
    drawn = [seed for (seed,) in seeds if seed > 10]
    assert drawn == [1_000_003, 1_000_004, 2_000_008, 2_000_009]


def test_a_long_suffix_bounds_the_last_pass(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = make_job("alora", max_steps=1, runs="runs")
    longest = longest_suffix(data(job).validation)
    monkeypatch.setattr(fleet, "SUFFIX_TOKENS", 2 * longest)
    passes = calls_of(monkeypatch, Fleet, "_verdict_logits")
    fitted(*(replace(job, seed=seed) for seed in range(5)))
    held = [(len(adapters), len(rows)) for _, adapters, rows in passes]
    assert held == [(2, 32), (2, 32), (1, 32)]


@pytest.mark.parametrize("limit", ["SUFFIX_TOKENS", "READ_BYTES"])
@pytest.mark.parametrize("rows", [1, 8])
def test_bounded_passes(make_job: MakeJob, monkeypatch: MonkeyPatch, rows: int, limit: str) -> None:
    """What reads the same shares them."""

    def job(seed: int, runs: str) -> Job:
        steps = {"max_steps": 2, "per_device_train_batch_size": rows}
        return make_job("alora", seed=seed, runs=runs, **steps)

    (expected,) = fitted(job(1, "alone"))
    passes: list[tuple[int, int, int]] = []
    original = StackedModel.logits

    def spy(stacked: StackedModel, adapters: Any, prefixes: Prefixes, suffixes: Any) -> Any:
        if torch.is_grad_enabled():
            read = sum(states.nbytes for states in prefixes.states)
            passes.append((len(adapters), len(suffixes), read))
        return original(stacked, adapters, prefixes, suffixes)

    monkeypatch.setattr(StackedModel, "logits", spy)
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: Budget(disk=10**9, host=10**7))
    monkeypatch.setattr(
        PrefixCache, "bytes_to_fetch", lambda cache, prefix: cache.bytes_per_token * len(prefix)
    )
    longest = longest_suffix(data(job(0, "alone")).train)
    monkeypatch.setattr(fleet, limit, 3 * longest if limit == "SUFFIX_TOKENS" else 40_000)
    # Of a seed: the same conversations in the same order.
    found = fitted(*(job(seed, runs) for seed in (0, 1) for runs in "ab"))
    for each in found[2:]:
        assert largest_difference(each, expected) < 1e-3
    if limit == "SUFFIX_TOKENS":
        assert max(suffixes for _, suffixes, _ in passes) <= 3
    else:
        assert max(taken for _, _, taken in passes) <= 40_000
        assert min(adapters for adapters, _, _ in passes) == 2


def test_validation_logits_are_float32(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    """As the engine's and plain PEFT's are: thresholds are made of them."""
    job = make_job("alora", max_steps=1)
    dtypes: list[torch.dtype] = []
    original = readout.yes_minus_no

    def spy(logits: torch.Tensor, builder: PromptBuilder) -> torch.Tensor:
        dtypes.append(logits.dtype)
        return original(logits, builder)

    monkeypatch.setattr(readout, "yes_minus_no", spy)
    fitted(replace(job, recipe=job.recipe.model_copy(update={"dtype": "bfloat16"})))
    assert set(dtypes) == {torch.float32}


Reader = tuple[str, list[Prefix]]


def packed(readers: list[Reader], room: int) -> list[list[str]]:
    def fits(pack: Pack[Reader], reader: Reader, more_bytes: int) -> bool:
        return pack.prefix_bytes + more_bytes <= room

    packer = Packer[Reader](prefixes=lambda reader: reader[1], size=len, fits=fits)
    return [[name for name, _ in pack.items] for pack in packer.packs(readers)]


def test_neighbours_are_packed_while_there_is_room() -> None:
    """What is read already takes nothing, and what never fits is alone."""
    readers = [("a", [(1, 2)]), ("b", [(3, 4)]), ("c", [(5, 6)])]
    assert packed(readers, 4) == [["a", "b"], ["c"]]
    assert packed(readers, 6) == [["a", "b", "c"]]
    sharing = [("a", [(1, 2)]), ("b", [(1, 2), (1, 2)]), ("c", [(1, 2), (3,)])]
    assert packed(sharing, 2) == [["a", "b"], ["c"]]
    assert packed(readers[:2], 0) == [["a"], ["b"]] and packed([], 9) == []
