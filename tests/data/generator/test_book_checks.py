"""Every check refuses a book that breaks it; the small books here break none."""

import re
from pathlib import Path
from typing import Any

import pytest

from data.generator.book_checks import check_excerpts
from data.generator.excerpts import Excerpt, ExcerptBook
from data.generator.library import load_background, load_excerpts, load_phrasebook
from data.generator.phrasebook import cores_of
from guard.errors import GuardError
from guard.rule import Rule, load_rule

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


def _load(tmp_path: Path, text: str, rule: Rule = RULE) -> None:
    (tmp_path / "medical_advice.yaml").write_text(text)
    load_phrasebook(rule, load_background(), tmp_path)


def _with_act(act: str, *replaced: tuple[str, str]) -> str:
    book = BOOK + act.strip("\n") + "\n"
    for old, new in replaced:
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
    assert old in BOOK
    with pytest.raises(GuardError, match=re.escape(message)):
        _load(tmp_path, BOOK.replace(old, new))


def test_a_book_of_a_rule_that_keeps_to_its_domains_names_them(tmp_path: Path) -> None:
    confined = RULE.model_copy(update={"depends_on_context": True})
    with pytest.raises(GuardError, match="needs `domains`"):
        _load(tmp_path, BOOK, confined)


@pytest.mark.parametrize("stance", ["does", "declines"])
def test_an_act_that_shares_no_line_with_the_other_label_is_refused(
    tmp_path: Path, stance: str
) -> None:
    lines = ('and now"}', 'and now", other: "so what\\nwell"}')
    book = _with_act(SPARE, lines, ("STANCE", stance))
    told = r"acts\.spare has nothing in its `before` or `after` in common"
    with pytest.raises(GuardError, match=told):
        _load(tmp_path, book)
    _load(tmp_path, book.replace("before: [other]", "before: [other, ask]"))


def test_acts_of_a_tool_that_are_answered_differently_are_refused(tmp_path: Path) -> None:
    thanks = ('and now"}', 'and now", thank: "thanks\\nok"}')
    padding = ('padding_user: "well"', 'padding_user: "well", padding_tool: "end"')
    with pytest.raises(GuardError, match="a tool's acts must name the same `after`"):
        _load(tmp_path, _with_act(TOOLS, thanks, padding))


def test_an_allowed_act_whose_surroundings_lack_the_violating_speaker_is_refused(
    tmp_path: Path,
) -> None:
    named = ("stance: does, before: [ask]", "stance: does, before: [ask, plead]")
    shrug = ('and now"}', 'and now", shrug: "tool: no >> user: go\\ntool: eh >> user: so"}')
    with pytest.raises(GuardError, match=r"says nothing around acts\.plead"):
        _load(tmp_path, _with_act(PLEAD, named, shrug))


VALUES = tuple(f"value{number}" for number in range(5))
EITHER = tuple(f"{word} it was {{n.?}} in {{n.?}}" for word in ("well", "no", "oh", "yes", "so"))


def _check(slots: dict[str, tuple[str, ...]], excerpts: dict[str, Excerpt]) -> None:
    book = ExcerptBook(rule="toxicity", slots=slots, excerpts=excerpts)
    check_excerpts("toxicity", book, Path("toy.yaml"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rule": "toxicity_2"}, "rule differs"),
        ({"layouts": "user: nothing here"}, "one hole"),
        ({"layouts": "user: * and *"}, "one hole"),
        ({"does": "a\nb"}, "too few lines"),
        ({"does": "a\na\nb\nc\nd"}, "repeats a line"),
        ({"allowed": "a {unknown}\nb\nc\nd"}, "unknown slot"),
        ({"allowed": "a #\nb\nc\nd"}, "only work inside a slot's value"),
        ({"registers": "{user: [shouted]}"}, "unknown register"),
    ],
)
def test_a_book_of_excerpts_that_cannot_be_used_is_refused(
    tmp_path: Path, change: dict[str, str], problem: str
) -> None:
    lines = {"layouts": "user: *", "does": "a\nb\nc\nd", "allowed": "e\nf\ng\nh"} | change
    rule = lines.pop("rule", "toxicity")
    registers = lines.pop("registers", "{}")
    text = f"rule: {rule}\nslots: {{}}\nexcerpts:\n  chat:\n    registers: {registers}\n"
    for key, block in lines.items():
        indented = block.replace("\n", "\n      ")
        text += f"    {key}: |\n      {indented}\n"
    (tmp_path / "toxicity.yaml").write_text(text)
    with pytest.raises(GuardError, match=problem):
        load_excerpts(load_rule("toxicity"), tmp_path)


def _check_either(values: tuple[str, ...] = VALUES, **changes: tuple[str, ...]) -> None:
    fields: dict[str, Any] = {"layouts": ("tool: {text} >> user: *",), "either": EITHER} | changes
    slots = {"n": values, "text": ("{n}, {n.2}",), "wrong": ("{n.5}",)}
    _check(slots, {"toy": Excerpt(**fields)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"does": ("a", "b", "c", "d")}, "cannot stand beside"),
        ({"either": ("it was {n}",)}, "nothing that can be wrong"),
        ({"either": ("it was.?",)}, "nothing that can be wrong"),
        ({"either": ("(it was {n.?}|no idea)",)}, "or not always"),
        ({"either": ("{n.?} and {n.2.?}",)}, "malformed slot"),
        ({"either": ("{m.?}",)}, "a layout does not say 'm'"),
        ({"layouts": ("tool: {text} >> user: *", "user: *")}, "a layout does not say 'n'"),
        ({"layouts": ("tool: {text}, {wrong} >> user: *",)}, "number of the wrong 'n'"),
        ({"layouts": ("tool: {text}, {n.?} >> user: *",)}, "malformed slot"),
        ({"values": VALUES[:4]}, "too few values"),
        ({"values": (*VALUES[:4], *VALUES[:3])}, "too few values"),
        ({"values": tuple(map(str, range(12)))}, "too few values"),  # three of them held out
    ],
)
def test_a_form_of_either_in_which_wrong_could_be_right_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    _check_either()
    with pytest.raises(GuardError, match=problem):
        _check_either(**change)


def test_a_line_that_is_held_out_in_one_block_and_trained_on_in_another_is_refused() -> None:
    lines = tuple(f"line {number}" for number in range(9))
    held = cores_of(lines, "unseen")[0]
    others = (tuple(f"{word} {number}" for number in range(8)) for word in ("a", "b", "c", "d"))
    block = next((*other, held) for other in others if held in cores_of((*other, held), "seen"))
    one, same, other = (
        Excerpt(layouts=("user: *",), does=tuple("klmno"), allowed=allowed)
        for allowed in (lines, lines, block)
    )
    _check({}, {"one": one, "other": same})
    with pytest.raises(GuardError, match="held out in one block and not in another"):
        _check({}, {"one": one, "other": other})
