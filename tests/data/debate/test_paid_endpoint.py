"""What is paid for is kept, counted and within the budget, whatever faults the endpoint has."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from data.debate.paid_endpoint import EXAMPLES, FEWEST_EXAMPLES, UNLABELLED, writers_for
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.rule import EDIT
from tests.data.llm_server import RULE, Server, debated
from tests.llm_endpoint import Reply

pytestmark = pytest.mark.slow


def test_what_refuses_everything_is_an_error_and_asked_again(
    server: Server, tmp_path: Path
) -> None:
    kept = tmp_path / "answers.jsonl"
    server.change = lambda kind, text: Reply("no such permission", 403)
    told = r"refused the policy.*no such permission.*GENERATOR_API_KEY"
    with pytest.raises(GuardError, match=told):
        debated(server, kept, 24)
    server.change = lambda kind, text: (
        Reply("no such permission", 403) if len(server.requests) > 40 else None
    )
    with pytest.raises(GuardError, match=r"refused 8 requests in a row.*no such permission"):
        debated(server, kept, 24)
    server.change = lambda kind, text: None
    _, statistics = debated(server, kept, 24)
    # A refusal that an answer still overtook counts as that of a text; another case takes its
    # place.
    assert statistics["outcomes"]["accepted in round 1 after 0 rewritings"] == 24
    assert statistics["outcomes"].get("refused by the endpoint", 0) < 8


def test_passing_faults_change_nothing(server: Server, tmp_path: Path) -> None:
    """Nor an answer that was cut off or holds half a character: no request could quote it."""
    plain, _ = debated(server, tmp_path / "plain.jsonl")
    faults = [
        *(Reply("slow down", 429), Reply("oops", 500), Reply("<think>so"), Reply("{" * 5000)),
        *(Reply("no \ud83d"), Reply("fine", finish_reason="length"), Reply(raw="no json at all")),
    ]
    count = itertools.count(1)

    def every_fourth(kind: str, text: str) -> Reply | None:
        fault, other_requests = divmod(next(count), 4)
        return None if other_requests else faults[fault % len(faults)]

    server.change = every_fourth
    examples, statistics = debated(server, tmp_path / "faulty.jsonl", concurrency=1)
    assert examples == plain
    assert statistics["malformed"] > 10


def test_the_budget_ends_a_run_and_a_larger_one_goes_on(server: Server, tmp_path: Path) -> None:
    # 0.12 USD an answer.
    priced = {"price_in": 1000.0, "price_out": 1000.0, "concurrency": 2}
    kept = tmp_path / "answers.jsonl"
    with pytest.raises(GuardError, match=r"budget is spent.*of 3 USD.*GENERATOR_BUDGET_USD"):
        debated(server, kept, budget_usd=3.0, **priced)
    assert 25 <= len(server.requests) <= 25 + 2
    # Cases are finished before others begin.
    assert sum(kind == "judge" for kind in server.kinds) >= 8
    examples, statistics = debated(server, kept, budget_usd=60.0, **priced)
    assert len(examples) == 40
    assert len(server.requests) == len(set(server.requests)) == statistics["calls"]
    assert statistics["cost_usd"] == pytest.approx(0.12 * statistics["calls"])
    again = len(server.requests)
    with pytest.raises(GuardError, match="budget is spent"):
        debated(server, kept, 80, budget_usd=3.0, **priced)
    assert len(server.requests) == again  # what was paid in earlier runs counts
    with pytest.raises(GuardError, match="a budget needs prices"):
        debated(server, kept, budget_usd=1.0)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENERATOR_BASE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("GENERATOR_MODEL", "toy")


def _conversations(tmp_path: Path, count: int) -> str:
    path = tmp_path / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(count)))
    return str(path)


@pytest.mark.usefixtures("settings")
def test_what_is_not_named_is_as_last_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for name, value in (("PRICE_IN", "1"), ("PRICE_OUT", "1"), ("BUDGET_USD", "5")):
        monkeypatch.setenv(f"GENERATOR_{name}", value)
    dear = writers_for(RULE, {}, None, path)
    assert dear.budget_usd == 5.0
    assert dear.inputs() == first.inputs()  # the data do not depend on what they may cost


@pytest.mark.usefixtures("settings")
def test_what_keeps_an_endpoint_from_writing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = RULE.model_copy(update={"policy": f"{EDIT} say it"})
    with pytest.raises(GuardError, match=f"the rule still says {EDIT}"):
        writers_for(unfinished, {}, None, None)
    with pytest.raises(GuardError, match="no conversations"):
        writers_for(RULE, {}, None, _conversations(tmp_path, 0))
    (tmp_path / "bad.jsonl").write_text('{"label": 1}\n')
    told = r"bad\.jsonl:1: no conversation: no conversation \(got label\)"
    with pytest.raises(GuardError, match=told):
        writers_for(RULE, {}, None, str(tmp_path / "bad.jsonl"))
    monkeypatch.setenv("GENERATOR_BUDGET_USD", "much")
    with pytest.raises(GuardError, match="GENERATOR_BUDGET_USD has a bad value"):
        writers_for(RULE, {}, None, None)
    monkeypatch.delenv("GENERATOR_BASE_URL")
    monkeypatch.delenv("GENERATOR_MODEL")
    with pytest.raises(GuardError, match="no endpoint is described"):
        writers_for(RULE, {}, None, None)
