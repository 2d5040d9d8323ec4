"""The loss of training rows on an encoder with a rule's adapter, and its gradients.

A row is trained on its highest span, and of several windows on that with the highest. Knows nothing
of optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.windows import Window
from guard.rule import Reads
from train.batch import BATCH_TOKENS, by_length
from train.encoder.bases import EncoderBase
from train.encoder.model import device, right_padded, span_means, span_words
from train.examples import Row
from train.head.fit import HeldOutWords


@dataclass(frozen=True)
class Objective:
    """What training lowers: the binary cross-entropy of the rows' labels, in nats.

    `held_out` are the words of each row, from a fit that has not seen it, in the rows' order.
    """

    base: EncoderBase
    builder: EncoderPromptBuilder
    reads: Reads
    rows: Sequence[Row]
    held_out: Sequence[HeldOutWords]

    def backward(self, model: PeftModel, batch: Sequence[int]) -> float:
        """The mean loss of these rows; its gradients are added to the adapter's.

        The rows go through the model in parts of bounded size, whose gradients add up.
        """
        windows = self._highest(model, batch)
        train_adapter_alone(model)
        loss = 0.0
        for part in by_length([len(window.token_ids) for window in windows], BATCH_TOKENS):
            in_order = sorted(part)
            rows = [batch[number] for number in in_order]
            summed = self._summed_loss(model, rows, [windows[number] for number in in_order])
            of_part = summed / len(batch)
            of_part.backward()
            loss += of_part.item()
        return loss

    def _summed_loss(
        self, model: PeftModel, rows: Sequence[int], windows: Sequence[Window]
    ) -> Tensor:
        ids, mask = right_padded(windows, device())
        of_tokens = self.base.token_logits(model, ids, mask)
        logits: list[Tensor] = []
        for index, tokens, window in zip(rows, of_tokens, windows, strict=True):
            of_spans = span_means(tokens, self.builder.spans(window))[:, 0]
            of_words = torch.from_numpy(self._of_words(index, window)).to(of_spans)
            logits.append((of_spans + of_words).max())
        labels = torch.tensor([float(self.rows[index].label) for index in rows])
        labels = labels.to(of_tokens.device)
        return binary_cross_entropy_with_logits(torch.stack(logits), labels, reduction="sum")

    def _of_words(self, index: int, window: Window) -> np.ndarray:
        """What words say of each span of a row's window, [spans] in nats."""
        words, offset = self.held_out[index]
        return words.logits(span_words(self.builder, [window], self.reads)) + offset

    def _highest(self, model: PeftModel, batch: Sequence[int]) -> list[Window]:
        """Of each row the window with the highest logit; those of all rows are read together."""
        of_rows: list[list[Window]] = []
        for index in batch:
            of_rows.append(self.builder.windows(self.rows[index].prompt.token_ids, self.reads))
        to_compare: list[list[Window]] = []
        for windows in of_rows:
            if len(windows) > 1:
                to_compare += [[window] for window in windows]
        spans = iter(self.base.span_logits(model, self.builder, to_compare))
        highest: list[Window] = []
        for index, windows in zip(batch, of_rows, strict=True):
            best = 0
            if len(windows) > 1:
                logits = [next(spans)[:, 0] + self._of_words(index, window) for window in windows]
                best = int(np.argmax([of_window.max() for of_window in logits]))
            highest.append(windows[best])
        return highest


def train_adapter_alone(model: PeftModel) -> None:
    """Let the adapter's dropout be on, as its settings say, and the base's be off.

    The base's would draw a number for every weight of its attention: 2.7 s a step of 16 windows on
    two cores, of which 1.5 without it.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()
