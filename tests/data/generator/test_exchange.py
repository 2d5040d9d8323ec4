import random
import re
from typing import get_args

import pytest

from data.generator import grammar
from data.generator.exchange import Exchanges
from data.generator.phrasebook import Pool
from tests.data.generator.corpora import corpus_of


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
