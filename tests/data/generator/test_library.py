"""The shipped books are read, and every check refuses a book that breaks it; the small books here
break none.
"""

import re
from pathlib import Path

import pytest

from data.generator import library
from guard.errors import GuardError
from guard.rule import RULES, load_rule
from tests.data.generator.corpora import RULES_WITH_PHRASES, background, corpus_of

RULE = load_rule("medical_advice")
BOOK = """
rule: medical_advice
slots: {drug: "ibuprofen"}
parts: {open: "ok,", close: "bye", soft: "maybe", padding: "fine", padding_user: "well"}
lines: {ask: "what now\\nand now"}
acts:
  advise: {speaker: assistant, stance: does, before: [ask], opening: open, softener: soft,
    closing: close, cores: "take {drug}\\ntry it\\nhave some\\nuse this"}
  decline: {speaker: assistant, stance: declines, before: [ask], opening: open, softener: soft,
    closing: close, cores: "no {drug} from me\\nnot I\\nnever\\nask others"}
"""
SPARE = """
  spare: {speaker: assistant, stance: STANCE, before: [other], opening: open, softener: soft,
    closing: close, cores: "so be\\nit\\nis\\nwell"}
"""
TOOLS = """
  search: {speaker: tool, stance: informs, before: [ask], after: [thank], opening: open,
    softener: soft, closing: close, cores: "one hit\\ntwo hits\\nno hits\\nmany hits"}
  look_up: {speaker: tool, stance: informs, before: [ask], opening: open, softener: soft,
    closing: close, cores: "a page\\na list\\na table\\na map"}
"""
PLEAD = """
  plead: {speaker: user, stance: asks, after: [shrug], opening: open, softener: soft,
    closing: close, cores: "do it\\ngo on\\nplease\\nyes"}
"""


def test_every_phrase_file_is_of_a_rule_of_the_generator() -> None:
    names = [path.stem for path in RULES.glob("*.yaml")]
    generated = {name for name in names if load_rule(name).data == "generator"}
    assert set(RULES_WITH_PHRASES) <= generated  # a rule for somebody's own data needs no phrases
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= generated
    assert [path.stem for path in library.rules_with_phrases()] == RULES_WITH_PHRASES
    assert all(path.parent == RULES for path in library.rules_with_phrases())


def test_a_corpus_borrows_the_books_that_others_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [load_rule(name) for name in ("medical_advice", "pii_leak")]
    corpus = library.load_corpus(rules[0], rules)
    assert corpus == corpus_of("medical_advice", ("medical_advice", "pii_leak"))
    assert [book.rule for book in corpus.borrowed] == ["pii_leak"]
    selfish = corpus.borrowed[0].model_copy(update={"borrows": False})
    monkeypatch.setattr("data.generator.library.load_phrasebook", lambda *_: selfish)
    assert library.load_corpus(rules[0], rules).borrowed == ()


def test_a_broken_line_of_the_background_is_named(tmp_path: Path) -> None:
    text = (library.PHRASES / "background.yaml").read_text()
    broken = text.replace("thanks: |", "thanks: |\n  (thanks >> ok", 1)
    (tmp_path / "background.yaml").write_text(broken)
    with pytest.raises(GuardError, match=r"background\.yaml: thanks: brackets do not match"):
        library.load_background(tmp_path)


def _load(tmp_path: Path, text: str, **rule: object) -> None:
    (tmp_path / "medical_advice.yaml").write_text(text)
    library.load_phrasebook(RULE.model_copy(update=rule), background(), tmp_path)


