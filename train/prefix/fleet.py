"""aLoRA adapters that are trained together, step by step, on cached prefixes.

A step computes suffixes only, forward and backward, and the suffixes of several adapters go through
one pass: the base's matrix products over all rows together, the low-rank ones as one batched
product with a matrix per adapter. Every adapter has its own optimizer, schedule and order of rows,
so what it becomes does not depend on which others are trained beside it (only the masks of a
lora_dropout do). Knows nothing of memory budgets, thresholds, cards or files of examples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.prompt.decoder import Prompt
from guard.rule import Reads
from train.adapter.reader import load_reader
from train.adapter.settings import lora_config
from train.base import refusals
from train.examples import Row, Rows
from train.head.fit import decoder_spans
from train.head.regression import RowSpans
from train.job import Job
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.member import Member
from train.prefix.prefixes import Prefixes
from train.prefix.readout import (
    HeadInTraining,
    HeadReadout,
    Readout,
    WordReadout,
    begin_head,
    head_in,
    no_head,
    suffix_of,
)
from train.prefix.stacked import StackedModel
from train.prefix.suffixes import attend_to_prefixes

GIB = 2**30
SUFFIX_TOKENS = 4096  # padded tokens of a pass: twice as many are no faster on a CPU
READ_BYTES = GIB  # keys and values that a pass copies to the model's memory

Batch = tuple[int, list[Row]]  # a member's number, and the rows of its next step


class Fleet:
    """One frozen base, the prefixes that its adapters read, and a member for each adapter."""

    def __init__(self, model: PreTrainedModel, members: Sequence[Member], budget: Budget) -> None:
        self.members = members
        with refusals("transformers", f"recipe {members[0].job.recipe.name}: base"):
            attend_to_prefixes(
                model, lambda prefix: PrefixCache(model, Budget()).read([tuple(prefix)])[0]
            )
        configs = [lora_config(member.job) for member in members]
        seeds = [member.config.seed for member in members]
        places = [member.job.where("lora") for member in members]
        self.stacked = StackedModel(model, configs, seeds, places)
        self.prefixes = PrefixCache(model, budget)
        self._readout: Readout = WordReadout(self.stacked, members[0].job.builder)

    def train(self) -> None:
        """Run all steps of all members. Each then has the best of the weights that validation was
        told of, or, told of none, its last.
        """
        self.begin()
        steps_done = sum(member.step for member in self.members)
        steps = sum(member.steps for member in self.members)
        with tqdm(total=steps, initial=steps_done, desc="train", unit="step", leave=False) as bar:
            while any(member.running for member in self.members):
                for loss in self.step():
                    bar.update(math.isfinite(loss))
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        for member in self.members:
            if member.best:
                member.best.restore(member.weights)

    def begin(self) -> None:
        """Keep the prefixes that every epoch reads, as many as there is room for. Then continue
        each member where it stopped; one that answers by a head begins with a fitted one.
        """
        prefixes: set[Prefix] = set()
        for member in self.members:
            prefixes.update(map(prefix_of, member.read))
        left_out = self.prefixes.fill(prefixes)
        if left_out:
            all_tokens = sum(map(len, prefixes))
            gib = left_out * self.prefixes.bytes_per_token / GIB
            tqdm.write(
                f"no room for {left_out:,} of {all_tokens:,} tokens of prefixes: computed whenever "
                f"a step reads them ({gib:.1f} GiB more in the recipe's prefix_cache_gib would "
                "hold them)"
            )
        if self.members[0].answers_by_head:
            self._readout = HeadReadout(self.stacked, self._heads())
        for index, member in enumerate(self.members):
            if member.failure is None:
                logits: list[float] = []
                if member.head:
                    (logits,) = self._verdict_logits([index], member.data.validation)
                member.begin(self.stacked.weights(index), logits)

    def _heads(self) -> list[HeadInTraining]:
        """The head that each member begins as, fitted to its rows once for all that read the same;
        a member whose states cannot be read has failed.
        """
        files: dict[tuple[Rows, Reads, bool], Path] = {}
        heads: list[HeadInTraining] = []
        device = self.stacked.model.device
        for index, member in enumerate(self.members):
            job, prior, acting = member.job, None, list[int]()
            job.open_scratch()
            if job.settings.start:
                start = load_reader(job.recipe)
                self.stacked.start_as(index, start.factors)
                prior, acting = start.head, [index]
            reader = functools.partial(self._spans, job, acting)
            read = member.data, job.reads, prior is not None
            try:
                file = begin_head(job, member.data, reader, prior, files.get(read))
                member.head = head_in(file, device)
                files.setdefault(read, file)
            except GuardError as error:
                member.failure = error
            heads.append(member.head or no_head(self.stacked.model, device))
        return heads

    def _spans(self, job: Job, acting: Sequence[int], prompts: Sequence[Prompt]) -> list[RowSpans]:
        """What a job's head reads of prompts, whose prefixes are cached, with adapters or none."""
        rows = [Row("", "train", 0, prompt) for prompt in prompts]  # their prompts count alone
        return decoder_spans(job, self._states(rows, acting), prompts)

    def step(self) -> Iterator[float]:
        """Run one step of every running member, and yield the mean loss of each in nats."""
        for batches in self._passes():
            for index, loss in zip(batches, self._gradients(batches), strict=True):
                self._update(index, loss)
                yield loss

    def logits(self) -> list[list[float]]:
        """The logits in nats of the rows that each member answers. Neighbours with the same rows go
        through the model in one pass.
        """
        logits: list[list[float]] = []
        for rows, neighbours in itertools.groupby(
            range(len(self.members)), lambda index: self.members[index].answered
        ):
            self.prefixes.fill(map(prefix_of, rows))
            adapters = list(neighbours)
            together = max(1, SUFFIX_TOKENS // longest_suffix(rows))
            for start in range(0, len(adapters), together):
                logits += self._verdict_logits(adapters[start : start + together], rows)
        return logits

    def _update(self, index: int, loss: float) -> None:
        member = self.members[index]
        member.update(loss)
        if member.is_evaluated:
            validation = member.data.validation
            with member.evaluated_weights():
                (logits,) = self._verdict_logits([index], validation)
                member.record(logits)
        member.save()

    def _passes(self) -> Iterator[dict[int, list[Row]]]:
        """The batches of one step of every running member, neighbours that go through together."""
        running = (
            (index, member.batch()) for index, member in enumerate(self.members) if member.running
        )
        batches = packs(
            running,
            prefixes=lambda batch: map(prefix_of, batch[1]),
            size=self.prefixes.bytes_to_fetch,
            fits=_fits_pass,
        )
        for pack in batches:
            yield dict(pack.items)

    def _gradients(self, batches: dict[int, list[Row]]) -> list[float]:
        """Leave gradients in each member's weights, and return each batch's mean loss in nats."""
        first = self.members[min(batches)]
        rows = list(batches.values())
        losses = torch.zeros(len(rows))
        # Dropout, and a resumed run's the same.
        torch.manual_seed(first.config.seed * 1_000_003 + first.step)
        for places in self._places(rows, len(rows)):
            losses += self._add_gradients(list(batches), rows, places)
        return cast(list[float], losses.tolist())

    def _add_gradients(
        self, adapters: Sequence[int], batches: Sequence[list[Row]], places: slice
    ) -> Tensor:
        """Add the gradients of these rows of each batch, and return their part in each batch's mean
        loss. What the pass has read is let go of on return, before the next reads.
        """
        chunks = [batch[places] for batch in batches]
        width = max(map(len, chunks))
        filler = next(chunk[0] for chunk in chunks if chunk)
        rows: list[Row] = []
        weights: list[float] = []  # of each row's loss in its batch's mean
        for batch, chunk in zip(batches, chunks, strict=True):
            missing = width - len(chunk)
            rows += chunk + [filler] * missing
            weights += [1 / len(batch)] * len(chunk) + [0.0] * missing
        losses = self._readout.losses(adapters, rows, self._prefixes_of(rows))
        losses = losses * torch.tensor(weights, device=losses.device)
        losses.sum().backward()
        return losses.detach().view(len(batches), width).sum(1).cpu()

    @torch.no_grad()
    def _verdict_logits(self, adapters: Sequence[int], rows: Sequence[Row]) -> list[list[float]]:
        """The logits in nats of `rows`, for each of `adapters`."""
        logits = [[math.nan] * len(rows) for _ in adapters]
        for indices in self._by_length(rows, len(adapters)):
            repeated_rows = [rows[index] for index in indices] * len(adapters)
            prefixes = self._prefixes_of(repeated_rows)
            answers = self._readout.logits(adapters, repeated_rows, prefixes)
            by_adapter = answers.view(len(adapters), -1).tolist()
            for adapter_logits, values in zip(logits, by_adapter, strict=True):
                for index, value in zip(indices, values, strict=True):
                    adapter_logits[index] = value
        return logits

    @torch.no_grad()
    def _states(self, rows: Sequence[Row], acting: Sequence[int]) -> np.ndarray:
        """The last states of `rows`, [rows, hidden size] float32, of one adapter or of the base."""
        self.prefixes.fill(map(prefix_of, rows))
        states: dict[int, np.ndarray] = {}
        for indices in self._by_length(rows, 1):
            part = [rows[index] for index in indices]
            suffixes = list(map(suffix_of, part))
            read = self.stacked.states(acting, self._prefixes_of(part), suffixes)
            states |= zip(indices, read.float().cpu().numpy(), strict=True)
        return np.array([states[index] for index in range(len(rows))], np.float32)

    def _by_length(self, rows: Sequence[Row], adapters: int) -> Iterator[list[int]]:
        """The indices of rows that go through the model at once: of similar length."""
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].prompt.token_ids))
        for places in self._places([[rows[index] for index in order]], adapters):
            yield order[places]

    def _places(self, batches: Sequence[Sequence[Row]], adapters: int) -> Iterator[slice]:
        """The rows of each batch that go through the model at once, for so many adapters. At least
        one of each, else what the limits allow.
        """
        together = SUFFIX_TOKENS // (adapters * max(map(longest_suffix, batches)))

        def read(index: int) -> list[Prefix]:
            return [prefix_of(batch[index]) for batch in batches if index < len(batch)]

        places = packs(
            range(max(map(len, batches))),
            prefixes=read,
            size=self.prefixes.bytes_to_fetch,
            fits=lambda pack, _, more_bytes: (
                len(pack.items) < together and pack.prefix_bytes + more_bytes <= READ_BYTES
            ),
        )
        for pack in places:
            yield slice(pack.items[0], pack.items[-1] + 1)

    def _prefixes_of(self, rows: Sequence[Row]) -> Prefixes:
        numbers: dict[Prefix, int] = {}
        stands_on = [numbers.setdefault(prefix_of(row), len(numbers)) for row in rows]
        states = self.prefixes.read(list(numbers))
        return Prefixes(states, stands_on)


