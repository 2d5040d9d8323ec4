"""Verdict logits of prompts under a PEFT model. Knows nothing of labels, thresholds or files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import PeftModel
from tqdm import tqdm

from guard.prompt import Prompt, PromptBuilder
from train.adapter.batch import BATCH_TOKENS, by_length, left_padded


def verdict_logits(
    model: PeftModel,
    prompts: Sequence[Prompt],
    builder: PromptBuilder,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> list[float]:
    """log P(yes) - log P(no) at the verdict token, in nats, uncalibrated, in the order of `prompts`."""
    was_training = model.training
    model.eval()
    logits = [float("nan")] * len(prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    with (
        torch.inference_mode(),
        tqdm(total=len(prompts), desc="predict", unit="prompt", leave=False) as bar,
    ):
        for indices in by_length(lengths, batch_tokens):
            batch = left_padded([prompts[index].token_ids for index in indices])
            at_verdict = model(
                **{name: tensor.to(model.device) for name, tensor in batch.items()},
                logits_to_keep=1,
                use_cache=False,
            )
            # The softmax's normaliser is the same for both words and cancels.
            yes, no = (
                at_verdict.logits[:, -1, builder.yes_id].double(),
                at_verdict.logits[:, -1, builder.no_id].double(),
            )
            for index, logit in zip(indices, (yes - no).tolist(), strict=True):
                logits[index] = logit
            bar.update(len(indices))
    model.train(was_training)
    return logits
