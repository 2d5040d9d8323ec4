"""Trains aLoRA adapters on cached prefixes, many at once.

No weight of an aLoRA touches a position before the invocation: what is trained is a function of the
suffix and of the prefix's keys and values, which are constants of the base. The settings are TRL's
(SFTConfig), and so is the result: tests/train/prefix/test_trainer.py holds it to what TRL and PEFT
train on whole prompts. Knows nothing of thresholds, cards or files of examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.recipe import Recipe
from train.adapter.load import load_base
from train.adapter.settings import lora_config, trainer_config
from train.adapter.trained import TrainedAdapter, with_head_of_own_rows
from train.base import load_served_base
from train.examples import Rows
from train.job import Job
from train.prefix.cache import Budget, PrefixCache, budget_of
from train.prefix.fleet import Fleet, Pack, packs, prefix_of
from train.prefix.member import Member
from train.prefix.stacked import layers

WEIGHT_BYTES = 16  # of a trained weight: itself, its gradient and two moments
# Of one beside a head also the mean of all steps, a copy while that is evaluated, and the best one.
AVERAGED_WEIGHT_BYTES = 28


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedAdapter | GuardError]:
    """Train the aLoRA adapters of `jobs`, all on one base.

    Yields them in order, each to be used before the next. As many neighbours are trained together
    as have room for their prefixes and weights; seeds of a rule share their prefixes. A job whose
    loss diverges yields its error and leaves the others untouched. Every job resumes from its own
    checkpoint. Raises GuardError for a base or modules that cached prefixes do not suit.
    """
    first_job = jobs[0][0]
    model = load_base(first_job.recipe, trainer_config(first_job).device)
    budget = budget_of(first_job, model.device)
    # Members are made as they are needed and each fleet has its own frame: what a group takes is
    # free before the next begins.
    members = (Member(job, data, trainer_config(job)) for job, data in jobs)
    for group, budget_left in _groups(members, model, budget):
        yield from _fitted(Fleet(model, group, budget_left), first_job.recipe)


def _fitted(fleet: Fleet, recipe: Recipe) -> Iterator[TrainedAdapter | GuardError]:
    fleet.train()
    logits: list[list[float]] = []
    if recipe.trains_on_served_base:
        logits = fleet.logits()
    fleet.stacked.take_out()
    served = fleet.stacked.model
    if not recipe.trains_on_served_base:
        served = load_served_base(recipe, served.device)
    for index, member in enumerate(fleet.members):
        if member.failure:
            yield member.failure
            continue
        adapter = fleet.stacked.as_peft(index, served)
        trained = TrainedAdapter(adapter, member.job)
        if member.head:
            trained = replace(trained, head=member.head.as_trained())
        if recipe.trains_on_served_base:
            answered = logits[index]
        else:  # what it was trained on gives other verdicts
            answered = trained.logits([row.prompt for row in member.answered])
        trained = replace(trained, validation_logits=answered)
        try:
            yield with_head_of_own_rows(trained, member.data)
        except GuardError as error:  # states that are not finite
            yield error
        cast(Any, adapter).unload()


@dataclass(frozen=True)
class _Candidate:
    """A member, and how many weights it has in each layer that it acts on."""

    member: Member
    layers: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        weights = sum(self.layers.values())
        if self.member.answers_by_head:
            return AVERAGED_WEIGHT_BYTES * weights
        return WEIGHT_BYTES * weights


def _groups(
    members: Iterable[Member], model: PreTrainedModel, budget: Budget
) -> Iterator[tuple[list[Member], Budget]]:
    """Neighbours that are trained together, and the budget that their weights leave for prefixes.
    They act on the same layers, and there is room for their weights where the model is and for all
    their prefixes. A member that needs more is alone, except for those that read no other prefixes.
    """
    bytes_per_token = PrefixCache(model, Budget()).bytes_per_token
    # Adapters' weights share this tier with prefixes.
    tier = "device" if model.device.type == "cuda" else "host"
    tier_bytes = getattr(budget, tier)

    def candidate_of(member: Member) -> _Candidate:
        where = member.job.where("lora")
        return _Candidate(member, layers(model, lora_config(member.job), where))

    def weight_bytes(pack: Pack[_Candidate]) -> int:
        return sum(candidate.weight_bytes for candidate in pack.items)

    def fits(pack: Pack[_Candidate], candidate: _Candidate, more_bytes: int) -> bool:
        before = weight_bytes(pack)
        weights = before + candidate.weight_bytes
        if candidate.layers.keys() != pack.items[-1].layers.keys() or weights > tier_bytes:
            return False
        reads_nothing_else = more_bytes == 0 and before + pack.prefix_bytes > budget.total
        return reads_nothing_else or weights + pack.prefix_bytes + more_bytes <= budget.total

    groups = packs(
        map(candidate_of, members),
        prefixes=lambda candidate: map(prefix_of, candidate.member.read),
        size=lambda prefix: bytes_per_token * len(prefix),
        fits=fits,
    )
    for pack in groups:
        bytes_left = max(0, tier_bytes - weight_bytes(pack))
        yield [candidate.member for candidate in pack.items], replace(budget, **{tier: bytes_left})
