"""A trained encoder: what it answers, and how it is written. Knows nothing of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from peft import PeftModel
from safetensors.numpy import save_file

from guard.method import WORDS
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from guard.weights.head import WordWeights
from train.adapter.trained import save_adapter
from train.encoder.bases import BASES
from train.encoder.model import read, span_words
from train.job import Job


@dataclass(frozen=True)
class TrainedEncoder:
    """A job's adapter, and its head if it has one, in PEFT's layers on the encoder. `words` are the
    word weights beside it. `validation_logits` are to calibrate on: of a head that was fitted to
    validation rows too, those from before.
    """

    model: PeftModel
    job: Job
    words: WordWeights
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """The highest logit of each prompt's counting spans, in nats, uncalibrated, through plain
        PEFT.
        """
        builder = cast(EncoderPromptBuilder, self.job.builder)
        windows = [builder.windows(prompt.token_ids, self.job.reads) for prompt in prompts]
        base = BASES[self.job.recipe.kind]
        logits: list[float] = []
        all_span_logits = read(self.model, base.token_logits, builder, windows)
        for prompt_windows, span_logits in zip(windows, all_span_logits, strict=True):
            words = span_words(builder, prompt_windows, self.job.reads)
            logits.append(float((span_logits[:, 0] + self.words.logits(words)).max()))
        return logits

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, and the words; a head of the rule's own stands among the weights,
        as `classifier`.
        """
        save_adapter(self.model, self.job.recipe, folder)
        if self.words:
            save_file(self.words.tensors(), folder / WORDS)
