"""What a suffix's last position answers, and the loss of it: the words yes and no, or a head.

A head starts as one fitted to the same rows on the frozen base; or on the base with the reader,
beside the reader's logit. The adapter starts at zero, or as the reader's, so training starts at
what the head knows, and a head that is fitted first keeps it from distorting the base (Kumar et
al., 2022). The words' weights stay fixed, and a training row gets those of a fit to
other rows: a fit to itself would know it by heart. Knows nothing of optimizers or steps.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from guard.files.atomic import atomic_write
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.weights.head import NO_WORDS, Head, WordWeights
from train.adapter.trained import float32_head, yes_minus_no
from train.examples import Row, Rows
from train.head.fit import fitted_with_held_out_words, judged_words
from train.head.regression import SpansReader
from train.job import Job
from train.prefix.prefixes import Prefixes
from train.prefix.stacked import StackedModel

START = "begun_head.pt"  # in a job's scratch folder


def suffix_of(row: Row) -> Sequence[int]:
    """The tokens that an aLoRA computes."""
    return row.prompt.token_ids[row.prompt.invocation_start :]


class Readout(ABC):
    """How the adapters of a stacked model answer rows. Rows are those of `adapters`, in equal
    parts; `prefixes` are what they stand on.
    """

    @abstractmethod
    def losses(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        """The loss of each row in nats, `[rows]`, with its gradients."""

    @abstractmethod
    def logits(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        """The uncalibrated logit of each row in nats, `[rows]` float64."""


class WordReadout(Readout):
    """The next token, yes or no, over the whole vocabulary."""

    def __init__(self, stacked: StackedModel, builder: PromptBuilder) -> None:
        self._stacked = stacked
        self._builder = builder

    def losses(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        logits = self._stacked.logits(adapters, prefixes, list(map(suffix_of, rows))).float()
        words = [row.verdict_id(self._builder) for row in rows]
        return functional.cross_entropy(
            logits, torch.tensor(words, device=logits.device), reduction="none"
        )

    def logits(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        with float32_head(self._stacked.model):
            logits = self._stacked.logits(adapters, prefixes, list(map(suffix_of, rows)))
        return yes_minus_no(logits, self._builder)


@dataclass
class HeadInTraining:
    """A head to train beside an adapter. `word_logits` are what the words add to each row's logit,
    by id.
    """

    weight: nn.Parameter  # [hidden size] float32
    bias: nn.Parameter
    words: WordWeights
    word_logits: Mapping[str, float]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def as_trained(self) -> Head:
        return Head(self.weight.detach().cpu().numpy(), float(self.bias.detach()), self.words)


class HeadReadout(Readout):
    """A head of each adapter's own on the last state, `heads` in the adapters' order."""

    def __init__(self, stacked: StackedModel, heads: Sequence[HeadInTraining]) -> None:
        self._stacked = stacked
        self._heads = heads

    def losses(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        labels = torch.tensor([float(row.label) for row in rows])
        logits = self._logits(adapters, rows, prefixes)
        return functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.device), reduction="none"
        )

    def logits(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        return self._logits(adapters, rows, prefixes).double()

    def _logits(self, adapters: Sequence[int], rows: Sequence[Row], prefixes: Prefixes) -> Tensor:
        states = self._stacked.states(adapters, prefixes, list(map(suffix_of, rows))).float()
        by_adapter = states.view(len(adapters), -1, states.shape[1])
        heads = [self._heads[adapter] for adapter in adapters]
        weights = torch.stack([head.weight for head in heads])
        biases = torch.stack([head.bias for head in heads])
        logits = torch.einsum("ars,as->ar", by_adapter, weights) + biases[:, None]
        word_logits: list[float] = []
        for head, first in zip(heads, range(0, len(rows), by_adapter.shape[1]), strict=True):
            chunk = rows[first : first + by_adapter.shape[1]]
            # What fills up a shorter batch is another adapter's row, and its loss weighs nothing.
            word_logits += [head.word_logits.get(row.id, 0.0) for row in chunk]
        return logits.flatten() + torch.tensor(word_logits, device=logits.device)


def begin_head(
    job: Job, rows: Rows, reader: SpansReader, prior: Head | None, alike: Path | None
) -> Path:
    """The file of the head that is fitted to the job's rows, from a `prior`: an interrupted run's,
    or a copy of `alike`, that of another job with the same rows, where there is one. Raises
    GuardError for states that are not finite.
    """
    file = job.scratch / START
    if file.is_file():
        return file
    if alike is not None:
        with atomic_write(file) as part:
            shutil.copyfile(alike, part)
        return file
    trained, held_out = fitted_with_held_out_words(job, rows, reader, prior)
    head = trained.head
    word_logits: dict[str, float] = {}
    for row, (held_out_words, offset) in zip(rows.train, held_out, strict=True):
        word_logits[row.id] = _word_logit(held_out_words, job, row.prompt) + offset
    for row in (*rows.validation, *rows.test):
        word_logits[row.id] = _word_logit(head.words, job, row.prompt)
    words = {name: torch.from_numpy(array) for name, array in head.words.tensors().items()}
    begun = {
        "weight": torch.from_numpy(head.weight),
        "bias": torch.tensor(head.bias),
        "words": words,
        "word_logits": word_logits,
    }
    with atomic_write(file) as part:
        torch.save(begun, part)
    return file


def head_in(file: Path, device: torch.device) -> HeadInTraining:
    """The head that `begin_head` left, to be trained on `device`."""
    begun = torch.load(file, weights_only=True)
    words = {name: tensor.numpy() for name, tensor in begun["words"].items()}
    return HeadInTraining(
        weight=nn.Parameter(begun["weight"].to(device)),
        bias=nn.Parameter(begun["bias"].to(device)),
        words=WordWeights.of_tensors(words, file, "Train again with FORCE=1"),
        word_logits=begun["word_logits"],
    )


def no_head(model: PreTrainedModel, device: torch.device) -> HeadInTraining:
    """That of an adapter that is not trained, beside others that are."""
    weight = torch.zeros(model.config.get_text_config().hidden_size, device=device)
    bias = torch.zeros((), device=device)
    return HeadInTraining(nn.Parameter(weight), nn.Parameter(bias), NO_WORDS, {})


def _word_logit(words: WordWeights, job: Job, prompt: Prompt) -> float:
    return float(words.logits(judged_words(job, prompt))[0])
