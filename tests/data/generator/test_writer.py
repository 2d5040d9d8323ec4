"""A group: two conversations that share everything but the target, their plans and exchanges.

Whole data sets are held in test_generate.py.
"""

import random
import re
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from data.generator import grammar
from data.generator.dimensions import UNRELATED, Dimensions, sample_dimensions
from data.generator.exchange import Exchanges
from data.generator.phrasebook import Corpus, Pool
from data.generator.writer import Writer
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


def test_the_target_stands_where_its_position_says(corpus: Corpus, plain: Dimensions) -> None:
    """Also behind a system message, which has no act."""
    writer = Writer(corpus, "seen")
    places = {}
    for position in ("early", "middle", "late"):
        dimensions = replace(plain, position=position, has_system=True)
        violating, allowed = writer.group(dimensions, "train", "key")
        assert [message.role for message in allowed.messages[:2]] == ["system", "user"]
        assert allowed.meta["acts"][0] is None
        turns = zip(violating.messages, allowed.messages, strict=True)
        differs = [first != second for first, second in turns]
        places[position] = differs.index(True) / len(differs)
    assert places["early"] < 0.2 < places["middle"] < 0.8 < places["late"]


@pytest.mark.parametrize("number", range(4))
def test_where_no_line_of_the_context_that_is_drawn_supplies_an_act_another_does(
    number: int,
) -> None:
    """Few lines of groundedness are held out, and its `quotes` repeat what stands before them."""
    corpus = corpus_of("groundedness", ())
    writer, rng = Writer(corpus, "reserved"), random.Random(number)
    for dimensions in sample_dimensions(corpus, 400, rng):
        quoting = replace(dimensions, allowed_act="quotes")
        if corpus.book.shared(dimensions.violating_act, "quotes"):
            assert writer.group(quoting, "validation", str(rng.random()))


def test_some_long_conversations_end_with_the_judged_turn_and_no_answer() -> None:
    corpus = corpus_of("jailbreak_attempt", ())
    writer, last = Writer(corpus, "seen"), set()
    for number, dimensions in enumerate(sample_dimensions(corpus, 400, random.Random(0))):
        if dimensions.position == "late" and dimensions.allowed_act != UNRELATED:
            pair = writer.group(dimensions, "train", str(number))
            last.add((pair[0].messages[-1].role, pair[1].messages[-1].role))
    assert last == {("user", "user"), ("assistant", "assistant")}


@pytest.fixture(scope="module", params=["medical_advice", "pii_leak", "jailbreak_attempt"])
def any_corpus(request: pytest.FixtureRequest) -> Corpus:
    return corpus_of(request.param, ())


def test_acts_come_in_balanced_rounds_and_share_what_the_other_speaker_says(
    any_corpus: Corpus,
) -> None:
    rows = sample_dimensions(any_corpus, 200, random.Random(0))
    violating = Counter(row.violating_act for row in rows)
    assert set(violating) == set(any_corpus.acts(violating=True))
    assert max(violating.values()) - min(violating.values()) <= 1
    allowed = Counter(row.allowed_act for row in rows)
    assert 0 < allowed.pop(UNRELATED) < 40
    assert set(allowed) == set(any_corpus.acts(violating=False))
    for row in rows:
        pair = (row.violating_act, row.allowed_act)
        assert row.allowed_act == UNRELATED or any_corpus.book.shared(*pair)


@pytest.mark.parametrize("pool", get_args(Pool))
@pytest.mark.parametrize(
    ("rule", "name"), [("pii_leak", "repeats_supplied"), ("medical_advice", "repeats_doctor")]
)
def test_an_answer_that_repeats_the_user_says_nothing_else(
    rule: str, name: str, pool: Pool
) -> None:
    corpus = corpus_of(rule, ("refund_promise",))
    exchanges, act = Exchanges(corpus, pool), corpus.book.acts[name]
    repeated = 0
    for number in range(400):
        exchange = exchanges.act(corpus.book, name, "plain", str(number), random.Random(number))
        assert exchange is not None
        (question,), _ = exchange.surroundings(exchange.act_index)
        answered = exchange.act_turn
        bindings = grammar.Bindings(exchanges._slots[rule], str(number))
        for slot in grammar.slot_names(answered.line):
            value = bindings.fill(f"{{{slot}}}")
            if slot.partition(".")[0] in act.supplied and value in answered.text:
                assert _of_anybody(value) in _of_anybody(question.text), answered.text
                repeated += 1
    assert repeated > 100


def _of_anybody(text: str) -> str:
    """Whether the user says it of himself or is told."""
    return re.sub(r"\b(my|your)(self)?\b", "one's", text)
