"""What a head reads of an output is what it was trained on, whatever order windows come back in."""

from __future__ import annotations

import math
import random
from typing import get_args

import numpy as np
import pytest

from guard.conversation.example import ROLES, Message
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import ngram_rows
from guard.prompt.windows import Window, judged_of
from guard.recipe import load_recipe
from guard.rule import Reads
from serve.engine.backend import EngineOutput, SpokenSpan
from serve.engine.head import MOST_COUNTED, CountedTexts, HeadInput
from tests.plain_words import plain_keys


def conversation(rng: random.Random) -> list[Message]:
    """Some turns are empty, some longer than a window."""
    messages: list[Message] = []
    for _ in range(rng.randint(1, 6)):
        words = rng.choices(["word", "hurt", "a"], k=rng.choice([0, 0, 1, 3, 10, 60, 120]))
        messages.append(Message(rng.choice(list(ROLES)), " ".join(words)))
    return messages


def spoken(builder: EncoderPromptBuilder, windows: list[Window]) -> list[SpokenSpan]:
    spans: list[SpokenSpan] = []
    for window in windows:
        for start, end, speaker, turn in builder.spans(window):
            spans.append(SpokenSpan(speaker, turn, window.token_ids[start:end]))
    return spans


@pytest.mark.parametrize("reads", get_args(Reads))
def test_serving_reads_the_spans_and_words_of_training(reads: Reads) -> None:
    builder, rng = EncoderPromptBuilder.of(load_recipe("minilm")), random.Random(0)
    for _ in range(60):
        builder.window_tokens = rng.choice([16, 24, 40, 64])
        token_ids = builder.prefix_ids(conversation(rng))
        windows = builder.windows(token_ids, "conversation")
        rng.shuffle(windows)
        spans = spoken(builder, windows)
        states = np.arange(len(spans), dtype=np.float32)[:, None]
        read = HeadInput(EngineOutput("1", math.nan, 0, 0, states, tuple(spans)), token_ids)
        got = read.states(reads)
        assert got is not None
        served = sorted(spans[int(index)] for index in got[:, 0])
        trained_on = spoken(builder, builder.windows(token_ids, reads))
        assert served == sorted(trained_on)
        keys: list[int] = []
        for span in trained_on:
            if judged_of([span.speaker], reads):
                keys += set(plain_keys(span.token_ids))
        assert sorted(read.words(reads).keys.tolist()) == sorted(keys)


def test_the_words_of_one_conversation_are_counted_once_in_a_call() -> None:
    """An encoder's adapters have an output each, on the same spans."""
    counted = CountedTexts()
    texts = ((11, 12), (12, 13)), ((11, 12), (12, 13)), ((11, 12), (12, 14))
    words = []
    for first, second in texts:
        spans = SpokenSpan("user", 0, first), SpokenSpan("user", 1, second)
        output = EngineOutput("1", math.nan, 0, 0, np.zeros((2, 4), np.float32), spans)
        words.append(HeadInput(output, [], counted).words("user"))
    assert words[0] is words[1] and words[2].keys.tolist() != words[0].keys.tolist()
    for token in range(MOST_COUNTED):
        counted.of(((token,),))
    assert counted.of(texts[0]) is not words[0]  # of a call's many conversations few are kept


def test_the_words_of_a_decoder_s_conversation_are_counted_once_whatever_rules_are_told() -> None:
    """An output for each rule turn; what training counts, bit for bit."""
    counted, prefix = CountedTexts(), [11, 12, 11, 12, 13]
    words = []
    for number in range(3):
        output = EngineOutput(str(number), 0.0, 0, 0, np.zeros(4, np.float32))
        words.append(HeadInput(output, prefix, counted).words("user"))
    assert all(each is words[0] for each in words)
    for served, trained_on in zip(words[0], ngram_rows([prefix]), strict=True):
        assert np.array_equal(served, trained_on)
