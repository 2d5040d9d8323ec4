"""The loss of training rows on an encoder with a rule's adapter, and its gradients. A row is
trained on its highest span, in the window that has it. Knows nothing of optimizers.
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
from train.encoder.model import device, read, right_padded, span_means, span_words
from train.examples import Row
from train.head.fit import HeldOutWords


@dataclass(frozen=True)
class Objective:
    """What training lowers: the binary cross-entropy of the rows' labels, in nats. `held_out` are
    the word weights for each row, from a fit that has not seen it.
    """

    base: EncoderBase
    builder: EncoderPromptBuilder
    reads: Reads
    rows: Sequence[Row]
    held_out: Sequence[HeldOutWords]

    def backward(self, model: PeftModel, batch: Sequence[int]) -> float:
        """The mean loss of these rows; its gradients are added to the adapter's. The rows go
        through the model in parts of bounded size, whose gradients add up.
        """
        windows = self._highest(model, batch)
        train_adapter_alone(model)
        loss = 0.0
        for part in by_length([len(window.token_ids) for window in windows], BATCH_TOKENS):
            in_order = sorted(part)
            rows = [batch[number] for number in in_order]
            summed = self._summed_loss(model, rows, [windows[number] for number in in_order])
            part_loss = summed / len(batch)
            part_loss.backward()
            loss += part_loss.item()
        return loss

    def _summed_loss(
        self, model: PeftModel, rows: Sequence[int], windows: Sequence[Window]
    ) -> Tensor:
        ids, mask = right_padded(windows, device())
        batch_token_logits = self.base.token_logits(model, ids, mask)
        logits: list[Tensor] = []
        for index, token_logits, window in zip(rows, batch_token_logits, windows, strict=True):
            span_logits = span_means(token_logits, self.builder.spans(window))[:, 0]
            word_logits = torch.from_numpy(self._word_logits(index, window)).to(span_logits)
            logits.append((span_logits + word_logits).max())
        labels = torch.tensor([float(self.rows[index].label) for index in rows])
        labels = labels.to(batch_token_logits.device)
        return binary_cross_entropy_with_logits(torch.stack(logits), labels, reduction="sum")

    def _word_logits(self, index: int, window: Window) -> np.ndarray:
        """What its words add to the logit of each span of a row's window, [spans] in nats."""
        words, offset = self.held_out[index]
        return words.logits(span_words(self.builder, [window], self.reads)) + offset

    def _highest(self, model: PeftModel, batch: Sequence[int]) -> list[Window]:
        """Each row's window with the highest logit. The windows of all rows are read together."""
        row_windows: list[list[Window]] = []
        for index in batch:
            row_windows.append(self.builder.windows(self.rows[index].prompt.token_ids, self.reads))
        to_compare: list[list[Window]] = []
        for windows in row_windows:
            if len(windows) > 1:
                to_compare += [[window] for window in windows]
        span_logits = iter(read(model, self.base.token_logits, self.builder, to_compare))
        highest: list[Window] = []
        for index, windows in zip(batch, row_windows, strict=True):
            best = 0
            if len(windows) > 1:
                window_logits: list[float] = []
                for window in windows:
                    logits = next(span_logits)[:, 0] + self._word_logits(index, window)
                    window_logits.append(logits.max())
                best = int(np.argmax(window_logits))
            highest.append(windows[best])
        return highest


def train_adapter_alone(model: PeftModel) -> None:
    """Turn the adapter's dropout on, as its settings say, and the base's off. The base's would draw
    a number for every weight of its attention: a step of 16 windows takes 2.7 s on two cores with
    it, and 1.5 s without.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()
