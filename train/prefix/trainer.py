"""Trains aLoRA adapters on cached prefixes, many at once. Knows nothing of thresholds, cards or files of examples.

No weight of an aLoRA touches a position before the invocation: what is trained is a function of the suffix and of the
prefix's keys and values, which are constants of the base. So a step computes suffixes only, forward and backward, and the
suffixes of several adapters go through one pass: the base's matrix products over all rows together, the low-rank ones as
one batched product with a matrix per adapter. Every adapter has its own optimizer, schedule and order of rows, so what it
becomes does not depend on which others are trained beside it (only the masks of a lora_dropout do). The settings are TRL's
(SFTConfig), and so is the result: tests/train/prefix/test_trainer.py holds it to what TRL and PEFT train on whole prompts.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.recipe import Recipe
from train.adapter.early_stopping import validation_loss
from train.adapter.load import load_base, load_served_base
from train.adapter.predict import verdict_logits
from train.adapter.settings import lora_config, refusals, trainer_config
from train.examples import Row, Rows
from train.job import Job
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.member import Member
from train.prefix.memory import free_memory
from train.prefix.stacked import StackedModel, layers
from train.prefix.suffixes import Prefixes, attend_to_prefixes

GIB = 2**30
SUFFIX_TOKENS = 4096  # that a pass computes, padded: twice as many are no faster on a CPU
READ_BYTES = GIB  # of keys and values that a pass brings to where the model is
FREE_SHARE = (
    0.5  # of the memory that is free at the start, for prefixes, unless the recipe states how much
)
WEIGHT_BYTES = 16  # of one that is trained: itself, its gradient and two moments


@dataclass(frozen=True)
class Fitted:
    """A trained adapter in PEFT's layers on the base that serves it, and log P(yes) - log P(no) of its validation rows there, in nats."""

    model: PeftModel
    validation_logits: list[float]


def fit(jobs: Sequence[tuple[Job, Rows]], processes: int = 1) -> Iterator[Fitted | GuardError]:
    """Train the aLoRA adapters of `jobs`, all on one base. Yields them in order, each model to be used before the next.

    As many neighbours are trained together as have room for their prefixes and weights, in this process's part of the memory that
    `processes` share; seeds of a rule share their prefixes. A job whose loss diverges yields its error and leaves the others
    untouched. Every job resumes from its own checkpoint. Raises GuardError for what cannot be trained on cached prefixes.
    """
    first = jobs[0][0]
    model = load_base(first.recipe, trainer_config(first).device)
    budget = _budget(first, model.device, processes)
    # Members are made as they are needed and each fleet has its own frame: what a group takes is free before the next begins.
    for group, left in _groups(
        (Member(job, data, trainer_config(job)) for job, data in jobs), model, budget
    ):
        yield from _fitted(Fleet(model, group, left), first.recipe)


def _fitted(fleet: Fleet, recipe: Recipe) -> Iterator[Fitted | GuardError]:
    fleet.train()
    logits = [] if recipe.quantization else fleet.validation_logits()
    fleet.stacked.take_out()
    model = fleet.stacked.model
    served = load_served_base(recipe, model.device) if recipe.quantization else model
    for index, member in enumerate(fleet.members):
        if member.failure:
            yield member.failure
            continue
        adapter = fleet.stacked.as_peft(index, served)
        if (
            recipe.quantization
        ):  # the verdicts of the base that it was trained on are not those that are served
            validation = verdict_logits(
                adapter, [row.prompt for row in member.data.validation], member.job.builder
            )
        else:
            validation = logits[index]
        yield Fitted(adapter, validation)
        cast(Any, adapter).unload()


