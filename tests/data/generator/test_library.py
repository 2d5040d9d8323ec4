from pathlib import Path

import pytest

from data.generator.library import (
    PHRASES,
    load_background,
    load_corpus,
    load_phrasebook,
    rules_with_phrases,
)
from guard.errors import GuardError
from guard.rule import RULES, load_rule

SHIPPED = sorted(path.stem for path in PHRASES.glob("*.yaml") if path.stem != "background")


def test_every_shipped_rule_has_phrases_and_every_phrase_file_a_rule_of_the_generator() -> None:
    generated = {
        path.stem for path in RULES.glob("*.yaml") if load_rule(path.stem).data == "generator"
    }
    assert set(SHIPPED) <= generated  # a rule for somebody's own data needs no phrases
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= set(SHIPPED)


def test_a_rule_without_phrases_is_told_to_bring_data(tmp_path: Path) -> None:
    with pytest.raises(
        GuardError, match="`make data RULE=medical_advice DATA=FILE` or `data: FILE` in recipes"
    ):
        load_phrasebook(load_rule("medical_advice"), load_background(), tmp_path)


def test_the_rules_with_phrases_are_those_of_the_books() -> None:
    assert [path.stem for path in rules_with_phrases()] == SHIPPED
    assert all(path.parent == RULES for path in rules_with_phrases())


def test_a_corpus_borrows_the_books_of_other_rules_and_not_its_own() -> None:
    rules = [load_rule(name) for name in ("medical_advice", "pii_leak")]
    corpus = load_corpus(rules[0], rules)
    assert corpus.book.rule == "medical_advice"
    assert [book.rule for book in corpus.borrowed] == ["pii_leak"]


def test_a_broken_line_of_the_background_is_named(tmp_path: Path) -> None:
    text = (PHRASES / "background.yaml").read_text()
    (tmp_path / "background.yaml").write_text(
        text.replace("thanks: |", "thanks: |\n  (thanks >> ok", 1)
    )
    with pytest.raises(GuardError, match=r"background\.yaml: thanks: brackets do not match"):
        load_background(tmp_path)
