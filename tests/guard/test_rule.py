"""Rules as files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.rule import (
    EDIT,
    LONGEST_FOR_READER,
    MANIFEST_KEY,
    check_labelling,
    labelling,
    load_rule,
    rule_names,
    text_hash,
)

TITLE = "|\n  Never promise\n  a refund.\n"
POLICY = "Never say or imply that money comes back."
REFUNDS = f"""\
id: refunds
title: {TITLE}policy: {POLICY}
judged: assistant
violates: [promises a refund]
allows: [explains the policy]
examples:
  - {{text: You will get your money back., violates: true}}
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "refunds.yaml").write_text(REFUNDS)
    (tmp_path / "doses.yaml").write_text(REFUNDS.replace("refunds", "doses"))
    return tmp_path


def test_a_rule_is_read_whole_and_its_hash_answers_the_wording_alone(rules: Path) -> None:
    rule, other = load_rule("refunds", rules), load_rule("doses", rules)
    assert rule.text() == "Never promise a refund."
    assert (rule.text("policy"), rule.text("none"), rule.data) == (POLICY, "", "generator")
    assert rule.examples[0].violates is True
    digest = hashlib.sha256(b"Never promise a refund.").hexdigest()
    assert text_hash(rule.text()) == text_hash(other.text()) == digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"policy: {POLICY}\n", "", "missing key 'policy'"),
        ("[promises a refund]", "[]", "'violates': tuple should have at least 1 item"),
        ("assistant", "asistant", "'judged': input should be 'user', 'assi.*, got 'asistant'"),
        ("id: refunds", "id: Refunds!", "'id': string should match pattern"),
        ("id: refunds", "id: other", r"id differs from the file's name \(got other\)"),
        ("true}", "yes}", "'examples.0.violates': input should be a valid boolean, got 'yes'"),
        (TITLE, '"    "\n', "'title': should have at least 3 characters besides spaces, got"),
        (POLICY, f'"{" " * 12}"', "'policy': should have at least 3 characters"),
        ("text: You", "txt: You", r"unknown key 'examples.0.txt'. Did you mean 'text'\?"),
    ],
)
def test_a_mistake_in_a_rule_is_named(rules: Path, old: str, new: str, message: str) -> None:
    assert old in REFUNDS
    (rules / "refunds.yaml").write_text(REFUNDS.replace(old, new))
    with pytest.raises(GuardError, match=message):
        load_rule("refunds", rules)


def test_rules_are_selected_by_name_list_or_all_and_a_selection_without_any_is_refused(
    rules: Path,
) -> None:
    assert rule_names("all", rules) == ["doses", "refunds"]
    assert rule_names(" refunds, doses,refunds", rules) == ["refunds", "doses"]
    with pytest.raises(GuardError, match="no rule was named"):
        rule_names("", rules)
    with pytest.raises(GuardError, match="Did you mean 'refunds'"):
        rule_names("refund", rules)
    with pytest.raises(GuardError, match="no rules"):
        rule_names("all", rules / "none")


@pytest.mark.parametrize("content", ['{"labelling": ', "[]"])
def test_rows_for_another_speaker_are_refused_as_are_manifests_that_nobody_can_read(
    tmp_path: Path, content: str
) -> None:
    rule = load_rule("medical_advice")
    check_labelling(tmp_path, rule)
    (tmp_path / "manifest.json").write_text(json.dumps({MANIFEST_KEY: labelling(rule)}))
    check_labelling(tmp_path, rule.model_copy(update={"title": "No advice.", "max_fpr": 0.01}))
    changed = rule.model_copy(update={"judged": "user", "turns": "last"})
    problem = r'made for judged: "assistant", turns: "any"; .* judged: "user", turns: "last"'
    with pytest.raises(GuardError, match=rf"{problem}.*make data RULE=medical_advice"):
        check_labelling(tmp_path, changed)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(GuardError, match=r"manifest.json.*make data RULE=medical_advice FORCE=1"):
        check_labelling(tmp_path, rule)


def test_a_reader_reads_whole_lines_in_turn_and_never_too_many(rules: Path) -> None:
    lines = [f"{word} {'a' * 300}." for word in ("One", "Two", "Three")]
    long = REFUNDS.replace("[promises a refund]", f"[{', '.join(lines)}]")
    long = long.replace("[explains the policy]", f'["{EDIT} say it", Allowed one.]')
    (rules / "refunds.yaml").write_text(long.replace("examples", "terms: [A term.]\nexamples"))
    start = f"Never promise a refund. {POLICY}"
    text = (
        f"{start} Terms: A term. Violates: {lines[0]} {lines[1]} {lines[2]} Allowed: Allowed one."
    )
    assert load_rule("refunds", rules).text("reader") == text
    text = f"{start} Violates: promises a refund Allowed: explains the policy"
    assert load_rule("doses", rules).text("reader") == text
    much = long.replace("a" * 300, "a" * 400)
    (rules / "refunds.yaml").write_text(much)
    read = load_rule("refunds", rules).text("reader")
    assert 800 < len(read) <= LONGEST_FOR_READER and "Three" not in read and "One" in read
    (rules / "refunds.yaml").write_text(much.replace(POLICY, "word " * 400))
    assert load_rule("refunds", rules).text("reader").split()[4:] == ["word"] * 400
