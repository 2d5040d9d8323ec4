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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, get_scheduler, set_seed
from trl.trainer.sft_config import SFTConfig

from guard.errors import GuardError
from guard.prompt import PromptBuilder
from guard.recipe import Recipe
from train.adapter import LengthGrouped, lora_config, trainer_config
from train.batch import BATCH_TOKENS, PROMPT_TENSORS, by_length, left_padded
from train.early_stopping import EarlyStopping, validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.prefix_cache import Budget, Prefix, PrefixCache
from train.progress import Progress

CHECKPOINT = "shared_prefix.pt"
GIB = 2**30
FREE_SHARE = 0.5  # of the memory that is free at the start, for prefixes, unless the recipe states how much


class Stacked(nn.Module):
    """A frozen linear layer plus a low-rank update per adapter: x W^T + scaling_i (x A_i^T) B_i^T for the rows of adapter i.

    `a` `[adapters, rank, in]`, `b` `[adapters, out, rank]`, lower ranks filled up with zeros, which stay zero: each factor's
    gradient there is a product with the other's zeros.
    """

    def __init__(self, base: nn.Linear, layers: Sequence[LoraLinear]) -> None:
        super().__init__()
        self.base = base
        ranks = [layer.r["default"] for layer in layers]
        self.a = torch.stack(
            [functional.pad(_weight(layer.lora_A), (0, 0, 0, max(ranks) - rank)) for layer, rank in zip(layers, ranks, strict=True)]
        )
        self.b = torch.stack(
            [functional.pad(_weight(layer.lora_B), (0, max(ranks) - rank)) for layer, rank in zip(layers, ranks, strict=True)]
        )
        self.scaling = torch.tensor([layer.scaling["default"] for layer in layers]).view(-1, 1, 1).to(self.a)
        self.dropout = [float(getattr(layer.lora_dropout["default"], "p", 0.0)) for layer in layers]
        self.act(None)

    def act(self, adapters: slice | None) -> tuple[Tensor, Tensor]:
        """Which adapters the rows of the next pass belong to, in equal parts; None: the base alone. Returns their leaves for autograd."""
        self.acting = adapters
        chosen = adapters or slice(0, 0)
        self.leaves = self.a[chosen].detach().requires_grad_(), self.b[chosen].detach().requires_grad_()
        return self.leaves

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, ..., in]` -> `[rows, ..., out]`."""
        out: Tensor = self.base(x)
        if self.acting is None:
            return out
        a, b = self.leaves
        rows = x.reshape(len(a), -1, x.shape[-1]).to(a.dtype)
        if any(self.dropout):
            rows = torch.stack(
                [functional.dropout(part, p, torch.is_grad_enabled()) for part, p in zip(rows, self.dropout[self.acting], strict=True)]
            )
        update = torch.bmm(torch.bmm(rows, a.transpose(1, 2)), b.transpose(1, 2)) * self.scaling[self.acting]
        return out + update.view(out.shape).to(out.dtype)


@dataclass
class Member:
    """One adapter in training: its rows in its own order, its weights as views of the stacked ones, its own optimizer."""

    job: Job
    data: Rows
    config: SFTConfig
    weights: list[nn.Parameter] = field(default_factory=list)
    step: int = 0
    failure: GuardError | None = None
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        self.rows = self.data.train
        self.batch_rows = self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps
        self.steps_per_epoch = math.ceil(len(self.rows) / self.batch_rows)
        epochs = self.config.num_train_epochs
        self.steps = self.config.max_steps if self.config.max_steps > 0 else math.ceil(epochs * self.steps_per_epoch)
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch that it names
        self._sampler = LengthGrouped([len(row.prompt.token_ids) for row in self.rows], self.batch_rows, self.config.seed)

    def begin(self, weights: list[nn.Parameter]) -> None:
        """Take the weights into an optimizer, and go on where an interrupted run stopped."""
        self.weights = weights
        optimizer, arguments = Trainer.get_optimizer_cls_and_kwargs(self.config)
        groups = [{"params": weights, "weight_decay": self.config.weight_decay}]
        self.optimizer = optimizer(groups, **arguments)
        warmup = self.config.get_warmup_steps(self.steps)
        more = cast(dict[str, object], self.config.lr_scheduler_kwargs or {})
        self.schedule = get_scheduler(self.config.lr_scheduler_type, self.optimizer, warmup, self.steps, scheduler_specific_kwargs=more)
        self.job.open_scratch()
        self.early_stopping = EarlyStopping(self.job.scratch, self.job.patience) if self.job.patience else None
        if self._checkpoint.is_file():
            state = torch.load(self._checkpoint, weights_only=True)
            for weight, saved in zip(weights, state["weights"], strict=True):
                weight.data.copy_(saved)
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.step = state["step"]
            tqdm.write(f"{self.job.name}: resumes at step {self.step} of {self.steps}")
        self.progress = Progress(self.job.name, step=self.step, steps=self.steps, steps_per_epoch=self.steps_per_epoch)

    @property
    def read(self) -> Sequence[Row]:
        """What training reads in every epoch."""
        return (*self.rows, *self.data.validation) if self.job.patience else self.rows

    @property
    def running(self) -> bool:
        """Whether there are steps left."""
        ended = self.early_stopping is not None and self.early_stopping.ended(self.step)
        return self.failure is None and self.step < self.steps and not ended

    @property
    def at_epoch_end(self) -> bool:
        """Whether an epoch has just ended."""
        return self.failure is None and (self.step % self.steps_per_epoch == 0 or self.step == self.steps)

    def batch(self) -> list[Row]:
        """The rows of the next step."""
        epoch, within = divmod(self.step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._sampler.set_epoch(epoch)
            self._order = epoch, list(self._sampler)
        return [self.rows[index] for index in self._order[1][within * self.batch_rows : (within + 1) * self.batch_rows]]

    def update(self, loss: float) -> None:
        """One optimizer step with the gradients that the weights hold; a loss that is not a number ends this member alone."""
        if not math.isfinite(loss):
            remedy = "Lower the learning rate in the recipe"
            self.failure = GuardError(f"{self.job.name}: the loss is not a number any more", where=f"step {self.step}", remedy=remedy)
            return
        nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.progress.loss(loss)
        self.progress.step(self.step)

    def save(self) -> None:
        """Write the checkpoint, if one is due after this step."""
        if self.failure or self.step % int(self.config.save_steps) or self.step == self.steps:
            return
        state = {"weights": [weight.data.clone() for weight in self.weights], "step": self.step}
        state |= {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        part = self._checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self.job.scratch / CHECKPOINT


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
    pinned = {"revision": recipe.commit, "local_files_only": Path(recipe.base_path).is_dir()}
    loaded = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=getattr(torch, recipe.dtype), **pinned)
    model = cast(PreTrainedModel, cast(nn.Module, loaded).to(members[0].config.device).eval().requires_grad_(False))
    budget = _budget(recipe, model.device)
    for group in _groups(members, budget.total // PrefixCache(model, Budget()).bytes_per_token):
        layers = _stack(model, group)
        prefixes = PrefixCache(model, budget, group[0].job.runs.root)
        _train(model, layers, group, prefixes)
        logits = _validation_logits(model, layers, group, prefixes)
        for name, layer in layers.items():
            model.set_submodule(name, layer.base)
        for member, validation_logits in zip(group, logits, strict=True):
            if member.failure:
                yield member.failure
                continue
            adapter = _as_peft(model, member)
            yield Fitted(adapter, validation_logits)
            cast(Any, adapter).unload()


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


def _stack(model: PreTrainedModel, members: Sequence[Member]) -> dict[str, Stacked]:
    """Put the members' fresh adapters, as PEFT initialises them, into the model, stacked layer by layer; open the members."""
    fresh: list[dict[str, LoraLinear]] = []
    for member in members:
        config = lora_config(member.job)
        for key in ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"):
            if getattr(config, key, None):
                where, remedy = f"recipe '{member.job.recipe.name}', adapters.alora.lora", "Remove it"
                raise GuardError(f"'{key}' cannot be trained on cached prefixes", where=where, remedy=remedy)
        set_seed(member.config.seed)
        adapter = cast(PeftModel, get_peft_model(model, config))
        fresh.append(_lora_layers(adapter))
        cast(Any, adapter).unload()
    if any(set(each) != set(fresh[0]) for each in fresh):
        raise GuardError("adapters that are trained together must have the same target_modules")
    layers = {}
    for name in fresh[0]:
        layers[name] = Stacked(cast(nn.Linear, model.get_submodule(name)), [each[name] for each in fresh])
        model.set_submodule(name, layers[name])
    for index, member in enumerate(members):
        # Parameters that share the stacks' storage: an optimizer's step on them is seen by the next pass.
        member.begin([nn.Parameter(stack[index]) for layer in layers.values() for stack in (layer.a, layer.b)])
    return layers


def _as_peft(model: PreTrainedModel, member: Member) -> PeftModel:
    """The member's adapter in PEFT's own layers."""
    adapter = cast(PeftModel, get_peft_model(model, lora_config(member.job)))
    factors = [_weight(factor) for layer in _lora_layers(adapter).values() for factor in (layer.lora_A, layer.lora_B)]
    for factor, weight in zip(factors, member.weights, strict=True):
        factor.copy_(weight.data[tuple(slice(size) for size in factor.shape)])
    return adapter


def _lora_layers(adapter: PeftModel) -> dict[str, LoraLinear]:
    found = {name.removeprefix("base_model.model."): module for name, module in adapter.named_modules() if isinstance(module, LoraLayer)}
    for name, module in found.items():
        if not isinstance(module, LoraLinear):
            raise GuardError("only linear layers can be trained on cached prefixes", got=f"{name}: {type(module).__name__}")
    return cast(dict[str, LoraLinear], found)


def _weight(factor: nn.ModuleDict) -> Tensor:
    return cast(nn.Linear, factor["default"]).weight.detach()


def _train(model: PreTrainedModel, layers: Mapping[str, Stacked], members: Sequence[Member], prefixes: PrefixCache) -> None:
    prefixes.fill(_prefix(row) for member in members for row in member.read)
    steps = sum(member.steps for member in members)
    with tqdm(total=steps, initial=sum(member.step for member in members), desc="train", unit="step", leave=False) as bar:
        while any(member.running for member in members):
            for part, batches in _parts(members):
                losses = _gradients(model, layers, prefixes, members, part, batches)
                for index, batch, loss in zip(range(part.start, part.stop), batches, losses, strict=True):
                    member = members[index]
                    if not batch:
                        continue
                    member.update(loss)
                    if member.early_stopping and member.at_epoch_end:
                        validation = member.data.validation
                        (logits,) = _verdict_logits(model, layers, prefixes, slice(index, index + 1), validation, member.job.builder)
                        member.early_stopping.record(
                            member.step, validation_loss(logits, [row.label for row in validation]), member.weights
                        )
                    member.save()
                    bar.update(member.failure is None)
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    for member in members:
        if member.early_stopping:
            member.early_stopping.restore(member.weights)


def _parts(members: Sequence[Member]) -> Iterator[tuple[slice, list[list[Row]]]]:
    """One step of every running member: neighbours that go through the model together, each with its batch, empty for one at rest."""
    batches = [member.batch() if member.running else [] for member in members]
    start = 0
    while start < len(members):
        end, rows, longest = start, 0, 0
        while end < len(members):
            longer = max([longest, *(len(row.prompt.token_ids) for row in batches[end])])
            more = max(rows, len(batches[end]))
            if end > start and longer * more * (end + 1 - start) > BATCH_TOKENS:
                break
            rows, longest, end = more, longer, end + 1
        if rows:
            yield slice(start, end), batches[start:end]
        start = end


def _gradients(
    model: PreTrainedModel,
    layers: Mapping[str, Stacked],
    prefixes: PrefixCache,
    members: Sequence[Member],
    part: slice,
    batches: list[list[Row]],
) -> list[float]:
    """Leave each member's gradients in its weights; the mean loss of each batch in nats. The rows go through in equal parts."""
    longest = max(len(row.prompt.token_ids) for batch in batches for row in batch)
    together = max(1, BATCH_TOKENS // (longest * len(batches)))
    builder = members[0].job.builder
    anything = next(batch[0] for batch in batches if batch)
    losses = torch.zeros(len(batches))
    torch.manual_seed(members[part][0].config.seed * 1_000_003 + members[part][0].step)  # dropout, and a resumed run's the same
    for start in range(0, max(map(len, batches)), together):
        chunks = [batch[start : start + together] for batch in batches]
        width = max(map(len, chunks))
        rows = [row for chunk in chunks for row in (*chunk, *[anything] * (width - len(chunk)))]
        share = [
            1 / len(batch) if index < len(chunk) else 0.0 for batch, chunk in zip(batches, chunks, strict=True) for index in range(width)
        ]
        logits, leaves = _at_verdict(model, layers, prefixes, part, rows)
        verdicts = torch.tensor([builder.yes_id if row.label else builder.no_id for row in rows], device=model.device)
        each = functional.cross_entropy(logits.float(), verdicts, reduction="none") * torch.tensor(share, device=model.device)
        each.sum().backward()
        losses += each.detach().view(len(batches), width).sum(1).cpu()
        for index, member in enumerate(members[part]):
            for weight, leaf in zip(member.weights, leaves, strict=True):
                grad = cast(Tensor, leaf.grad)[index]
                weight.grad = grad if weight.grad is None else weight.grad + grad
    return cast(list[float], losses.tolist())


def _at_verdict(
    model: PreTrainedModel, layers: Mapping[str, Stacked], prefixes: PrefixCache, part: slice, rows: Sequence[Row]
) -> tuple[Tensor, list[Tensor]]:
    """The vocabulary's scores `[rows, vocabulary]` after each suffix, the rows in equal parts for the adapters of `part`; their leaves."""
    cache, real = prefixes.gather([_prefix(row) for row in rows])
    leaves = [leaf for layer in layers.values() for leaf in layer.act(part)]
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            scores = model(**_suffixes(rows, real), past_key_values=cache, logits_to_keep=1).logits[:, -1]
    finally:
        for layer in layers.values():
            layer.act(None)  # whatever computes prefixes finds the bare base
    return scores, leaves


def _validation_logits(
    model: PreTrainedModel, layers: Mapping[str, Stacked], members: Sequence[Member], prefixes: PrefixCache
) -> list[list[float]]:
    """Each member's, neighbours with the same validation rows in one pass."""
    found: list[list[float]] = []
    while len(found) < len(members):
        start = len(found)
        rows = members[start].data.validation
        same = [number for number, member in enumerate(members[start:], start) if member.data.validation == rows]
        end = next(number for number in range(start + 1, len(members) + 1) if number not in same)
        prefixes.fill(_prefix(row) for row in rows)
        found += _verdict_logits(model, layers, prefixes, slice(start, end), rows, members[start].job.builder)
    return found


@torch.no_grad()
def _verdict_logits(
    model: PreTrainedModel, layers: Mapping[str, Stacked], prefixes: PrefixCache, part: slice, rows: Sequence[Row], builder: PromptBuilder
) -> list[list[float]]:
    """log P(yes) - log P(no) in nats of `rows`, for each adapter of `part`."""
    adapters = part.stop - part.start
    found = [[math.nan] * len(rows) for _ in range(adapters)]
    for indices in by_length([len(row.prompt.token_ids) for row in rows], BATCH_TOKENS // adapters):
        scores, _ = _at_verdict(model, layers, prefixes, part, [rows[index] for index in indices] * adapters)
        difference = scores[:, builder.yes_id].double() - scores[:, builder.no_id].double()
        for logits, values in zip(found, difference.view(adapters, -1).tolist(), strict=True):
            for index, value in zip(indices, values, strict=True):
                logits[index] = value
    return found


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
