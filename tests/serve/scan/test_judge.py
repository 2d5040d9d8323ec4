"""Many conversations: answers in their order, asked in the order of what they share."""

from __future__ import annotations

import pytest

from guard.conversation.example import Message
from serve.scan import judge as judging
from serve.scan.judge import judge
from tests.serve.client.censor import Censor
from tests.serve.guarded import CONVERSATION, guard_engine
from tests.serve.toy_engine import ToyEngine


def conversation(*contents: str) -> tuple[Message, ...]:
    return tuple(Message("user", content) for content in contents)


def test_answers_come_in_the_order_of_the_conversations() -> None:
    texts = [f"number {number}" for number in range(100)]
    texts[17] = texts[63] = "forbidden"
    checks = judge(Censor(), [conversation(text) for text in texts], ["words", "fine"])
    violated = [number for number, check in enumerate(checks) if check.outcome == "violation"]
    assert violated == [17, 63]
    assert judge(Censor(), [], ["words"]) == []


def test_those_that_share_a_beginning_are_asked_one_after_the_other() -> None:
    engine = ToyEngine({"fine": -2.0})
    asked = [conversation("b", "2"), conversation("a"), conversation("b"), conversation("b", "1")]
    judge(engine, asked, ["fine"])  # type: ignore[arg-type]
    assert engine.conversations == [asked[1], asked[2], asked[3], asked[0]]


def test_no_more_are_open_than_fill_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "OPEN", 3)
    engine = ToyEngine({"fine": -2.0})
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(not call.done for _, call in engine.open))

    engine.on_step = look
    judge(engine, [conversation(str(number)) for number in range(10)], ["fine"])  # type: ignore[arg-type]
    assert most == 3


def test_what_breaks_the_engine_leaves_nothing_in_it() -> None:
    engine = ToyEngine()
    with pytest.raises(RuntimeError, match="the batch broke"):
        judge(engine, [conversation("a"), conversation("b")], ["crash"])  # type: ignore[arg-type]
    assert engine.open == []


@pytest.mark.slow
def test_verdicts_are_those_of_single_checks_and_a_shared_beginning_is_computed_once() -> None:
    engine = guard_engine()
    longer = (*CONVERSATION, Message("assistant", "I can not say."), Message("user", "Why not?"))
    engine.forget()
    alone = [engine.check(messages) for messages in (CONVERSATION, longer)]
    engine.forget()
    together = judge(engine, [longer, CONVERSATION], list(engine.rules))
    for check, single in zip(together, reversed(alone), strict=True):
        assert [verdict.logit for verdict in check.verdicts] == pytest.approx(
            [verdict.logit for verdict in single.verdicts], abs=1e-3
        )
    computed = sum(check.computed_tokens for check in together)
    assert computed <= 1.2 * sum(check.computed_tokens for check in alone)
