"""Trains aLoRA adapters on cached prefixes, many at once. Knows nothing of thresholds, cards or files of examples.

No weight of an aLoRA touches a position before the invocation: what is trained is a function of the suffix and of the
prefix's keys and values, which are constants of the base. So a step computes suffixes only, forward and backward, and the
suffixes of several adapters go through one pass: the base's matrix products over all rows together, the low-rank ones as
one batched product with a matrix per adapter. Every adapter has its own optimizer, schedule and order of rows, so what it
becomes does not depend on which others are trained beside it (only the masks of a lora_dropout do). The settings are TRL's
(SFTConfig), and so is the result: tests/train/test_shared_prefix.py holds it to what TRL and PEFT train on whole prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from guard.errors import GuardError
from guard.recipe import Recipe
from train.adapter import lora_config, trainer_config
from train.batch import BATCH_TOKENS, PROMPT_TENSORS, by_length, left_padded
from train.early_stopping import validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.member import Member
from train.prefix_cache import Budget, Prefix, PrefixCache
from train.stacked import StackedModel

GIB = 2**30
FREE_SHARE = 0.5  # of the memory that is free at the start, for prefixes, unless the recipe states how much


@dataclass(frozen=True)
class Fitted:
    """A trained adapter in PEFT's own layers, and log P(yes) - log P(no) in nats of its validation rows."""

    model: PeftModel
    validation_logits: list[float]


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[Fitted | GuardError]:
    """Train the aLoRA adapters of `jobs`, all on one recipe. Yields them in order, each model to be used before the next.

    As many neighbours are trained together as have room for their prefixes; seeds of a rule share theirs. A job whose loss
    diverges yields its error and leaves the others untouched. Every job resumes from its own checkpoint.
    Raises GuardError for what cannot be trained on cached prefixes.
    """
    members = [Member(job, data, trainer_config(job)) for job, data in jobs]
    recipe = members[0].job.recipe
    model = load_base(recipe, members[0].config.device)
    budget = _budget(recipe, model.device)
    for group in _groups(members, budget.total // PrefixCache(model, Budget()).bytes_per_token):
        fleet = Fleet(model, group, budget)
        fleet.train()
        logits = fleet.validation_logits()
        fleet.stacked.take_out()
        for index, member in enumerate(group):
            if member.failure:
                yield member.failure
                continue
            adapter = fleet.stacked.as_peft(index, member.weights)
            yield Fitted(adapter, logits[index])
            cast(Any, adapter).unload()


def load_base(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The recipe's base on `device`, frozen."""
    pinned = {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}
    loaded = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=getattr(torch, recipe.dtype), **pinned)
    return cast(PreTrainedModel, cast(nn.Module, loaded).to(device).eval().requires_grad_(False))


class Fleet:
    """Adapters that are trained together: one frozen base, the prefixes that they read, a member for each adapter."""

    def __init__(self, model: PreTrainedModel, members: Sequence[Member], budget: Budget) -> None:
        self.members = members
        self.stacked = StackedModel(model, [lora_config(member.job) for member in members], [member.config.seed for member in members])
        self.prefixes = PrefixCache(model, budget, members[0].job.runs.root)
        for index, member in enumerate(members):
            member.begin(self.stacked.weights(index))

    def train(self) -> None:
        """All steps of all members; each then has its best epoch's weights, if it stops early, else its last."""
        self.fill()
        steps = sum(member.steps for member in self.members)
        with tqdm(total=steps, initial=sum(member.step for member in self.members), desc="train", unit="step", leave=False) as bar:
            while any(member.running for member in self.members):
                for loss in self.step():
                    bar.update(math.isfinite(loss))
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        for member in self.members:
            if member.early_stopping:
                member.early_stopping.restore(member.weights)

    def fill(self) -> None:
        """Compute and keep the prefixes that every epoch reads, as many as there is room for."""
        self.prefixes.fill(_prefix(row) for member in self.members for row in member.read)

    def step(self) -> Iterator[float]:
        """One step of every running member; the mean loss of each in nats."""
        for part, batches in self._parts():
            losses = self._gradients(part, batches)
            for index, batch, loss in zip(range(part.start, part.stop), batches, losses, strict=True):
                if batch:
                    self._update(index, loss)
                    yield loss

    def validation_logits(self) -> list[list[float]]:
        """log P(yes) - log P(no) in nats of each member's validation rows, neighbours with the same rows in one pass."""
        found: list[list[float]] = []
        while len(found) < len(self.members):
            start = len(found)
            rows = self.members[start].data.validation
            same = [number for number, member in enumerate(self.members[start:], start) if member.data.validation == rows]
            end = next(number for number in range(start + 1, len(self.members) + 1) if number not in same)
            self.prefixes.fill(_prefix(row) for row in rows)
            found += self._verdict_logits(slice(start, end), rows)
        return found

    def _update(self, index: int, loss: float) -> None:
        member = self.members[index]
        member.update(loss)
        if member.early_stopping and member.at_epoch_end:
            validation = member.data.validation
            (logits,) = self._verdict_logits(slice(index, index + 1), validation)
            member.early_stopping.record(member.step, validation_loss(logits, [row.label for row in validation]), member.weights)
        member.save()

    def _parts(self) -> Iterator[tuple[slice, list[list[Row]]]]:
        """One step of every running member: neighbours that go through the model together, each with its batch, empty for one at rest."""
        batches = [member.batch() if member.running else [] for member in self.members]
        start = 0
        while start < len(batches):
            end, rows, longest = start, 0, 0
            while end < len(batches):
                longer = max([longest, *(len(row.prompt.token_ids) for row in batches[end])])
                more = max(rows, len(batches[end]))
                if end > start and longer * more * (end + 1 - start) > BATCH_TOKENS:
                    break
                rows, longest, end = more, longer, end + 1
            if rows:
                yield slice(start, end), batches[start:end]
            start = end

    def _gradients(self, part: slice, batches: list[list[Row]]) -> list[float]:
        """Leave each member's gradients in its weights; the mean loss of each batch in nats. The rows go through in equal parts."""
        members, device = self.members[part], self.stacked.model.device
        longest = max(len(row.prompt.token_ids) for batch in batches for row in batch)
        together = max(1, BATCH_TOKENS // (longest * len(batches)))
        anything = next(batch[0] for batch in batches if batch)
        losses = torch.zeros(len(batches))
        torch.manual_seed(members[0].config.seed * 1_000_003 + members[0].step)  # dropout, and a resumed run's the same
        for start in range(0, max(map(len, batches)), together):
            chunks = [batch[start : start + together] for batch in batches]
            width = max(map(len, chunks))
            rows = [row for chunk in chunks for row in (*chunk, *[anything] * (width - len(chunk)))]
            share = [
                1 / len(batch) if index < len(chunk) else 0.0
                for batch, chunk in zip(batches, chunks, strict=True)
                for index in range(width)
            ]
            scores, leaves = self._scores(part, rows)
            builder = members[0].job.builder
            verdicts = torch.tensor([builder.yes_id if row.label else builder.no_id for row in rows], device=device)
            each = functional.cross_entropy(scores.float(), verdicts, reduction="none") * torch.tensor(share, device=device)
            each.sum().backward()
            losses += each.detach().view(len(batches), width).sum(1).cpu()
            for index, member in enumerate(members):
                for weight, leaf in zip(member.weights, leaves, strict=True):
                    grad = cast(Tensor, leaf.grad)[index]
                    weight.grad = grad if weight.grad is None else weight.grad + grad
        return cast(list[float], losses.tolist())

    @torch.no_grad()
    def _verdict_logits(self, part: slice, rows: Sequence[Row]) -> list[list[float]]:
        """log P(yes) - log P(no) in nats of `rows`, for each adapter of `part`."""
        adapters, builder = part.stop - part.start, self.members[part.start].job.builder
        found = [[math.nan] * len(rows) for _ in range(adapters)]
        for indices in by_length([len(row.prompt.token_ids) for row in rows], BATCH_TOKENS // adapters):
            scores, _ = self._scores(part, [rows[index] for index in indices] * adapters)
            difference = scores[:, builder.yes_id].double() - scores[:, builder.no_id].double()
            for logits, values in zip(found, difference.view(adapters, -1).tolist(), strict=True):
                for index, value in zip(indices, values, strict=True):
                    logits[index] = value
        return found

    def _scores(self, part: slice, rows: Sequence[Row]) -> tuple[Tensor, list[Tensor]]:
        cache, real = self.prefixes.gather([_prefix(row) for row in rows])
        return self.stacked.scores(part, past_key_values=cache, **_suffixes(rows, real))


def _budget(recipe: Recipe, device: torch.device) -> Budget:
    """What the recipe states, else a share of what is free."""
    stated = recipe.prefix_cache_gib
    free_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    free_host = psutil.virtual_memory().available
    return Budget(
        device=int(free_device * FREE_SHARE if stated.device is None else min(stated.device * GIB, free_device)),
        host=int(free_host * FREE_SHARE if stated.host is None else stated.host * GIB),
        disk=int(stated.disk * GIB),
    )


def _groups(members: Sequence[Member], tokens: int) -> Iterator[list[Member]]:
    """Neighbours whose distinct prefixes have at most `tokens` tokens together, or one member that has more."""
    group: list[Member] = []
    held: set[Prefix] = set()
    for member in members:
        more = {_prefix(row) for row in member.read}
        if group and sum(map(len, held | more)) > tokens:
            yield group
            group, held = [], set()
        group.append(member)
        held |= more
    yield group


def _prefix(row: Row) -> Prefix:
    return row.prompt.token_ids[: row.prompt.invocation_start]


def _suffixes(rows: Sequence[Row], real: Tensor) -> dict[str, Tensor]:
    """The rows' suffixes padded on the left, their positions, and a mask over `real` `[rows, prefix]` and themselves."""
    batch = left_padded([row.prompt.token_ids[row.prompt.invocation_start :] for row in rows])
    ids, own, positions = (batch[name].to(real.device) for name in PROMPT_TENSORS)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    suffix = causal & (own[:, None, :] == 1) | torch.eye(length, dtype=torch.bool, device=real.device)  # padding attends to itself
    mask = torch.cat([real[:, None, :].expand(-1, length, -1), suffix], dim=2)
    return {"input_ids": ids, "position_ids": positions + real.sum(1, keepdim=True), "attention_mask": mask[:, None]}
