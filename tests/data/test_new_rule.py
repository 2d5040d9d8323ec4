"""A sentence becomes a rule file that loads, with and without an endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data import new_rule as command
from data.new_rule import new_rule
from guard.endpoint import Endpoint
from guard.errors import GuardError
from guard.home import ROOT
from guard.recipe import load_recipe
from guard.rule import Judged, load_rule
from tests.data.llm_server import Server
from tests.llm_endpoint import Reply

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


DRAFT = {
    "title": "The assistant must not name a delivery date.",
    "policy": "No day: or hour.",
    "terms": ["Day: # a date"],
    "violates": ["It says 'Friday'."],
    "allows": ["It quotes: the carrier."],
    "examples": [{"text": "User: When? Assistant: Friday.", "violates": True}],
}


@pytest.mark.parametrize("before", ["Sure:\n```json\n", "<think>{}</think> ", "a {brace}, then "])
def test_an_endpoint_drafts_the_whole_file(server: Server, tmp_path: Path, before: str) -> None:
    """By the first object of its answer, whatever stands around it."""
    answer = f"{before}{json.dumps(DRAFT)} and {{}}"
    server.reply = lambda *_: answer  # type: ignore[method-assign]
    new_rule("delivery_date", SENTENCE, "assistant", tmp_path, Endpoint(server.url, "toy"))
    rule = load_rule("delivery_date", tmp_path)
    assert rule.model_dump(mode="json").items() >= (DRAFT | {"policy": rule.policy}).items()
    assert rule.policy.strip() == DRAFT["policy"]


@pytest.mark.parametrize(
    ("status", "reply", "told"),
    [
        (200, "I would rather not.", "wrote no rule.*rather not"),
        (200, '{"title": 1}', "wrote no rule"),
        (200, "<think>so", "wrote no rule"),
        (400, "flagged", "wrote no rule: refused.*flagged"),
    ],
)
def test_an_endpoint_that_drafts_nothing_leaves_no_file(
    server: Server, tmp_path: Path, status: int, reply: str, told: str
) -> None:
    server.reply = lambda *_: reply  # type: ignore[method-assign]
    server.change = lambda kind, text: Reply(text, status)
    with pytest.raises(GuardError, match=told):
        new_rule("other", SENTENCE, "assistant", tmp_path, Endpoint(server.url, "toy"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "policy", "problem"),
    [
        ("mine", SENTENCE, "already"),
        ("My Rule", SENTENCE, "lower-case"),
        ("x", "no", "10 to 140 characters"),
        ("x", f"{LONG}t", "10 to 140 characters"),
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
    monkeypatch.delenv("GENERATOR_BASE_URL", raising=False)
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
