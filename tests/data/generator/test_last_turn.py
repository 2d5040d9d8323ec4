"""Of a rule on the last turn both conversations of a pair end where the violating act stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from data.generator.generate import Counts, generate
from data.generator.library import load_excerpts
from data.splits import text_of
from guard.conversation.example import Example
from guard.prompt.windows import counting
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


def test_the_last_judged_turn_is_what_a_pair_differs_in_and_decides_the_label(name: str) -> None:
    corpus = corpus_of(name)
    reads = corpus.rule.model_copy(update={"turns": "last"}).reads
    violating_acts = violating_acts_of(name)
    rows = written(name)
    for pair in zip(rows[::2], rows[1::2], strict=True):
        assert [row.label for row in pair] == [1, 0]
        turns = list(zip(*(row.messages for row in pair), strict=True))
        differing = [turn for turn, (first, second) in enumerate(turns) if first != second]
        for row in pair:
            roles = [message.role for message in row.messages]
            (last,) = counting(roles, reads)
            assert differing == [last]
            acts = row.meta["acts"]
            assert len(acts) == len(row.messages)
            assert acts[last] == f"{name}/{row.meta['act']}"
            if "excerpt" in row.meta:
                violates = row.meta["act"] == row.meta["violating_act"]
            else:
                violates = acts[last] in violating_acts
                assert last == len(row.messages) - 1
                assert len(row.meta["cores"]) == sum(act is not None for act in acts)
            assert violates == (row.label == 1)


def violating_acts_of(name: str) -> set[str]:
    book, judged = corpus_of(name).book, corpus_of(name).rule.judged
    return {f"{name}/{act}" for act, of_book in book.acts.items() if of_book.violates(judged)}


def test_what_violates_may_stand_before_the_last_turn_in_both_rows(name: str) -> None:
    earlier = {0: 0, 1: 0}
    for row in written(name):
        earlier[row.label] += bool(violating_acts_of(name) & set(row.meta["acts"][:-1]))
    assert earlier[0] == earlier[1] > 0


def test_length_says_little_about_the_label(name: str) -> None:
    rows = written(name)
    labels = [row.label for row in rows]
    assert abs(roc_auc_score(labels, [len(text_of(row)) for row in rows]) - 0.5) < 0.08
    # Of the turn itself as little as in rows on any turn, where the rule's phrases decide.
    last = roc_auc_score(labels, [len(row.messages[-1].content) for row in rows])
    assert abs(last - 0.5) < 0.2
