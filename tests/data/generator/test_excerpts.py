import itertools
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from data.generator import grammar
from data.generator.excerpts import (
    RIGHT_OR_WRONG,
    SHARE,
    WRONG,
    Excerpt,
    ExcerptBook,
    ExcerptWriter,
    right,
)
from data.generator.generate import Counts, generate
from data.generator.library import EXCERPTS, load_excerpts
from data.generator.phrasebook import Pool, cores_of, line_id, slot_pool
from data.splits import refuse_leaks
from eval.metrics import auroc
from guard.conversation.example import Example
from guard.rule import load_rule
from tests.data.generator.corpora import corpus_of

RULES_WITH_EXCERPTS = sorted(path.stem for path in EXCERPTS.glob("*.yaml"))
COUNTS = Counts(train=48, validation=16, test=24)

pytestmark = pytest.mark.slow


def book_of(name: str) -> ExcerptBook:
    book = load_excerpts(load_rule(name))
    assert book is not None
    return book


@pytest.fixture(scope="module", params=RULES_WITH_EXCERPTS)
def rule_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rows(rule_name: str) -> list[Example]:
    return generate(corpus_of(rule_name), COUNTS, 0, book_of(rule_name))


def excerpts_of(rows: list[Example]) -> list[Example]:
    return [row for row in rows if "excerpt" in row.meta]


def test_a_pair_differs_in_one_turn_of_the_judged_text(rows: list[Example], rule_name: str) -> None:
    rows = excerpts_of(rows)
    for violating, allowed in zip(rows[::2], rows[1::2], strict=True):
        assert (violating.label, allowed.label) == (1, 0)
        assert violating.group == allowed.group
        turns = enumerate(zip(violating.messages, allowed.messages, strict=True))
        different = [index for index, (first, second) in turns if first != second]
        acts = [index for index, act in enumerate(violating.meta["acts"]) if act]
        assert different == acts
        assert len(violating.meta["acts"]) == len(violating.messages)
        assert violating.meta["acts"][acts[0]] == f"{rule_name}/{violating.meta['violating_act']}"


