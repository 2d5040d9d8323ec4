"""The shipped books are read, and every check refuses a book that breaks it; the small books here
break none.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from data.generator.excerpts import Excerpt, ExcerptBook
from data.generator.library import (
    EXCERPTS,
    PHRASES,
    check_excerpts,
    load_background,
    load_corpus,
    load_excerpts,
    load_phrasebook,
    rules_with_phrases,
)
from data.generator.phrasebook import cores_of
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
    assert [path.stem for path in rules_with_phrases()] == RULES_WITH_PHRASES
    assert all(path.parent == RULES for path in rules_with_phrases())


def test_a_corpus_borrows_the_books_that_others_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [load_rule(name) for name in ("medical_advice", "pii_leak")]
    corpus = load_corpus(rules[0], rules)
    assert corpus == corpus_of("medical_advice", ("medical_advice", "pii_leak"))
    assert [book.rule for book in corpus.borrowed] == ["pii_leak"]
    selfish = corpus.borrowed[0].model_copy(update={"borrows": False})
    monkeypatch.setattr("data.generator.library.load_phrasebook", lambda *_: selfish)
    assert load_corpus(rules[0], rules).borrowed == ()


def test_a_broken_line_of_the_background_is_named(tmp_path: Path) -> None:
    text = (PHRASES / "background.yaml").read_text()
    broken = text.replace("thanks: |", "thanks: |\n  (thanks >> ok", 1)
    (tmp_path / "background.yaml").write_text(broken)
    with pytest.raises(GuardError, match=r"background\.yaml: thanks: brackets do not match"):
        load_background(tmp_path)


def _load(tmp_path: Path, text: str, **rule: object) -> None:
    (tmp_path / "medical_advice.yaml").write_text(text)
    load_phrasebook(RULE.model_copy(update=rule), background(), tmp_path)


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


VALUES = tuple(f"value{number}" for number in range(5))
EITHER = tuple(f"{word} it was {{n.?}} in {{n.?}}" for word in ("well", "no", "oh", "yes", "so"))


def _check(slots: dict[str, tuple[str, ...]], excerpts: dict[str, Excerpt]) -> None:
    book = ExcerptBook(rule="toxicity", slots=slots, excerpts=excerpts)
    check_excerpts("toxicity", book, Path("toy.yaml"))


LINES = {"layouts": ("user: *",), "does": tuple("abcd"), "allowed": tuple("efgh")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"layouts": ("user: nothing here",)}, "one hole"),
        ({"layouts": ("user: * and *",)}, "one hole"),
        ({"does": ("a", "b")}, "too few lines"),
        ({"allowed": ("a {unknown}", *"bcd")}, "unknown slot"),
        ({"allowed": ("a #", *"bcd")}, "only work inside a slot's value"),
        ({"registers": {"user": ("shouted",)}}, "unknown register"),
    ],
)
def test_a_broken_form_of_excerpts_is_refused(change: dict[str, Any], problem: str) -> None:
    _check({}, {"chat": Excerpt(**LINES)})
    with pytest.raises(GuardError, match=problem):
        _check({}, {"chat": Excerpt(**LINES | change)})


def test_a_book_of_excerpts_is_of_the_rule_of_its_file_and_a_rule_may_have_none(
    tmp_path: Path,
) -> None:
    rule = load_rule("toxicity")
    assert load_excerpts(rule, tmp_path) is None
    text = (EXCERPTS / "toxicity.yaml").read_text()
    (tmp_path / "toxicity.yaml").write_text(text.replace("rule: toxicity", "rule: toxicity_2"))
    with pytest.raises(GuardError, match="rule differs"):
        load_excerpts(rule, tmp_path)


def _check_either(values: tuple[str, ...] = VALUES, **changes: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {"layouts": ("tool: {text} >> user: *",), "either": EITHER} | changes
    slots = {"n": values, "text": ("{n}, {n.2}",), "wrong": ("{n.5}",)}
    _check(slots, {"toy": Excerpt(**fields)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"does": ("a", "b", "c", "d")}, "cannot stand beside"),
        ({"either": ("it was {n}",)}, "nothing that can be wrong"),
        ({"either": ("(it was {n.?}|no idea)",)}, "or not always"),
        ({"either": ("{n.?} and {n.2.?}",)}, "malformed slot"),
        ({"either": ("{m.?}",)}, "a layout does not say 'm'"),
        ({"layouts": ("tool: {text} >> user: *", "user: *")}, "a layout does not say 'n'"),
        ({"layouts": ("tool: {text}, {wrong} >> user: *",)}, "number of the wrong 'n'"),
        ({"values": VALUES[:4]}, "too few values"),
        ({"values": tuple(map(str, range(12)))}, "too few values"),  # three of them held out
    ],
)
def test_a_form_in_which_wrong_could_be_right_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    _check_either()
    with pytest.raises(GuardError, match=problem):
        _check_either(**change)


def test_a_line_that_is_held_out_in_one_block_and_trained_on_in_another_is_refused() -> None:
    lines = tuple(f"line {number}" for number in range(9))
    held = cores_of(lines, "unseen")[0]
    blocks = [(*(f"{word} {number}" for number in range(8)), held) for word in "abcd"]
    block = next(block for block in blocks if held in cores_of(block, "seen"))
    one, other = (Excerpt(**LINES | {"allowed": allowed}) for allowed in (lines, block))
    _check({}, {"one": one, "same": one})
    with pytest.raises(GuardError, match="held out in one block and not in another"):
        _check({}, {"one": one, "other": other})
