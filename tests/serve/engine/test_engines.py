"""Several engines behind one check: what each answers, in the order asked; and an encoder's rule
beside a decoder's for real.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card
from serve.engine import GuardEngine
from serve.engine.engines import GuardEngines
from serve.engine.thread.engine_thread import EngineThread
from tests.serve.cards import RULE_TEXTS, recipe, save_card
from tests.serve.encoder_rules import ENGINE, reference_logit, save_encoder_rule
from tests.serve.encoder_rules import recipe as encoder_recipe
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import adapter_folders, guard_engine, peft_logit, save_adapter

MESSAGES = (Message("user", "My head hurts."), Message("assistant", "Take 800 mg of ibuprofen."))


def toy_engine(root: Path, *names: str) -> tuple[GuardEngine, ToyBackend]:
    backend = ToyBackend()
    folders = {name: save_adapter(root / name, name, seed=1) for name in names}
    return GuardEngine(recipe(), folders, start_backend=lambda *_: backend), backend


@pytest.fixture
def mixed(tmp_path: Path) -> GuardEngines:
    return GuardEngines(
        lambda _: [
            toy_engine(tmp_path, "pii_leak", "a")[0],
            toy_engine(tmp_path, "refund_promise", "b")[0],
        ]
    )


def test_verdicts_come_in_the_order_asked_whichever_engine_answers(mixed: GuardEngines) -> None:
    names = ["b", "pii_leak", "refund_promise", "a"]
    check = mixed.check(MESSAGES, names)
    assert [verdict.rule for verdict in check.verdicts] == names
    assert check.computed_tokens > 0 and check.wall_ms > 0
    assert [verdict.rule for verdict in mixed.check(MESSAGES).verdicts] == list(mixed.rules)


class CountingEngine(GuardEngine):
    """Counts how often its rules are asked for."""

    times = 0

    @property
    def rules(self) -> Mapping[str, Card]:
        self.times += 1
        return super().rules


def test_an_engine_is_asked_for_its_rules_as_often_for_many_as_for_one(tmp_path: Path) -> None:
    engines = []
    for part in ("a", "b"):
        names = [f"{part}{number}" for number in range(4)]
        folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in names}
        engines.append(CountingEngine(recipe(), folders, start_backend=lambda *_: ToyBackend()))
    mixed = GuardEngines(lambda _: engines)
    times: list[list[int]] = []
    for names in (["a0", "b0"], list(mixed.rules)):
        for engine in engines:
            engine.times = 0
        mixed.check(MESSAGES, names)
        times.append([engine.times for engine in engines])
    assert times[0] == times[1]


def test_rules_are_served_and_removed_in_the_engine_of_their_model(
    mixed: GuardEngines, tmp_path: Path
) -> None:
    new = save_adapter(tmp_path / "new", "new", seed=2)
    mixed.serve("new", new)
    check = mixed.check(MESSAGES, ["b", "new"])
    assert [verdict.rule for verdict in check.verdicts] == ["b", "new"]
    assert set(check.versions) == set(check.latencies_ms) == {"b", "new"}
    mixed.serve("b", new)
    assert mixed.folder("b") == new
    mixed.remove("new")
    mixed.remove("b")
    assert list(mixed.rules) == ["pii_leak", "a", "refund_promise"]
    save_card(new, "other", model="renamed")  # a recipe of another name on the same base
    mixed.serve("other", new)
    assert "other" in mixed.rules
    save_card(new, "third", base="another")
    with pytest.raises(GuardError, match=r"weights is not served.*another.*Served here: tiny"):
        mixed.serve("third", new)


def test_a_rule_that_none_serves_is_refused_and_the_others_answer(mixed: GuardEngines) -> None:
    check = mixed.check(MESSAGES, ["b", "nobody", "a"])
    assert [verdict.rule for verdict in check.verdicts] == ["b", "a"]
    assert "not served" in str(check.refused["nobody"])


def test_its_counters_are_those_of_all_engines_together(mixed: GuardEngines) -> None:
    counted = [engine.counters for engine in mixed._engines]
    assert mixed.counters == counted[0] + counted[1]
    assert mixed.counters.adapters == 4


@pytest.mark.parametrize("rules", [[], ["a", "a"], ["b", "b"]])
def test_no_rule_or_one_twice_is_an_error_as_in_one_engine(
    mixed: GuardEngines, rules: list[str]
) -> None:
    with pytest.raises(GuardError, match=r"no rule|twice"):
        mixed.check(MESSAGES, rules)


@pytest.mark.parametrize(
    ("messages", "rules", "problem"),
    [
        (MESSAGES, "pii_leak", r"rules must be a list of names .*Write \['pii_leak'\]"),
        ("Hello", ["pii_leak"], "messages must be a list of Message .got 'H'.*turns_of"),
        ([{"role": "user", "content": "Hi"}], ["pii_leak"], "messages must be a list of Message"),
    ],
)
@pytest.mark.parametrize("is_mixed", [True, False])
def test_what_is_no_list_of_rules_or_messages_is_an_error(
    mixed: GuardEngines, messages: Any, rules: Any, problem: str, is_mixed: bool
) -> None:
    engine = mixed if is_mixed else mixed._engines[0]
    with pytest.raises(GuardError, match=problem):
        engine.check(messages, rules)


def test_two_engines_may_not_serve_one_name(tmp_path: Path) -> None:
    engines = [toy_engine(tmp_path / part, "pii_leak")[0] for part in "ab"]
    with pytest.raises(GuardError, match=r"two engines serve one rule \(got pii_leak\)"):
        GuardEngines(lambda _: engines)


def test_a_check_that_is_cancelled_leaves_nothing_in_any_engine(tmp_path: Path) -> None:
    first, _ = toy_engine(tmp_path, "pii_leak")
    second, _ = toy_engine(tmp_path, "refund_promise")
    mixed = GuardEngines(lambda _: [first, second])
    open_check = mixed.open_check(MESSAGES)
    assert first.is_busy and second.is_busy
    mixed.cancel(open_check.call)
    assert not first.is_busy and not second.is_busy


@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_engine_cannot_be_closed_the_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    def fail() -> None:
        raise RuntimeError("the backend broke")

    engines = [toy_engine(tmp_path, name) for name in ("a", "b")]
    closed: list[str] = []
    monkeypatch.setattr(engines[broken][1], "close", fail)
    monkeypatch.setattr(engines[1 - broken][1], "close", lambda: closed.append("the other"))
    with pytest.raises(RuntimeError, match="the backend broke"):
        GuardEngines(lambda _: [engine for engine, _ in engines]).close()
    assert closed == ["the other"]


def test_the_server_s_thread_takes_several_engines(mixed: GuardEngines) -> None:
    thread = EngineThread(mixed)
    verdicts = thread.check(MESSAGES).result(timeout=30).verdicts
    thread.close()
    assert {verdict.rule for verdict in verdicts} == set(mixed.rules)


@pytest.mark.slow
def test_an_encoder_s_rule_and_a_decoder_s_answer_one_check(tmp_path: Path) -> None:
    folder = save_encoder_rule(tmp_path / "of_encoder", seed=1)
    with GuardEngine(encoder_recipe(), {"of_encoder": folder}, **ENGINE) as of_encoder:
        mixed = GuardEngines(lambda _: [guard_engine(), of_encoder])
        check = mixed.check(MESSAGES, ["plain", "of_encoder", "pii_leak"])
    logits = {verdict.rule: verdict.logit for verdict in check.verdicts}
    assert list(logits) == ["plain", "of_encoder", "pii_leak"]
    assert logits["of_encoder"] == pytest.approx(reference_logit(MESSAGES, folder), abs=1e-5)
    for name in ("plain", "pii_leak"):
        expected = peft_logit(MESSAGES, RULE_TEXTS[name], adapter_folders()[name])
        assert logits[name] == pytest.approx(expected, abs=2e-3)
