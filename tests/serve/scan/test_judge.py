"""Many conversations: answers in their order, asked in the order of what they share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import Call, OpenCheck
from serve.scan import judge as judging
from serve.scan.judge import judge, part_rows
from serve.scan.sources import StoredConversation
from tests.serve.client.censor import Censor
from tests.serve.guarded import CONVERSATION, guard_engine
from tests.serve.scan.test_scan import manifest
from tests.serve.toy_engine import ToyEngine


def conversation(*contents: str) -> tuple[Message, ...]:
    return tuple(Message("user", content) for content in contents)


def test_those_that_share_a_beginning_are_asked_one_after_the_other_and_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judging, "OPEN", 3)
    engine = ToyEngine({"fine": -2.0})
    open_at_once: list[int] = []
    engine.on_step = lambda: open_at_once.append(sum(not call.done for _, call in engine.open))
    asked = [conversation("b", "2"), conversation("a"), conversation("b"), conversation("b", "1")]
    judge(engine, asked, ["fine"])  # type: ignore[arg-type]
    assert engine.conversations == [asked[1], asked[2], asked[3], asked[0]]
    assert max(open_at_once) == 3


class Brittle(Censor):
    """A batch with "poison" in it fails."""

    def __init__(self) -> None:
        super().__init__()
        self._poisoned: list[Call] = []

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        opened = super().open_check(messages, rules, cache_salt=cache_salt)
        if any("poison" in message.content for message in messages):
            self._poisoned.append(opened.call)
        return opened

    def step(self) -> None:
        for _, call in self.open:
            if any(poisoned is call for poisoned in self._poisoned):
                raise RuntimeError("out of\nmemory")
        super().step()


@pytest.mark.parametrize("broken", ["poison", "breaks"])  # at a step; when it is opened
def test_a_failing_check_is_refused_and_the_others_are_judged(broken: str) -> None:
    texts = [f"number {number}" for number in range(50)]
    texts[7], texts[8], texts[31] = broken, "forbidden", "forbidden"
    engine = Brittle()
    checks = judge(engine, [conversation(text) for text in texts], ["words", "fine"])
    violated = [number for number, check in enumerate(checks) if check.outcome == "violation"]
    assert violated == [8, 31]
    for number, check in enumerate(checks):
        assert bool(check.refused) == (number == 7) != bool(check.verdicts)
    reasons = {refusal.why for refusal in checks[7].refused.values()}
    errors = {"poison": "RuntimeError: out of memory", "breaks": "GuardError: the check broke"}
    assert reasons == {f"the engine failed: {errors[broken]}"}
    assert engine.open == [] or all(call.done for _, call in engine.open)


def test_an_engine_that_answers_nothing_any_longer_is_an_error_and_nothing_is_left_in_it() -> None:
    engine = ToyEngine()
    with pytest.raises(GuardError, match=r"RuntimeError: the batch broke.*again"):
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


def test_an_engine_that_fails_is_an_error_that_names_the_rows() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    engine = Censor()
    engine.on_step = fail
    part = [StoredConversation("a.jsonl", number, "", conversation("zebra")) for number in (4, 5)]
    with pytest.raises(GuardError, match=r"a\.jsonl, row 4, to a\.jsonl, row 5: .*device is gone"):
        part_rows(engine, part, manifest())
