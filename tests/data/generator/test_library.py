from pathlib import Path

import pytest

from data.generator.library import (
    PHRASES,
    load_background,
    load_corpus,
    load_phrasebook,
    rules_with_phrases,
)
from data.generator.phrasebook import Phrasebook
from guard.errors import GuardError
from guard.rule import RULES, load_rule
from tests.data.generator.corpora import RULES_WITH_PHRASES, corpus_of


def test_every_phrase_file_is_of_a_rule_of_the_generator() -> None:
    names = [path.stem for path in RULES.glob("*.yaml")]
    generated = {name for name in names if load_rule(name).data == "generator"}
    assert set(RULES_WITH_PHRASES) <= generated  # a rule for somebody's own data needs no phrases
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= generated
    assert [path.stem for path in rules_with_phrases()] == RULES_WITH_PHRASES
    assert all(path.parent == RULES for path in rules_with_phrases())


def test_a_rule_without_phrases_is_told_to_bring_data(tmp_path: Path) -> None:
    told = "`make data RULE=medical_advice DATA=FILE` or `data: FILE` in recipes"
    with pytest.raises(GuardError, match=told):
        load_phrasebook(load_rule("medical_advice"), load_background(), tmp_path)


def test_a_corpus_borrows_the_books_of_other_rules_that_lend_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = [load_rule(name) for name in ("medical_advice", "pii_leak")]
    corpus = load_corpus(rules[0], rules)
    assert corpus == corpus_of("medical_advice", ("medical_advice", "pii_leak"))
    assert corpus.book.rule == "medical_advice"
    assert [book.rule for book in corpus.borrowed] == ["pii_leak"]

    def selfish(rule, background) -> Phrasebook:  # type: ignore[no-untyped-def]
        return load_phrasebook(rule, background).model_copy(update={"borrows": False})

    monkeypatch.setattr("data.generator.library.load_phrasebook", selfish)
    assert load_corpus(rules[0], rules).borrowed == ()


def test_a_broken_line_of_the_background_is_named(tmp_path: Path) -> None:
    text = (PHRASES / "background.yaml").read_text()
    broken = text.replace("thanks: |", "thanks: |\n  (thanks >> ok", 1)
    (tmp_path / "background.yaml").write_text(broken)
    with pytest.raises(GuardError, match=r"background\.yaml: thanks: brackets do not match"):
        load_background(tmp_path)