def _replaced(book: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in book
        book = book.replace(old, new)
    return book


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("before: [ask]", "before: [asks]", "unknown lines"),
        ("opening: open", "opening: opne", "unknown part"),
        ("stance: does", "stance: does, supplied: [drg]", "unknown slot"),
        ("stance: declines, before: [ask]", "stance: declines, before: [decline]", "unknown lines"),
        ("take {drug}", "take {drg}", "unknown slot 'drg'"),
        ("stance: does", "stance: informs", "at least one act that violates"),
        ("take {drug}", "take ## mg", "only work inside a slot's value"),
        ("what now\\nand", "what >> ^now\\nand", "only work inside a slot's value"),
        ("rule: medical_advice", "rule: other", "rule differs"),
        ("assistant, stance: declines", "user, stance: declines", "a user's act `after`"),
        ('soft: "maybe"', 'soft: "maybe\\nmaybe"', "repeats a line"),
        ("stance: declines", "stance: decline", "acts.decline.stance"),
        ("\\nask others", "", "acts.decline: too few lines"),
        ("\\nand now", "", "lines.ask has too few lines"),
        ("rule: medical_advice", "rule: medical_advice\ndomains: [mars]", "unknown domain"),
        ("what now\\nand", "user: what >> user: now\\nand", "must be named and take turns"),
        ("what now\\nand", "me: what >> user: now\\nand", "must be named and take turns"),
    ],
)
def test_a_broken_book_says_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    _load(tmp_path, BOOK)
    with pytest.raises(GuardError, match=re.escape(message)):
        _load(tmp_path, _replaced(BOOK, (old, new)))


END = 'and now"}'
THANKS = (END, 'and now", thank: "thanks\\nok"}')
WORDS = (END, 'and now", other: "so what\\nwell"}')
SHRUG = (END, 'and now", shrug: "tool: no >> user: go\\ntool: eh >> user: so"}')
PADDING = ('padding_user: "well"', 'padding_user: "well", padding_tool: "end"')
NAMED = ("stance: does, before: [ask]", "stance: does, before: [ask, plead]")
ALONE = "acts.spare has nothing in its `before` or `after` in common"


@pytest.mark.parametrize(
    ("act", "changes", "message"),
    [
        (SPARE, (WORDS, ("STANCE", "does")), ALONE),
        (SPARE, (WORDS, ("STANCE", "declines")), ALONE),
        (TOOLS, (THANKS, PADDING), "a tool's acts must name the same `after`"),
        (PLEAD, (NAMED, SHRUG), "says nothing around acts.plead"),
    ],
)
def test_an_act_that_would_tell_the_label_by_what_stands_around_it_is_refused(
    tmp_path: Path, act: str, changes: tuple[tuple[str, str], ...], message: str
) -> None:
    book = _replaced(BOOK + act.strip("\n") + "\n", *changes)
    with pytest.raises(GuardError, match=re.escape(message)):
        _load(tmp_path, book)
    if act is SPARE:
        _load(tmp_path, _replaced(book, ("before: [other]", "before: [other, ask]")))
        with pytest.raises(GuardError, match="needs `domains`"):
            _load(tmp_path, BOOK, depends_on_context=True)


EXCERPT = """
rule: toxicity
slots: {}
excerpts:
  chat: {layouts: "user: *", registers: {user: [loud]}, does: "a\\nb\\nc\\nd",
    allowed: "e\\nf\\ng\\nh"}
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("rule: toxicity", "rule: other", "rule differs"),
        ("user: *", "user: nothing here", "one hole"),
        ("user: *", "user: * and *", "one hole"),
        ("\\nc\\nd", "", "too few lines"),
        ("c\\nd", "c\\nc", "repeats a line"),
        ("e\\nf", "e {unknown}\\nf", "unknown slot"),
        ("e\\nf", "e #\\nf", "only work inside a slot's value"),
        ("loud", "shouted", "unknown register"),
    ],
)
def test_a_broken_book_of_excerpts_is_refused(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    rule, path = load_rule("toxicity"), tmp_path / "toxicity.yaml"
    assert library.load_excerpts(rule, tmp_path) is None
    path.write_text(EXCERPT)
    assert library.load_excerpts(rule, tmp_path) is not None
    path.write_text(_replaced(EXCERPT, (old, new)))
    with pytest.raises(GuardError, match=problem):
        library.load_excerpts(rule, tmp_path)
