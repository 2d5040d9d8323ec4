"""A sentence becomes a rule file that loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from data import new_rule as command
from data.new_rule import new_rule
from guard.errors import GuardError
from guard.home import ROOT
from guard.recipe import load_recipe
from guard.rule import Judged, load_rule

LONG = "never " + "very " * 24 + "often lie abou"  # 140 characters
SENTENCE = "never promise a delivery date"


@pytest.mark.parametrize(
    ("policy", "judged", "title"),
    [
        (SENTENCE, "assistant", "The assistant must not promise a delivery date."),
        ("Do not ask for a password.", "user", "The user must not ask for a password."),
        ("The user must not swear: ever", "assistant", "The user must not swear: ever."),
        ('no advice, that\'s $100 "gone"', "assistant", 'No advice, that\'s $100 "gone".'),
        ("Replies stay under a hundred words", "assistant", "Replies stay under a hundred words."),
        (LONG, "conversation", f"{LONG.capitalize()}."),
    ],
)
def test_a_sentence_becomes_a_rule(tmp_path: Path, policy: str, judged: Judged, title: str) -> None:
    path = new_rule("delivery_date", policy, judged, tmp_path)
    rule = load_rule("delivery_date", tmp_path)
    assert (rule.title, rule.judged, rule.turns) == (title, judged, "any")
    assert "turns: any  # which of them: any, last\n" in path.read_text()
    assert "EDIT" in path.read_text()


@pytest.mark.parametrize(
    ("name", "policy", "problem"),
    [
        ("mine", SENTENCE, "already"),
        ("My Rule", SENTENCE, "lower-case"),
        ("x", "no", "10 to 140 characters"),
        ("x", f"{LONG}t", "10 to 140 characters"),
        ("x", f"{SENTENCE}\a", "not valid YAML|special characters"),
        ("all", SENTENCE, "every rule"),
    ],
)
def test_what_cannot_be_a_rule_is_refused(
    tmp_path: Path, name: str, policy: str, problem: str
) -> None:
    new_rule("mine", SENTENCE, "assistant", tmp_path)
    before = (tmp_path / "mine.yaml").read_text()
    with pytest.raises(GuardError, match=problem):
        new_rule(name, policy, "assistant", tmp_path)
    assert (tmp_path / "mine.yaml").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_the_command_writes_what_the_guide_shows_and_names_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RULES", tmp_path)
    argv = ["new_rule", "--name", "delivery_date", "--policy", SENTENCE]
    monkeypatch.setattr("sys.argv", argv)
    command.main()
    printed, path = capsys.readouterr().out, tmp_path / "delivery_date.yaml"
    assert f"written: {path}\n" in printed
    for steps in ("train eval", "up"):
        assert f"  make {steps} RULE=delivery_date MODEL=minilm METHOD=head\n" in printed
    assert "head" in load_recipe("minilm").methods
    guide = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert f"```yaml\n{path.read_text(encoding='utf-8')}```\n" in guide
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert (ended.value.code, "already" in capsys.readouterr().err) == (2, True)