def _fits_pass(pack: Pack[Batch], batch: Batch, more_bytes: int) -> bool:
    """Whether a batch, padded to the widest and longest, can go through beside those of `pack`."""
    batches = [rows for _, rows in (*pack.items, batch)]
    widest = max(map(len, batches))
    longest = max(map(longest_suffix, batches))
    is_short = len(batches) * widest * longest <= SUFFIX_TOKENS
    can_read = more_bytes == 0 or pack.prefix_bytes + more_bytes <= READ_BYTES
    return is_short and can_read


Item = TypeVar("Item")


@dataclass
class Pack(Generic[Item]):
    """Neighbours, the distinct prefixes that they read, and the bytes that these take."""

    items: list[Item] = field(default_factory=list)
    prefixes: set[Prefix] = field(default_factory=set)
    prefix_bytes: int = 0


def packs(
    items: Iterable[Item],
    *,
    prefixes: Callable[[Item], Iterable[Prefix]],
    size: Callable[[Prefix], int],
    fits: Callable[[Pack[Item], Item, int], bool],
) -> Iterator[Pack[Item]]:
    """Yield all `items` in their order, neighbours in one pack as long as the next one fits, and at
    least one in each; a pack is let go of before the next is started. `prefixes` names those that
    an item reads, `size` the bytes of a prefix; `fits` decides whether an item that adds so many
    bytes of prefixes may join a pack that is not empty.
    """
    pack: Pack[Item] = Pack()
    for item in items:
        read = set(prefixes(item))
        added = read - pack.prefixes
        if pack.items and not fits(pack, item, sum(map(size, added))):
            yield pack
            pack, added = Pack(), read
        pack.items.append(item)
        pack.prefixes |= added
        pack.prefix_bytes += sum(map(size, added))
    if pack.items:
        yield pack


def prefix_of(row: Row) -> Prefix:
    """The tokens before the invocation, whose keys and values are the base's."""
    return row.prompt.token_ids[: row.prompt.invocation_start]


def longest_suffix(rows: Iterable[Row]) -> int:
    return max(len(row.prompt.token_ids) - row.prompt.invocation_start for row in rows)