def test_one_group_in_three_of_every_part_is_an_excerpt_of_lines_of_its_own(
    rows: list[Example], rule_name: str
) -> None:
    strata = Counter((row.split, row.meta["stratum"], row.label) for row in rows)
    assert sum(strata.values()) == 48 + 16 + 24
    excerpts = excerpts_of(rows)
    of_excerpts = Counter((row.split, row.meta["stratum"], row.label) for row in excerpts)
    assert of_excerpts == {stratum: count // SHARE for stratum, count in strata.items()}
    assert {row.meta["excerpt"] for row in excerpts} == set(book_of(rule_name).excerpts)
    cores: dict[tuple[str, str], set[str]] = {}
    for row in excerpts:
        cores.setdefault((row.split, row.meta["stratum"]), set()).update(row.meta["cores"])
    held_out = cores["test", "unseen"], cores["validation", "unseen"]
    assert not cores["train", "seen"] & (held_out[0] | held_out[1])
    assert not held_out[0] & held_out[1]
    refuse_leaks(rows)


def toy_writer(excerpt: Excerpt, *values: str) -> ExcerptWriter:
    book = ExcerptBook(rule="toxicity", slots={"n": values}, excerpts={"toy": excerpt})
    return ExcerptWriter(corpus_of("toxicity"), book, "seen")


def test_the_hole_is_filled_within_its_turn_and_marks_become_bars_and_lines() -> None:
    fillings = tuple(f"told {number}" for number in range(6))
    excerpt = Excerpt(
        layouts=("system: ¦ {n} ¦ ¶ * ¶ end >> user: so?",), does=fillings, allowed=fillings
    )
    violating, _ = toy_writer(excerpt, "#").group("toy", "train", "key")
    system, user = violating.messages
    first, second, third = system.content.split("\n")
    assert first.startswith("| ") and first.endswith(" |") and first[2].isdigit()
    assert second.startswith("told ") and third == "end"
    assert (user.role, user.content) == ("user", "so?")
    told = {line_id(filling) for filling in fillings}
    assert violating.meta["cores"][0].removeprefix("toxicity/toy_does/") in told


def test_a_pair_of_either_says_the_same_and_one_value_is_wrong_where_it_violates() -> None:
    lines = tuple(f"{word} it was {{n.?}} in {{n.?}}" for word in ("well", "no", "oh", "yes", "so"))
    excerpt = Excerpt(layouts=("tool: {n}, {n.2} >> user: *",), either=lines)
    writer = toy_writer(excerpt, *(f"value{number}" for number in range(5)))
    wrong_places: set[int] = set()
    for number in range(30):
        violating, allowed = writer.group("toy", "train", str(number))
        given, other = allowed.messages[0].content.split(", ")
        said, truth = violating.messages[1].content.split(), allowed.messages[1].content.split()
        different = [place for place, word in enumerate(said) if word != truth[place]]
        assert len(said) == len(truth) and len(different) == 1
        assert {truth[3], truth[5]} == {given}
        assert said[different[0]] not in (given, other)
        wrong_places |= set(different)
    assert wrong_places == {3, 5}


def test_words_of_a_statement_do_not_tell_groundedness() -> None:
    writer = ExcerptWriter(corpus_of("groundedness"), book_of("groundedness"), "seen")
    texts: list[str] = []
    for number in range(400):
        texts += [filled_text(row) for row in writer.group("statement", "train", str(number))]
    labels = np.array([1, 0] * 400)
    counts = CountVectorizer(ngram_range=(1, 2), min_df=2).fit_transform(texts)
    fitted = LogisticRegression(max_iter=500).fit(counts[:400], labels[:400])
    assert 0.4 < auroc(labels[400:], fitted.decision_function(counts[400:])) < 0.6


def test_a_customer_s_messages_hold_personal_data_in_the_hole_alone() -> None:
    book = book_of("pii_disclosure")
    personal = {"name", "first", "last", "address", "email", "phone", "ssn", "four", "card"}
    personal |= {"account", "password", "username"}
    for excerpt in book.excerpts.values():
        assert all(personal & slots_within(book, line) for line in excerpt.does)
        for line in (*excerpt.layouts, *excerpt.allowed):
            assert not personal & slots_within(book, line), line


def reached(book: ExcerptBook, line: str) -> set[str]:
    """The slots of the line and of the values that may fill them, each with its number."""
    names: set[str] = set()
    waiting = grammar.slot_names(line)
    while waiting:
        name = waiting.pop()
        names.add(name)
        base, dot, number = name.partition(".")
        for value in book.slots.get(base, ()):
            for inner in grammar.slot_names(value):
                # Without a number of its own it has that of the slot that it stands in.
                numbered = inner if "." in inner else f"{inner}{dot}{number}"
                waiting |= {numbered} - names
    return names


def slots_within(book: ExcerptBook, line: str) -> set[str]:
    return {name.partition(".")[0] for name in reached(book, line)}


def test_in_a_form_of_either_every_layout_says_what_every_line_may_say_wrong(
    rule_name: str,
) -> None:
    """And has so many values of it that the wrong one is not the right one."""
    book = book_of(rule_name)
    for excerpt in book.excerpts.values():
        assert not (excerpt.either and (excerpt.does or excerpt.allowed))
        for line in excerpt.either:
            assert RIGHT_OR_WRONG.search(grammar.without_choices(line)), line
            for slot, layout in itertools.product(RIGHT_OR_WRONG.findall(line), excerpt.layouts):
                said = reached(book, layout)
                assert slot in said and slot + WRONG not in said, layout
                for pool in get_args(Pool):
                    values = slot_pool(book.slots, pool)[slot]
                    assert len(set(values)) >= int(WRONG.removeprefix(".")), slot


def test_a_line_of_two_blocks_is_held_out_in_both_or_in_neither(rule_name: str) -> None:
    pools: dict[str, Pool] = {}
    for excerpt in book_of(rule_name).excerpts.values():
        blocks = (excerpt.does, excerpt.allowed, excerpt.either)
        for lines, pool in itertools.product(blocks, get_args(Pool)):
            for line in cores_of(lines, pool):
                assert pools.setdefault(right(line), pool) == pool, line


@pytest.mark.parametrize("pool", get_args(Pool))
def test_the_filled_turn_s_length_says_little_about_the_label(rule_name: str, pool: Pool) -> None:
    # A few lines are held out: their lengths are further apart.
    margin = 0.2 if pool == "seen" else 0.3
    book = book_of(rule_name)
    writer = ExcerptWriter(corpus_of(rule_name), book, pool)
    for name in book.excerpts:
        rows: list[Example] = []
        for number in range(200):
            rows += writer.group(name, "train", f"{name}/{number}")
        labels = np.array([row.label for row in rows])
        lengths = np.array([len(filled_text(row)) for row in rows], dtype=float)
        assert abs(auroc(labels, lengths) - 0.5) < margin, name


def filled_text(row: Example) -> str:
    """The turns that the excerpt's hole stands in."""
    turns = zip(row.messages, row.meta["acts"], strict=True)
    return " ".join(message.content for message, act in turns if act)
