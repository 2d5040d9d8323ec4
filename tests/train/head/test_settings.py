"""Which settings a head reads, and which are tried."""

from __future__ import annotations

import math

import pytest

from guard.errors import GuardError
from guard.prompt.ngrams import NgramVocabulary, ngram_rows
from tests.train.conftest import with_settings
from train.head.settings import STRENGTHS, WORD_SCALES, check_head, settings_to_try
from train.job import Job

VOCABULARY = NgramVocabulary.of([ngram_rows([[1]]), ngram_rows([[1]]), ngram_rows([[2]])])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": {"CC": 1}}, r"methods\.head\.head: unknown key 'CC' of a head"),
        ({"head": {"C": "big"}}, r"methods\.head\.head: C must be a positive number"),
        ({"head": {"C": 0}}, r"methods\.head\.head: C must be a positive number"),
        ({"head": {"C": True}}, r"methods\.head\.head: C must be a positive number"),
        ({"head": {"C": math.inf}}, r"methods\.head\.head: C must be a positive number"),
        ({"lora": {"r": 8}}, r"methods\.head\.lora: a head does not use lora settings"),
        (
            {"trainer": {"optim": "sgd"}},
            r"methods\.head\.trainer: a head does not use trainer settings",
        ),
        ({"early_stopping_patience": 2}, r"methods\.head\.early_stopping_patience"),
        ({"min_steps": 300}, r"methods\.head\.min_steps"),
    ],
)
def test_settings_of_others_stop(job: Job, settings: dict[str, object], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        check_head(with_settings(job, **{"lora": {}} | settings))


def test_every_word_scale_is_tried_with_every_strength_unless_one_is_stated(job: Job) -> None:
    tried = settings_to_try(job, VOCABULARY)
    assert tried == [(scale, strength) for scale in WORD_SCALES for strength in STRENGTHS]
    stated = with_settings(job, lora={}, head={"C": 2.0})
    assert settings_to_try(stated, VOCABULARY) == [(scale, 2.0) for scale in WORD_SCALES]


def test_without_words_one_word_scale_is_enough(job: Job) -> None:
    tried = settings_to_try(job, NgramVocabulary.of([]))
    assert tried == [(WORD_SCALES[0], strength) for strength in STRENGTHS]
