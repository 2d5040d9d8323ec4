"""Trains the reader's adapter and head. A step reads a few units' conversations once under the bare
base, and computes all their policies as suffixes on them. The steps are the same however often the
run is interrupted. Knows nothing of files of rows, thresholds or cards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from guard.files.atomic import atomic_write
from guard.recipe import Recipe
from train.base import load_served_base
from train.prefix.cache import Budget, PrefixCache
from train.prefix.prefixes import Prefixes
from train.prefix.stacked import StackedModel
from train.prefix.suffixes import attend_to_prefixes
from train.reader.rows import TokenUnit, packed

LEARNING_RATE = 7e-4  # between two that are level; at 2e-3 it does not learn to read
WARMUP = 0.04  # of the steps
CHECKPOINT_S = 240
CHECKPOINT = "checkpoint.pt"


class ReaderInTraining:
    """A fresh adapter of `config` and a head of zeros on the recipe's base."""

    def __init__(self, recipe: Recipe, config: LoraConfig, seed: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_served_base(recipe, device)
        self._prefixes = PrefixCache(self.model, Budget())
        attend_to_prefixes(self.model, lambda prefix: self._prefixes.read([tuple(prefix)])[0])
        self.stacked = StackedModel(self.model, [config], [seed], [f"recipe {recipe.name}: alora"])
        self.weight = nn.Parameter(torch.zeros(self.model.config.hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        self.weights = [*self.stacked.weights(0), self.weight, self.bias]

    @torch.no_grad()
    def round(self) -> None:
        """Round the adapter's weights to bfloat16, as they are kept."""
        for weight in self.stacked.weights(0):
            weight.copy_(weight.bfloat16())

    def logits(self, units: Sequence[TokenUnit]) -> Tensor:
        """`[suffixes]` in nats, those of each unit behind one another."""
        numbers: dict[tuple[int, ...], int] = {}
        stands_on: list[int] = []
        for unit in units:
            places = [numbers.setdefault(prefix, len(numbers)) for prefix in unit.prefixes]
            stands_on += [places[index] for index in unit.stands_on]
        suffixes = [suffix for unit in units for suffix in unit.suffixes]
        prefixes = Prefixes(self._prefixes.read(list(numbers)), stands_on)
        states = self.stacked.states([0], prefixes, suffixes).float()
        return states @ self.weight + self.bias

    def loss(self, units: Sequence[TokenUnit]) -> Tensor:
        """The mean of two losses in nats: of each label, and of each pair of a unit's suffixes of
        which one is broken. Without pairs nothing is learned (docs/lessons.md).
        """
        logits = self.logits(units)
        labels = torch.tensor([float(label) for unit in units for label in unit.labels])
        labels = labels.to(logits.device)
        pairs: list[Tensor] = []
        parts = [len(unit.labels) for unit in units]
        for ours, broken in zip(logits.split(parts), labels.split(parts), strict=True):
            pairs.append((ours[broken == 1][:, None] - ours[broken == 0][None]).flatten())
        of_pairs = functional.softplus(-torch.cat(pairs)).mean()
        return (functional.binary_cross_entropy_with_logits(logits, labels) + of_pairs) / 2

    @torch.no_grad()
    def answers(self, units: Sequence[TokenUnit]) -> tuple[list[float], list[int], list[str]]:
        """Logits in nats, labels and sources of all suffixes."""
        logits: list[float] = []
        labels: list[int] = []
        sources: list[str] = []
        for batch in tqdm(list(packed(units)), desc="answers", leave=False):
            logits += self.logits(batch).tolist()
            for unit in batch:
                labels += unit.labels
                sources += [unit.source] * len(unit.labels)
        return logits, labels, sources


def train(
    reader: ReaderInTraining, batches: Sequence[Sequence[TokenUnit]], folder: Path, inputs: str
) -> None:
    """Take a step for each batch; go on where a run of the same `inputs` was interrupted."""
    optimizer = torch.optim.AdamW(
        reader.weights, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    warmup = int(WARMUP * len(batches))
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup, len(batches))
    state: dict[str, Any] = {"inputs": inputs, "optimizer": optimizer, "schedule": schedule}
    folder.mkdir(parents=True, exist_ok=True)
    first = _resume(reader, state, folder / CHECKPOINT)
    saved_at = time.monotonic()
    bar = tqdm(batches[first:], initial=first, total=len(batches), desc="reader", unit="step")
    for step, batch in enumerate(bar, start=first + 1):
        loss = reader.loss(batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(reader.weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{float(loss.detach()):.3f}", refresh=False)
        if step == len(batches) or time.monotonic() - saved_at > CHECKPOINT_S:
            _save(reader, state | {"step": step}, folder / CHECKPOINT)
            saved_at = time.monotonic()


def _resume(reader: ReaderInTraining, state: dict[str, Any], file: Path) -> int:
    if not file.is_file():
        return 0
    kept = torch.load(file, weights_only=True)
    if kept["inputs"] != state["inputs"]:
        return 0
    for weight, saved in zip(reader.weights, kept["weights"], strict=True):
        weight.data.copy_(saved)
    state["optimizer"].load_state_dict(kept["optimizer"])
    state["schedule"].load_state_dict(kept["schedule"])
    return int(kept["step"])


def _save(reader: ReaderInTraining, state: dict[str, Any], file: Path) -> None:
    kept = {
        "inputs": state["inputs"],
        "weights": [weight.data.clone() for weight in reader.weights],
        "optimizer": state["optimizer"].state_dict(),
        "schedule": state["schedule"].state_dict(),
        "step": state["step"],
    }
    with atomic_write(file) as part:
        torch.save(kept, part)
