"""Of a rule on the last turn the label is that of the last turn of whom it judges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from data.generator.generate import Counts, generate
from data.generator.last_turn import GOES_ON, on_last_turn
from data.generator.library import load_excerpts
from data.splits import text_of
from guard.example import Example
from guard.prompt.encoder import SPEAKERS
from tests.data.generator.corpora import RULES_WITH_PHRASES, corpus_of

COUNTS = Counts(train=160, validation=16, test=40)


def written(name: str, turns: str = "last") -> list[Example]:
    corpus = corpus_of(name)
    rule = corpus.rule.model_copy(update={"turns": turns})
    return generate(replace(corpus, rule=rule), COUNTS, 0, load_excerpts(rule))


@pytest.mark.parametrize("name", RULES_WITH_PHRASES)
def test_the_last_turn_is_judged_and_decides_the_label(name: str) -> None:
    corpus = corpus_of(name)
    speakers = SPEAKERS[corpus.rule.reads]
    violating = {
        f"{name}/{act}"
        for act, of_book in corpus.book.acts.items()
        if of_book.violates(corpus.rule.judged)
    }
    for example in written(name):
        acts = example.meta["acts"]
        assert len(acts) == len(example.messages)
        assert example.messages[-1].role in speakers or not _any_judged(example, speakers)
        if "excerpt" in example.meta:
            violates = acts[-1] == f"{name}/{example.meta['violating_act']}"
        else:
            violates = acts[-1] in violating
        assert violates == (example.label == 1), example.id
        assert len(example.meta["cores"]) == len(example.meta["phrasings"])


def _any_judged(example: Example, speakers: tuple[str, ...]) -> bool:
    return any(message.role in speakers for message in example.messages)


def test_some_allowed_conversations_violate_before_the_last_turn() -> None:
    before = 0
    rows = [example for name in RULES_WITH_PHRASES for example in written(name)]
    for example in rows:
        violating = f"{example.rule}/{example.meta['violating_act']}"
        before += example.label == 0 and violating in example.meta["acts"][:-1]
    assert 0.05 < before / len(rows) < GOES_ON


def test_length_and_turns_say_little_about_the_label() -> None:
    rows = [example for name in RULES_WITH_PHRASES for example in written(name)]
    labels = [example.label for example in rows]
    assert abs(roc_auc_score(labels, [len(text_of(e)) for e in rows]) - 0.5) < 0.06
    assert abs(roc_auc_score(labels, [len(e.messages) for e in rows]) - 0.5) < 0.06


def test_a_rule_on_any_turn_keeps_its_rows() -> None:
    name = random.Random(0).choice(RULES_WITH_PHRASES)
    rows = written(name, "any")
    assert on_last_turn(rows[:2], corpus_of(name).rule) == rows[:2]
    assert [row.label for row in rows] == [1, 0] * (len(rows) // 2)
