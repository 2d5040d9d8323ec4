"""Spans' states and logits are those of each window alone, whatever shares its batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    DebertaV2Config,
    ModernBertConfig,
    ModernBertModel,
    XLMRobertaConfig,
)

from guard.conversation.example import Example, Message, Split, write_examples
from guard.errors import GuardError
from guard.prompt.encoder import EncoderPromptBuilder
from guard.weights.head import NO_WORDS
from tests.plain_words import plain_word_logit
from tests.train.conftest import FILLER, MakeEncoderJob, data, encoder_recipe
from train.encoder.model import load_encoder, reader_of
from train.encoder.trained import TrainedEncoder
from train.examples import Row, Rows
from train.head.fit import TrainedHead, fit_on
from train.job import Job
from train.methods import TRAINERS, Trained

ASKED = Message("user", "my order")
ANSWERED = Message("assistant", "a refund for books and food")


def test_heads_of_two_rules_read_each_its_own_turns(make_encoder_job: MakeEncoderJob) -> None:
    """What is kept for one is not given to the other."""
    of_all, of_assistant = make_encoder_job("head"), make_encoder_job("head", judged="assistant")
    prompt = of_all.builder.build([ASKED, ANSWERED], "")
    for _ in range(2):
        (whole,) = reader_of(of_all)([prompt])
        (narrow,) = reader_of(of_assistant)([prompt])
        assert len(whole.states) == whole.words.texts == 2
        np.testing.assert_array_equal(narrow.states, whole.states[1:])
        of_second = whole.words.rows == 1
        np.testing.assert_array_equal(narrow.words.keys, whole.words.keys[of_second])


SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}
SHAPES = {
    "bert": BertConfig(**SMALL),
    "deberta": DebertaV2Config(**SMALL),
    "modernbert": ModernBertConfig(**SMALL, pad_token_id=0, classifier_bias=True),
    "xlm-roberta": XLMRobertaConfig(**SMALL, pad_token_id=0),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_frozen_encoder_gives_the_classifier_s_states(kind: str, tmp_path: Path) -> None:
    """An adapter's classifier begins as a head on these states."""
    torch.manual_seed(0)
    whole = AutoModelForTokenClassification.from_config(SHAPES[kind]).eval()
    whole.save_pretrained(tmp_path)
    recipe = encoder_recipe(tmp_path)
    ids = torch.arange(1, 9).unsqueeze(0)
    with torch.inference_mode():
        states = load_encoder(recipe, torch.device("cpu"))(input_ids=ids).logits
        assert torch.allclose(whole.classifier(states), whole(input_ids=ids).logits, atol=1e-6)


def with_answers(job: Job) -> Rows:
    """Rows of two turns, in which both speakers say the word in every other row."""
    for split, count in (("train", 128), ("validation", 64), ("test", 64)):
        write_examples(job.data / f"{split}.jsonl", _answers(split, count))
    return data(job)


def test_a_head_does_not_learn_from_other_speakers(make_encoder_job: MakeEncoderJob) -> None:
    """Users say the word in every other row of both kinds; the label says whether the assistant
    does.
    """
    for judged, spans in (("assistant", 1), ("conversation", 2)):
        job = make_encoder_job("head", judged=judged, runs=judged)
        rows = with_answers(job)
        (head,) = fit_on(reader_of, [(job, rows)])
        assert isinstance(head, TrainedHead)
        assert share_right(head, rows.test) > 0.95
        read = head.reader([row.prompt for row in rows.test])
        assert {(len(row.states), row.words.texts) for row in read} == {(spans, spans)}


def share_right(trained: Trained, rows: Sequence[Row]) -> float:
    """The share of rows on whose side of 0 the logit is."""
    logits = np.array(trained.logits([row.prompt for row in rows]))
    labels = np.array([row.label for row in rows])
    return float(((logits > 0) == (labels == 1)).mean())


@pytest.mark.parametrize("method", ["head", "lora"])
def test_last_turns_alone_are_read(make_encoder_job: MakeEncoderJob, method: str) -> None:
    """Users say the word in every other row's first turn as well, and it means nothing there."""
    job = make_encoder_job(method, turns="last", max_steps=40)
    rows = with_answers(job)
    (trained,) = TRAINERS["encoder"][method].fit([(job, rows)])
    assert not isinstance(trained, GuardError)
    assert share_right(trained, rows.test) > 0.95
    if isinstance(trained, TrainedEncoder):
        check_words_of_last_turn(trained, rows.test)
    else:
        read = reader_of(job)([row.prompt for row in rows.test])
        assert {len(row.states) for row in read} == {1}


def check_words_of_last_turn(trained: TrainedEncoder, rows: Sequence[Row]) -> None:
    """Its words add to a logit what they say of that turn, and of no other."""
    prompts = [row.prompt for row in rows]
    added = np.subtract(trained.logits(prompts), replace(trained, words=NO_WORDS).logits(prompts))
    separator = cast(EncoderPromptBuilder, trained.job.builder).separator_id
    expected: list[float] = []
    for prompt in prompts:
        start = prompt.token_ids[:-1].index(separator) + 1  # of two turns the second's
        expected.append(plain_word_logit(trained.words.tensors(), prompt.token_ids[start:]))
    np.testing.assert_allclose(added, expected, atol=1e-4)
    assert np.ptp(expected) > 0.1


def _answers(split: Split, count: int) -> list[Example]:
    rng = random.Random(split)
    rows: list[Example] = []
    for index in range(count):
        said = ("banana", "refund")[index // 2 % 2], ("banana", "refund")[index % 2]
        texts = [" ".join([*rng.sample(FILLER, 4), word]) for word in said]
        messages = (Message("user", texts[0]), Message("assistant", texts[1]))
        name = f"{split}-{index}"
        rows.append(Example(name, "toy", messages, index % 2, split, "toy", name))
    return rows


def test_a_base_without_its_prediction_head_is_refused(tmp_path: Path) -> None:
    """Transformers would draw it, each time another one."""
    ModernBertModel(SHAPES["modernbert"]).save_pretrained(tmp_path)
    with pytest.raises(GuardError, match=r"lacks weights of a token classifier: head\.dense"):
        load_encoder(encoder_recipe(tmp_path), torch.device("cpu"))
