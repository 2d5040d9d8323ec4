"""Turns' states and logits are those of each window alone, whatever shares its batch."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from transformers import AutoModel

from guard.encoder_prompt import EncoderPromptBuilder
from guard.example import Message
from tests.train.conftest import data
from tests.train.encoder.conftest import MakeEncoderJob
from train.encoder.model import device, fit_heads, load_encoder, mean_states
from train.head import TrainedHead

CONVERSATIONS = (
    (Message("user", "hello"),),
    (Message("user", "my order"), Message("assistant", "a refund for books and food")),
    tuple(Message("user", f"please help with my order number {n}") for n in range(9)),
)


def test_states_are_the_means_of_each_turn_of_each_window_alone(
    make_encoder_job: MakeEncoderJob,
) -> None:
    job = make_encoder_job()
    builder = cast(EncoderPromptBuilder, job.builder)
    base = AutoModel.from_pretrained(job.recipe.base_path).eval()
    prompts = [builder.build(messages, "") for messages in CONVERSATIONS]
    assert len(builder.windows(prompts[-1].token_ids)) > 1
    states = mean_states(load_encoder(job.recipe, device()), builder, prompts)
    for prompt, of_prompt in zip(prompts, states, strict=True):
        expected: list[np.ndarray] = []
        for window in builder.windows(prompt.token_ids):
            with torch.inference_mode():
                hidden = base(input_ids=torch.tensor([window])).last_hidden_state[0].numpy()
            expected += [hidden[start:end].mean(axis=0) for start, end in builder.spans(window)]
        np.testing.assert_allclose(of_prompt, np.stack(expected), atol=1e-5)


def test_a_head_on_the_frozen_encoder_learns_a_word_in_any_turn(
    make_encoder_job: MakeEncoderJob,
) -> None:
    job = make_encoder_job("head", n_train=128)
    rows = data(job)
    (head,) = fit_heads([(job, rows)])
    assert isinstance(head, TrainedHead)
    logits = np.array(head.logits([row.prompt for row in rows.test]))
    labels = np.array([row.label for row in rows.test])
    assert ((logits > 0) == (labels == 1)).mean() > 0.8
