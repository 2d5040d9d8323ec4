import random
from collections import Counter

import pytest

from data.generator.dimensions import UNRELATED, sample_dimensions
from data.generator.phrasebook import Corpus
from tests.data.generator.corpora import corpus_of


@pytest.fixture(scope="module", params=["medical_advice", "pii_leak", "jailbreak_attempt"])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    return corpus_of(request.param, ())


def test_acts_come_in_balanced_rounds_and_share_what_the_other_speaker_says(corpus: Corpus) -> None:
    rows = sample_dimensions(corpus, 200, random.Random(0))
    violating = Counter(row.violating_act for row in rows)
    assert set(violating) == set(corpus.acts(violating=True))
    assert max(violating.values()) - min(violating.values()) <= 1
    allowed = Counter(row.allowed_act for row in rows)
    assert 0 < allowed.pop(UNRELATED) < 40
    assert set(allowed) == set(corpus.acts(violating=False))
    for row in rows:
        pair = (row.violating_act, row.allowed_act)
        assert row.allowed_act == UNRELATED or corpus.book.shared(*pair)
