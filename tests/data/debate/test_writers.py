import json
from pathlib import Path

import pytest

from data.debate.writers import EXAMPLES, FEWEST_EXAMPLES, UNLABELLED, writers_for
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.rule import EDIT, load_rule

RULE = load_rule("refund_promise")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENERATOR_BASE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("GENERATOR_MODEL", "toy")


def _conversations(tmp_path: Path, count: int) -> str:
    path = tmp_path / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(count)))
    return str(path)


def test_what_is_not_named_is_as_last_time(tmp_path: Path) -> None:
    path = _conversations(tmp_path, 40)
    first = writers_for(RULE, {}, None, path)
    assert (first.wanted, first.unlabelled, first.budget_usd) == (EXAMPLES, path, None)
    assert len(first.seeds) == UNLABELLED
    assert first.seeds[0] == (Message("assistant", "row 0"),)
    earlier = {"examples": 60, "unlabelled": path}
    assert writers_for(RULE, earlier, None, None).wanted == 60
    assert writers_for(RULE, earlier | {"examples": 20}, None, None).wanted == FEWEST_EXAMPLES
    assert writers_for(RULE, earlier, 80, None).inputs()[1:] == [80, first.inputs()[2]]
    assert writers_for(RULE, {}, None, None).seeds == ()


def test_data_do_not_depend_on_what_they_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = writers_for(RULE, {}, None, None)
    monkeypatch.setenv("GENERATOR_PRICE_IN", "1")
    monkeypatch.setenv("GENERATOR_PRICE_OUT", "1")
    monkeypatch.setenv("GENERATOR_BUDGET_USD", "5")
    dear = writers_for(RULE, {}, None, None)
    assert dear.budget_usd == 5.0
    assert dear.inputs() == cheap.inputs()


def test_what_keeps_an_endpoint_from_writing_is_said_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = RULE.model_copy(update={"policy": f"{EDIT} say it"})
    with pytest.raises(GuardError, match=f"the rule still says {EDIT}"):
        writers_for(unfinished, {}, None, None)
    with pytest.raises(GuardError, match="no conversations"):
        writers_for(RULE, {}, None, _conversations(tmp_path, 0))
    (tmp_path / "bad.jsonl").write_text('{"label": 1}\n')
    with pytest.raises(
        GuardError, match=r"bad\.jsonl:1: no conversation: no conversation \(got label\)"
    ):
        writers_for(RULE, {}, None, str(tmp_path / "bad.jsonl"))
    monkeypatch.setenv("GENERATOR_BUDGET_USD", "much")
    with pytest.raises(GuardError, match="GENERATOR_BUDGET_USD has a bad value"):
        writers_for(RULE, {}, None, None)
    monkeypatch.delenv("GENERATOR_BASE_URL")
    monkeypatch.delenv("GENERATOR_MODEL")
    with pytest.raises(GuardError, match="no endpoint is described"):
        writers_for(RULE, {}, None, None)
