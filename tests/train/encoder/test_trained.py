"""What a trained encoder answers is what plain PEFT and its words say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForTokenClassification

from guard.conversation.example import Message, read_examples
from guard.method import WORDS
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.windows import SPAN_TOKENS
from guard.rule import Judged
from tests.plain_words import plain_word_logit
from tests.train.conftest import data
from tests.train.encoder.conftest import MakeEncoderJob
from train.encoder.trained import TrainedEncoder
from train.encoder.trainer import fit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("judged", ["conversation", "assistant"])
def test_plain_peft_agrees(
    make_encoder_job: MakeEncoderJob, tmp_path: Path, judged: Judged
) -> None:
    job = make_encoder_job(judged=judged, max_steps=4, eval_steps=2)
    (adapter,) = fit([(job, data(job))])
    assert isinstance(adapter, TrainedEncoder), adapter
    adapter.save(tmp_path / "adapter")
    base = AutoModelForTokenClassification.from_pretrained(job.recipe.base_path, num_labels=2)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    builder = cast(EncoderPromptBuilder, job.builder)
    examples = read_examples(job.data / "test.jsonl")
    prompts = [row.prompt for row in data(job).test]
    words = load_file(tmp_path / "adapter" / WORDS)
    assert np.abs(words["ngram_weights"]).max() > 0.1
    expected = [_logit(model, words, builder, example.messages, judged) for example in examples]
    np.testing.assert_allclose(adapter.logits(prompts), expected, atol=1e-5)


def _logit(
    model: PeftModel,
    words: dict[str, np.ndarray],
    builder: EncoderPromptBuilder,
    messages: Sequence[Message],
    judged: Judged,
) -> float:
    """Of a conversation of one window and short turns: of the judged turns, or of all. Words count
    of whom the rule judges.
    """
    ids = [builder.start_id]
    ends: list[int] = []
    for message in messages:
        ids += [*builder.turn_ids(message), builder.separator_id]
        ends.append(len(ids))
    assert len(ids) <= builder.window_tokens
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    difference = logits[:, 1] - logits[:, 0]
    means: list[float] = []
    of_judged: list[float] = []
    for message, start, end in zip(messages, [1, *ends], ends, strict=False):
        assert end - start <= SPAN_TOKENS
        means.append(float(difference[start:end].mean()))
        if judged in ("conversation", message.role):
            means[-1] += plain_word_logit(words, ids[start:end])
        if message.role == judged:
            of_judged.append(means[-1])
    return max(of_judged or means)
