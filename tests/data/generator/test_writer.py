"""A group: two conversations that share everything but the target.

Whole data sets are held in test_generate.py.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from data.generator.dimensions import UNRELATED, Dimensions, sample_dimensions
from data.generator.exchange import Exchange
from data.generator.phrasebook import Corpus, Phrasebook
from data.generator.writer import Writer
from guard.conversation.example import Example
from tests.data.generator.corpora import corpus_of


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of("pii_leak", ("medical_advice",))


@pytest.fixture(scope="module")
def plain(corpus: Corpus) -> Dimensions:
    """A long conversation, neither tricked nor unrelated."""
    sampled = sample_dimensions(corpus, 200, random.Random(0))
    related = next(dimensions for dimensions in sampled if dimensions.allowed_act != UNRELATED)
    return replace(
        related, target_tokens=600, trick=None, has_system=False, user_register="neutral"
    )


def _differing(pair: list[Example]) -> list[int]:
    violating, allowed = pair
    turns = zip(violating.messages, allowed.messages, strict=True)
    return [number for number, (first, second) in enumerate(turns) if first != second]


def test_the_target_stands_where_its_position_says(corpus: Corpus, plain: Dimensions) -> None:
    writer = Writer(corpus, "seen")
    turns = {}
    for position in ("early", "middle", "late"):
        pair = writer.group(replace(plain, position=position), "train", "key")
        turns[position] = _differing(pair)[0] / len(pair[0].messages)
    assert turns["early"] < 0.2 < turns["middle"] < 0.8 < turns["late"]


def test_a_system_message_comes_first_without_an_act(corpus: Corpus, plain: Dimensions) -> None:
    pair = Writer(corpus, "seen").group(replace(plain, has_system=True), "train", "key")
    for example in pair:
        assert [message.role for message in example.messages[:2]] == ["system", "user"]
        assert example.meta["acts"][0] is None


def test_some_long_conversations_end_with_the_judged_turn_and_no_answer() -> None:
    corpus = corpus_of("jailbreak_attempt", ())
    writer, last = Writer(corpus, "seen"), set()
    for number, dimensions in enumerate(sample_dimensions(corpus, 400, random.Random(0))):
        if dimensions.position == "late" and dimensions.allowed_act != UNRELATED:
            pair = writer.group(dimensions, "train", str(number))
            last.add((pair[0].messages[-1].role, pair[1].messages[-1].role))
    assert last == {("user", "user"), ("assistant", "assistant")}


def test_where_nothing_supplies_a_borrowed_act_an_everyday_exchange_stands_there(
    corpus: Corpus, plain: Dimensions, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(corpus, "seen")
    act = writer.exchanges.act
    refused = []

    def own_acts_alone(book: Phrasebook, *args: Any, **kwargs: Any) -> Exchange | None:
        if book.rule == corpus.book.rule:
            return act(book, *args, **kwargs)
        refused.append(book.rule)
        return None

    monkeypatch.setattr(writer.exchanges, "act", own_acts_alone)
    unrelated = replace(plain, allowed_act=UNRELATED, hard_negatives=0, distractors=0)
    for number in range(10):
        violating, allowed = writer.group(unrelated, "train", f"key {number}")
        assert (violating.label, allowed.label) == (1, 0)
        assert allowed.meta["stance"] == "unrelated"
    assert refused
