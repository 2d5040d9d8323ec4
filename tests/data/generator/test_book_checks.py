"""Every check refuses a book that breaks it; the small book here breaks none."""

import re
from pathlib import Path

import pytest

from data.generator.book_checks import BOOK_CHECKS
from data.generator.library import load_background, load_phrasebook
from guard.errors import GuardError
from guard.rule import load_rule

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


def _load(tmp_path: Path, text: str) -> None:
    (tmp_path / "medical_advice.yaml").write_text(text)
    load_phrasebook(load_rule("medical_advice"), load_background(), tmp_path)


def test_a_small_book_loads(tmp_path: Path) -> None:
    _load(tmp_path, BOOK)


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
        ("rule: medical_advice", "rule: other", "rule differs"),
        (
            "speaker: assistant, stance: declines",
            "speaker: user, stance: declines",
            "a user's act `after`",
        ),
        ('soft: "maybe"', 'soft: "maybe\\nmaybe"', "repeats a line"),
        ("stance: declines", "stance: decline", "acts.decline.stance"),
        ("\\nask others", "", "acts.decline has too few cores"),
        ("\\nand now", "", "lines.ask has too few lines"),
        ("rule: medical_advice", "rule: medical_advice\ndomains: [mars]", "unknown domain"),
        ("what now\\nand", "user: what >> user: now\\nand", "must be named and take turns"),
        ("what now\\nand", "me: what >> user: now\\nand", "must be named and take turns"),
    ],
)
def test_a_broken_book_says_what_is_wrong(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BOOK
    with pytest.raises(GuardError, match=re.escape(message)):
        _load(tmp_path, BOOK.replace(old, new))


def test_a_book_of_a_rule_that_keeps_to_its_domains_names_them(tmp_path: Path) -> None:
    (tmp_path / "medical_advice.yaml").write_text(BOOK)
    confined = load_rule("medical_advice").model_copy(update={"depends_on_context": True})
    with pytest.raises(GuardError, match="needs `domains`"):
        load_phrasebook(confined, load_background(), tmp_path)


@pytest.mark.parametrize("stance", ["does", "declines"])
def test_an_act_that_shares_no_line_with_the_other_label_is_refused(
    tmp_path: Path, stance: str
) -> None:
    spare = (
        "  spare: {speaker: assistant, stance: STANCE, before: [other], opening: open,\n"
        '    softener: soft, closing: close, cores: "so be\\nit\\nis\\nwell"}\n'
    )
    book = BOOK.replace('and now"}', 'and now", other: "so what\\nwell"}') + spare.replace(
        "STANCE", stance
    )
    with pytest.raises(
        GuardError, match=r"acts\.spare has nothing in its `before` or `after` in common"
    ):
        _load(tmp_path, book)
    _load(tmp_path, book.replace("before: [other]", "before: [other, ask]"))


TOOLS = """
  search: {speaker: tool, stance: informs, before: [ask], after: [thank], opening: open,
    softener: soft, closing: close, cores: "one hit\\ntwo hits\\nno hits\\nmany hits"}
  look_up: {speaker: tool, stance: informs, before: [ask], opening: open, softener: soft,
    closing: close, cores: "a page\\na list\\na table\\na map"}
"""


def test_acts_of_a_tool_that_are_answered_differently_are_refused(tmp_path: Path) -> None:
    book = BOOK.replace('and now"}', 'and now", thank: "thanks\\nok"}')
    book = book.replace('padding_user: "well"', 'padding_user: "well", padding_tool: "end"')
    with pytest.raises(GuardError, match="a tool's acts must name the same `after`"):
        _load(tmp_path, book + TOOLS.strip("\n") + "\n")


def test_an_allowed_act_whose_surroundings_lack_the_violating_speaker_is_refused(
    tmp_path: Path,
) -> None:
    act = (
        "  plead: {speaker: user, stance: asks, after: [shrug], opening: open, softener: soft,\n"
        '    closing: close, cores: "do it\\ngo on\\nplease\\nyes"}\n'
    )
    book = BOOK.replace("stance: does, before: [ask]", "stance: does, before: [ask, plead]")
    silent = book.replace(
        'and now"}', 'and now", shrug: "tool: no >> user: go\\ntool: eh >> user: so"}'
    )
    silent += act
    with pytest.raises(GuardError, match=r"says nothing around acts\.plead"):
        _load(tmp_path, silent)


def test_every_check_is_a_named_requirement() -> None:
    assert len({check.__name__ for check in BOOK_CHECKS}) == len(BOOK_CHECKS)
    assert all(check.__doc__ for check in BOOK_CHECKS)
