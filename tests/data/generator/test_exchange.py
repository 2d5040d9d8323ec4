import random
import re
from collections import Counter
from typing import get_args

import pytest

from data.generator import grammar
from data.generator.exchange import Exchanges
from data.generator.phrasebook import Corpus, Pool, cores_of
from tests.data.generator.corpora import corpus_of


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of("pii_leak", ("medical_advice",))


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


def test_the_other_speaker_may_be_given_or_restricted(corpus: Corpus) -> None:
    exchanges = Exchanges(corpus, "seen")
    for context in ("ask_privacy_and_other", "user_reveals_other"):  # lines, or an act before it
        rng = random.Random(0)
        first = exchanges.act(corpus.book, "reveal_private", "plain", "k", rng, context=(context,))
        assert first is not None
        assert first.turns[0].source == context
        around = first.surroundings(first.act_index)
        second = exchanges.act(corpus.book, "decline", "plain", "k", rng, around=around)
        assert second is not None
        assert second.turns[0] == first.turns[0]
        assert [turn.role for turn in second.turns] == ["user", "assistant"]


def test_what_is_taken_is_not_said_again(corpus: Corpus) -> None:
    exchanges, taken = Exchanges(corpus, "unseen"), set[str]()
    lines: Counter[str] = Counter()
    for number in range(60):
        exchange = exchanges.act(
            corpus.book, "decline", "plain", str(number), random.Random(number), taken=taken
        )
        if exchange is None:
            break
        lines.update(exchange.lines)
        taken |= exchange.lines
    assert exchange is None
    assert len(lines) > len(cores_of(corpus.book.acts["decline"].cores, "unseen"))
    assert max(lines.values()) == 1
    domain = next(iter(corpus.background.domains))
    first = exchanges.everyday(domain, 99, "k", random.Random(0))
    assert len(first) == len(corpus.background.domains[domain])
    said = {line for exchange in first for line in exchange.lines}
    assert exchanges.everyday(domain, 99, "k", random.Random(0), said) == []
    assert exchanges.thanks("k", random.Random(0), set(corpus.background.thanks)) == []
