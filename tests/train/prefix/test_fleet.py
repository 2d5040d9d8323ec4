"""Steps of adapters that are trained together: what a pass holds, and what it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from guard.prompt.decoder import PromptBuilder
from tests.train.conftest import MakeJob, data
from tests.train.prefix.conftest import fitted, largest_difference
from train.adapter.load import load_base
from train.adapter.settings import trainer_config
from train.examples import Row
from train.job import Job
from train.prefix import fleet
from train.prefix import trainer as shared_prefix
from train.prefix.budget import Budget
from train.prefix.cache import PrefixCache
from train.prefix.fleet import Fleet
from train.prefix.member import Member
from train.prefix.prefixes import Prefixes
from train.prefix.stacked import StackedModel

pytestmark = pytest.mark.slow


def test_prefixes_go_through_the_base_once_for_all_epochs_seeds_and_rules(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    original = PrefixCache._computed

    def spy(
        cache: PrefixCache, prefixes: list[tuple[int, ...]]
    ) -> dict[tuple[int, ...], torch.Tensor]:
        computed.append(len(prefixes))
        return original(cache, prefixes)

    monkeypatch.setattr(PrefixCache, "_computed", spy)
    jobs = [make_job("alora", seed=seed, num_train_epochs=2, runs=f"runs{seed}") for seed in (0, 1)]
    distinct = {
        row.prompt.token_ids[: row.prompt.invocation_start]
        for job in jobs
        for row in (*data(job).train, *data(job).validation)
    }
    fitted(*jobs)
    assert sum(computed) - computed.count(1) == len(distinct)  # some measure what a token takes


def test_adapters_are_the_same_whether_prefixes_are_read_in_place_or_padded(
    make_job: MakeJob,
) -> None:
    def trained(*, in_place: bool) -> list[torch.Tensor]:
        jobs = []
        for seed in (0, 1):
            jobs.append(make_job("alora", seed=seed, max_steps=8, runs=f"{in_place}{seed}"))
        members = [Member(job, data(job), trainer_config(job)) for job in jobs]
        model = load_base(jobs[0].recipe, members[0].config.device)
        group = Fleet(model, members, Budget(host=10**9), in_place=in_place)
        group.train()
        return [weight.detach() for weight in (*members[0].weights, *members[1].weights)]

    for weight, expected in zip(trained(in_place=False), trained(in_place=True), strict=True):
        assert float((weight - expected).abs().max()) < 2e-3 * float(expected.abs().max())


def test_an_adapter_at_rest_is_left_out_of_the_passes_and_of_the_masks_drawn(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting: list[list[int]] = []
    seeds: list[int] = []
    logits, manual_seed = StackedModel.logits, torch.manual_seed
    monkeypatch.setattr(
        StackedModel,
        "logits",
        lambda self, adapters, *more: (acting.append(adapters), logits(self, adapters, *more))[1],
    )
    monkeypatch.setattr(
        torch, "manual_seed", lambda seed: (seeds.append(seed), manual_seed(seed))[1]
    )
    fitted(
        *(make_job("alora", seed=seed, max_steps=2 * seed, runs=f"runs{seed}") for seed in (1, 2))
    )
    assert acting[:4] == [[0, 1], [0, 1], [1], [1]]
    assert [seed for seed in seeds if seed > 10] == [1_000_003, 1_000_004, 2_000_008, 2_000_009]


def test_the_last_pass_holds_as_many_adapters_as_the_longest_suffix_allows(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("alora", max_steps=1, runs="runs")
    longest = max(
        len(row.prompt.token_ids) - row.prompt.invocation_start for row in data(job).validation
    )
    monkeypatch.setattr(fleet, "SUFFIX_TOKENS", 2 * longest)
    passes: list[tuple[int, int]] = []
    original = Fleet._verdict_logits

    def spy(group: Fleet, adapters: list[int], rows: list[Row]) -> list[list[float]]:
        passes.append((len(adapters), len(rows)))
        return original(group, adapters, rows)

    monkeypatch.setattr(Fleet, "_verdict_logits", spy)
    fitted(*(replace(job, seed=seed) for seed in range(5)))
    assert passes == [(2, 32), (2, 32), (1, 32)]


def test_the_clock_starts_when_the_prefixes_are_there(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for owner, name in ((PrefixCache, "fill"), (Member, "begin")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, name=name, original=original: (order.append(name), original(*args))[1],
        )
    fitted(make_job("alora", max_steps=1))
    assert order[:2] == ["fill", "begin"]


@pytest.mark.parametrize("limit", ["SUFFIX_TOKENS", "READ_BYTES"])
@pytest.mark.parametrize("rows", [1, 8])
def test_passes_are_bounded_and_what_reads_the_same_shares_them(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, rows: int, limit: str
) -> None:
    def job(seed: int, runs: str) -> Job:
        return make_job(
            "alora", seed=seed, max_steps=2, per_device_train_batch_size=rows, runs=runs
        )

    (expected,) = fitted(job(1, "alone"))
    passes: list[tuple[int, int, int]] = []
    original = StackedModel.logits

    def spy(
        stacked: StackedModel, adapters: list[int], prefixes: Prefixes, suffixes: list[list[int]]
    ) -> torch.Tensor:
        if torch.is_grad_enabled():
            passes.append(
                (len(adapters), len(suffixes), sum(states.nbytes for states in prefixes.states))
            )
        return original(stacked, adapters, prefixes, suffixes)

    monkeypatch.setattr(StackedModel, "logits", spy)
    monkeypatch.setattr(shared_prefix, "budget_of", lambda *_: Budget(disk=10**9, host=10**7))
    monkeypatch.setattr(
        PrefixCache, "bytes_to_fetch", lambda cache, prefix: cache.bytes_per_token * len(prefix)
    )
    longest = max(
        len(row.prompt.token_ids) - row.prompt.invocation_start
        for row in data(job(0, "alone")).train
    )
    monkeypatch.setattr(fleet, limit, 3 * longest if limit == "SUFFIX_TOKENS" else 40_000)
    found = fitted(
        *(job(seed, runs) for seed in (0, 1) for runs in "ab")
    )  # of a seed: the same conversations in the same order
    for each in found[2:]:
        assert largest_difference(each, expected) < 1e-3
    if limit == "SUFFIX_TOKENS":
        assert max(suffixes for _, suffixes, _ in passes) <= 3
    else:
        assert max(taken for _, _, taken in passes) <= 40_000
        assert min(adapters for adapters, _, _ in passes) == 2


def test_the_validation_logits_of_a_bfloat16_base_are_float32(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine's and plain PEFT's are: thresholds are made of them."""
    job = make_job("alora", max_steps=1)
    narrow = replace(job, recipe=job.recipe.model_copy(update={"dtype": "bfloat16"}))
    dtypes: list[torch.dtype] = []
    original = fleet.yes_minus_no

    def spy(logits: torch.Tensor, builder: PromptBuilder) -> torch.Tensor:
        dtypes.append(logits.dtype)
        return original(logits, builder)

    monkeypatch.setattr(fleet, "yes_minus_no", spy)
    fitted(narrow)
    assert set(dtypes) == {torch.float32}
