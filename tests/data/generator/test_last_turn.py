"""Of a rule on the last turn both conversations of a pair end where the violating act stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from data.generator.dimensions import UNRELATED
from data.generator.generate import Counts, generate
from data.generator.library import load_excerpts
from data.splits import text_of
from guard.example import Example
from guard.prompt.encoder import SPEAKERS
from guard.rule import Turns
from tests.data.generator.corpora import RULES_WITH_PHRASES, corpus_of

pytestmark = pytest.mark.slow

COUNTS = Counts(train=200, validation=16, test=40)


def written(name: str, turns: Turns = "last") -> list[Example]:
    corpus = corpus_of(name)
    rule = corpus.rule.model_copy(update={"turns": turns})
    return generate(replace(corpus, rule=rule), COUNTS, 0, load_excerpts(rule))


@pytest.fixture(params=RULES_WITH_PHRASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_pair_differs_in_its_last_turn_which_is_judged(name: str) -> None:
    speakers = SPEAKERS[corpus_of(name).rule.reads]
    rows = written(name)
    for violating, allowed in zip(rows[::2], rows[1::2], strict=True):
        assert (violating.label, allowed.label) == (1, 0)
        judged = [turn for turn, m in enumerate(violating.messages) if m.role in speakers]
        act = f"{name}/{violating.meta['violating_act']}"
        assert violating.meta["acts"][judged[-1]] == act
        assert len(violating.meta["acts"]) == len(violating.messages)
        if "excerpt" not in violating.meta:
            assert judged[-1] == len(violating.messages) - 1
        if allowed.meta["act"] != UNRELATED:
            assert len(allowed.messages) == len(violating.messages)
            turns = zip(violating.messages, allowed.messages, strict=True)
            assert [turn for turn, (a, b) in enumerate(turns) if a != b] == judged[-1:]


def test_what_violates_may_stand_before_the_last_turn_in_both_rows(name: str) -> None:
    book, judged = corpus_of(name).book, corpus_of(name).rule.judged
    violating = {f"{name}/{act}" for act, of in book.acts.items() if of.violates(judged)}
    earlier = {0: 0, 1: 0}
    for row in written(name):
        earlier[row.label] += bool(violating & set(row.meta["acts"][:-1]))
    assert earlier[0] > 0 and abs(earlier[0] - earlier[1]) <= 5  # unrelated pairs differ


def test_length_and_turns_say_little_about_the_label(name: str) -> None:
    rows = written(name)
    labels = [row.label for row in rows]
    assert abs(roc_auc_score(labels, [len(text_of(row)) for row in rows]) - 0.5) < 0.1
    assert abs(roc_auc_score(labels, [len(row.messages) for row in rows]) - 0.5) < 0.03


def test_no_row_is_a_system_message_about_nothing(name: str) -> None:
    for row in written(name):
        if len(row.messages) == 1 and row.messages[0].role == "system":
            assert "excerpt" in row.meta