class Fleet:
    """Adapters that are trained together: one frozen base, the prefixes that they read, a member for each adapter."""

    def __init__(self, model: PreTrainedModel, members: Sequence[Member], budget: Budget) -> None:
        self.members = members
        with refusals("transformers", f"recipe '{members[0].job.recipe.name}', base"):
            attend_to_prefixes(
                model, lambda prefix: PrefixCache(model, Budget()).read([tuple(prefix)])[0]
            )
        self.stacked = StackedModel(
            model,
            [lora_config(member.job) for member in members],
            [member.config.seed for member in members],
        )
        self.prefixes = PrefixCache(model, budget, members[0].job.runs.root)

    def train(self) -> None:
        """All steps of all members; each then has its best epoch's weights, if it stops early, else its last."""
        self.begin()
        steps = sum(member.steps for member in self.members)
        with tqdm(
            total=steps,
            initial=sum(member.step for member in self.members),
            desc="train",
            unit="step",
            leave=False,
        ) as bar:
            while any(member.running for member in self.members):
                for loss in self.step():
                    bar.update(math.isfinite(loss))
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        for member in self.members:
            if member.early_stopping:
                member.early_stopping.restore(member.weights)

    def begin(self) -> None:
        """Compute and keep the prefixes that every epoch reads, as many as there is room for; then go to where each member stands."""
        prefixes = {_prefix(row) for member in self.members for row in member.read}
        if left_out := self.prefixes.fill(prefixes):
            all_tokens, gib = (
                sum(map(len, prefixes)),
                left_out * self.prefixes.bytes_per_token / GIB,
            )
            tqdm.write(f"no room for {left_out:,} of {all_tokens:,} tokens of prefixes: computed whenever a step reads them "
                       f"({gib:.1f} GiB more in the recipe's prefix_cache_gib would hold them)")  # fmt: skip
        for index, member in enumerate(self.members):
            member.begin(self.stacked.weights(index))

    def step(self) -> Iterator[float]:
        """One step of every running member; the mean loss of each in nats."""
        for part in self._parts():
            for index, loss in zip(part, self._gradients(part), strict=True):
                self._update(index, loss)
                yield loss

    def validation_logits(self) -> list[list[float]]:
        """log P(yes) - log P(no) in nats of each member's validation rows, neighbours with the same rows in one pass."""
        found: list[list[float]] = []
        for rows, same in itertools.groupby(
            range(len(self.members)), lambda index: self.members[index].data.validation
        ):
            self.prefixes.fill(_prefix(row) for row in rows)
            adapters, together = list(same), max(1, SUFFIX_TOKENS // _longest(rows))
            for start in range(0, len(adapters), together):
                found += self._verdict_logits(adapters[start : start + together], rows)
        return found

    def _update(self, index: int, loss: float) -> None:
        member = self.members[index]
        member.update(loss)
        if member.early_stopping and member.at_epoch_end:
            validation = member.data.validation
            (logits,) = self._verdict_logits([index], validation)
            member.early_stopping.record(
                member.step,
                validation_loss(logits, [row.label for row in validation]),
                member.weights,
            )
        member.save()

    def _parts(self) -> Iterator[dict[int, list[Row]]]:
        """One step of every running member: neighbours that go through the model together, each with its batch."""
        part: dict[int, list[Row]] = {}
        read: set[Prefix] = set()
        widest = longest = to_fetch = 0
        for index, member in enumerate(self.members):
            if not member.running:
                continue
            batch = member.batch()
            more = {_prefix(row) for row in batch} - read
            fetched = sum(map(self.prefixes.bytes_to_fetch, more))
            widest, longest = max(widest, len(batch)), max(longest, _longest(batch))
            too_long = (len(part) + 1) * widest * longest > SUFFIX_TOKENS
            if part and (too_long or (fetched and to_fetch + fetched > READ_BYTES)):
                yield part
                part, read, to_fetch = {}, set(), 0
                more = {_prefix(row) for row in batch}
                fetched = sum(map(self.prefixes.bytes_to_fetch, more))
                widest, longest = len(batch), _longest(batch)
            part[index] = batch
            read |= more
            to_fetch += fetched
        if part:
            yield part

    def _gradients(self, part: dict[int, list[Row]]) -> list[float]:
        """Leave each member's gradients in its weights; the mean loss of each batch in nats."""
        first, batches, device = (
            self.members[min(part)],
            list(part.values()),
            self.stacked.model.device,
        )
        losses = torch.zeros(len(batches))
        torch.manual_seed(
            first.config.seed * 1_000_003 + first.step
        )  # dropout, and a resumed run's the same
        for places in self._places(batches, len(batches)):
            chunks = [batch[places] for batch in batches]
            width, filler = max(map(len, chunks)), next(chunk[0] for chunk in chunks if chunk)
            rows = [row for chunk in chunks for row in (*chunk, *[filler] * (width - len(chunk)))]
            share = [
                1 / len(batch) if index < len(chunk) else 0.0
                for batch, chunk in zip(batches, chunks, strict=True)
                for index in range(width)
            ]
            verdicts = torch.tensor(
                [
                    first.job.builder.yes_id if row.label else first.job.builder.no_id
                    for row in rows
                ],
                device=device,
            )
            each = functional.cross_entropy(
                self._logits(list(part), rows).float(), verdicts, reduction="none"
            )
            each = each * torch.tensor(share, device=device)
            each.sum().backward()
            losses += each.detach().view(len(batches), width).sum(1).cpu()
            del each  # and with it the prefixes that were read, before others are
        return cast(list[float], losses.tolist())

    @torch.no_grad()
    def _verdict_logits(self, adapters: Sequence[int], rows: Sequence[Row]) -> list[list[float]]:
        """log P(yes) - log P(no) in nats of `rows`, for each of `adapters`."""
        builder = self.members[adapters[0]].job.builder
        found = [[math.nan] * len(rows) for _ in adapters]
        order = sorted(
            range(len(rows)), key=lambda index: -len(rows[index].prompt.token_ids)
        )  # what is computed together is alike
        for places in self._places([[rows[index] for index in order]], len(adapters)):
            after = self._logits(adapters, [rows[index] for index in order[places]] * len(adapters))
            difference = after[:, builder.yes_id].double() - after[:, builder.no_id].double()
            for logits, values in zip(
                found, difference.view(len(adapters), -1).tolist(), strict=True
            ):
                for index, value in zip(order[places], values, strict=True):
                    logits[index] = value
        return found

    def _places(self, batches: Sequence[Sequence[Row]], adapters: int) -> Iterator[slice]:
        """Which rows of each batch go through the model at once, for so many adapters: at least one, else what the limits allow."""
        together = SUFFIX_TOKENS // (adapters * max(map(_longest, batches)))
        start, read, to_fetch = 0, set[Prefix](), 0
        for place in range(max(map(len, batches))):
            here = {_prefix(batch[place]) for batch in batches if place < len(batch)}
            more = sum(map(self.prefixes.bytes_to_fetch, here - read))
            if place > start and (place - start >= together or to_fetch + more > READ_BYTES):
                yield slice(start, place)
                start, read, to_fetch = place, set(), 0
                more = sum(map(self.prefixes.bytes_to_fetch, here))
            read |= here
            to_fetch += more
        yield slice(start, None)

    def _logits(self, adapters: Sequence[int], rows: Sequence[Row]) -> Tensor:
        numbers: dict[Prefix, int] = {}
        stands_on = [numbers.setdefault(_prefix(row), len(numbers)) for row in rows]
        prefixes = Prefixes(self.prefixes.read(list(numbers)), stands_on)
        return self.stacked.logits(adapters, prefixes, [_suffix(row) for row in rows])


def _budget(job: Job, device: torch.device, processes: int) -> Budget:
    """What the recipe states, else a share of what is free, the host's in equal parts for `processes`. Raises GuardError for too much."""
    stated, folder = job.recipe.prefix_cache_gib, job.runs.root
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    free_host = free_memory()
    for tier, wanted, free in (
        ("device", stated.device or 0, free_device),
        ("host", stated.host or 0, free_host),
        ("disk", stated.disk, shutil.disk_usage(folder).free),
    ):
        if wanted * GIB > free:
            where, got = (
                f"recipe '{job.recipe.name}', prefix_cache_gib.{tier}",
                f"{wanted:g} GiB, {free / GIB:.1f} free",
            )
            raise GuardError(
                "there is not so much room", where=where, got=got, remedy="Lower it or make room"
            )
    return Budget(
        device=int(free_device * FREE_SHARE if stated.device is None else stated.device * GIB),
        host=int(free_host * FREE_SHARE / processes if stated.host is None else stated.host * GIB),
        disk=int(stated.disk * GIB),
    )


def _groups(
    members: Iterable[Member], model: PreTrainedModel, budget: Budget
) -> Iterator[tuple[list[Member], Budget]]:
    """Neighbours that are trained together, and what their weights leave of the budget for prefixes.

    They act on the same layers, their weights have room where the model is, and so have all their prefixes; a member that takes more is
    alone, but for those that read nothing else.
    """
    bytes_per_token = PrefixCache(model, Budget()).bytes_per_token
    room = budget.device if model.device.type == "cuda" else budget.host
    group: list[Member] = []
    prefixes: set[Prefix] = set()
    acted_on: Iterable[str] = ()
    weights = 0

    def left() -> Budget:
        rest = max(0, room - weights)
        return (
            replace(budget, device=rest)
            if model.device.type == "cuda"
            else replace(budget, host=rest)
        )

    for member in members:
        more, own = (
            {_prefix(row) for row in member.read} - prefixes,
            layers(model, lora_config(member.job)),
        )
        taken = weights + WEIGHT_BYTES * sum(own.values())
        fits = taken + bytes_per_token * sum(map(len, prefixes | more)) <= budget.total
        nothing_to_lose = (
            not more and weights + bytes_per_token * sum(map(len, prefixes)) > budget.total
        )
        has_room = taken <= room and (fits or nothing_to_lose)
        if group and not (has_room and own.keys() == acted_on):
            yield group, left()
            group, prefixes, weights = [], set(), 0
            more = {_prefix(row) for row in member.read}
        group.append(member)
        prefixes |= more
        acted_on = own.keys()
        weights += WEIGHT_BYTES * sum(own.values())
    yield group, left()


def _prefix(row: Row) -> Prefix:
    return row.prompt.token_ids[: row.prompt.invocation_start]


def _suffix(row: Row) -> Sequence[int]:
    return row.prompt.token_ids[row.prompt.invocation_start :]


def _longest(rows: Iterable[Row]) -> int:
    return max(len(row.prompt.token_ids) - row.prompt.invocation_start for row in rows)
