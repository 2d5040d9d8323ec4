"""A rule judges the moment it is written: by the recipe's reader, or by the bare base if named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import Recipe
from guard.rule import Gate
from guard.weights.card import ZERO, Card, load_card, read_card
from guard.weights.version_zero import card_of_reader
from serve.api.engine_service import EngineService
from serve.api.watch import watch
from serve.attempt import answer
from serve.engine import Check, GuardEngine
from serve.engine.backend import EngineOutput
from serve.engine.engine import policy_name
from serve.engine.engines import GuardEngines
from serve.merge import mergeable_adapter
from serve.registry.change import RolloutChange
from serve.registry.registry import RegisteredRule, Registry
from serve.registry.rollout import Mode
from serve.selection import RegisteredRollouts, Selection, ServedPart, served_parts, unpublished
from serve.verify import parts_of
from serve.versions import listing
from tests.serve.cards import prompts, recipe
from tests.serve.engine.shared import NATS
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import CONVERSATION, ENGINE, save_adapter
from tests.serve.heads import HIDDEN_SIZE, reference_logit, save_alora

RULE_FILE = """\
id: {name}
title: Never mention {name}.
policy: The assistant must not mention {name} to anyone.
judged: assistant
violates: [it says {name}]
allows: ["EDIT: what comes close"]
"""
POLICY = "Never promise a delivery date."
BY_ANN: dict[str, Any] = {"actor": "ann", "reason": "a trial"}


def write_rule(rules: Path, name: str, what: str | None = None) -> None:
    (rules / f"{name}.yaml").write_text(
        RULE_FILE.format(name=name).replace(f"it says {name}", what or f"it says {name}")
    )


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rule files `apples` and `pears`; the tiny base has a reader of random weights."""
    folder = tmp_path / "rules"
    folder.mkdir()
    write_rule(folder, "apples")
    write_rule(folder, "pears")
    monkeypatch.setattr("serve.untrained.RULES", folder)
    reader = save_alora(tmp_path / "reader", "reader", seed=7)
    use(monkeypatch, recipe().model_copy(update={"reader": str(reader)}))
    return folder


def use(monkeypatch: pytest.MonkeyPatch, of_base: Recipe) -> None:
    for module in ("selection", "versions"):
        monkeypatch.setattr(f"serve.{module}.load_recipe", lambda name: of_base)


@pytest.fixture
def selection(rules: Path, tmp_path: Path) -> Selection:
    return Selection(runs=Runs(tmp_path / "runs"))


def started(part: ServedPart) -> GuardEngine:
    return GuardEngine(
        part.recipe, part.folders, reader=part.reader, start_backend=lambda *_: WideBackend()
    )


class WideBackend(ToyBackend):
    """Gives states as wide as the tiny base's."""

    state_size = HIDDEN_SIZE

    def step(self) -> list[EngineOutput]:
        state = np.ones(HIDDEN_SIZE, np.float32)
        return [output._replace(state=state) for output in super().step()]


def train(selection: Selection, rule: str, seed: int) -> str:
    folder = save_adapter(selection.runs.adapter("tiny", rule, "alora"), rule, seed=seed)
    return Registry(selection.runs).register(folder, actor="ann", note="trained").id


def test_rules_without_weights_are_served_as_version_zero_by_the_words_of_now(
    selection: Selection, rules: Path
) -> None:
    train(selection, "pears", 1)
    (part,) = served_parts(selection)
    card = load_card(part.folders["apples"])
    text = "Never mention apples. The assistant must not mention apples to anyone. "
    assert card.rule_text == f"{text}Violates: it says apples"
    assert (card.by, card.rule, card.version[:2]) == ("reader", "apples", ZERO)
    assert load_card(part.folders["pears"]).by == "alora"
    registry = Registry(selection.runs)
    events = len(registry.events())
    assert served_parts(selection) == [part] and len(registry.events()) == events
    assert f"{card.version[:12]}  champion" in listing(registry)
    # Its words change: another version 0 is champion, and the one before is kept.
    source = RegisteredRollouts(selection, [part])
    write_rule(rules, "apples", "it praises apples")
    rollout = source.find("apples", card)
    assert rollout is not None and "praises" in read_card(rollout.folder).rule_text
    rule = RegisteredRule("tiny", "apples", "alora")
    assert registry.aliases(rule)["previous"] == card.version
    with pytest.raises(GuardError, match="what the rule's file says"):
        source.prepare(card, RolloutChange(action="rollback", **BY_ANN))
    judged = {"rule": "apples", "version": card.version}
    (again,) = parts_of([judged], selection.runs)
    assert load_card(*again.folders.values()) == card
    (rules / "apples.yaml").write_text("id: apples\n")
    assert source.find("apples", card) == rollout
    registry.verify()


def test_trained_weights_follow_version_zero_which_is_stepped_back_to(
    selection: Selection, rules: Path
) -> None:
    (part,) = served_parts(selection)
    zero = read_card(part.folders["apples"])
    rule, registry = RegisteredRule.of(zero), Registry(selection.runs)
    source = RegisteredRollouts(selection, [part])
    registry.set_mode(rule, zero.version[:9], Mode(share=0.0), gate=Gate(), **BY_ANN)
    assert source.find("apples") == registry.rollout(rule)
    first = train(selection, "apples", 1)
    assert registry.aliases(rule) == {"champion": first, "previous": zero.version}
    change = RolloutChange(action="rollback", **BY_ANN)
    source.prepare(zero, change).carry_out()
    assert train(selection, "apples", 1) == first  # as `make calibrate` does
    assert registry.aliases(rule)["champion"] == zero.version
    second = train(selection, "apples", 2)  # a person decides, as somebody stepped back
    assert registry.aliases(rule)["candidate"] == second
    (part,) = served_parts(selection)
    assert read_card(part.folders["apples"]) == zero
    assert second[:12] in unpublished(selection, [part])[0]
    (rules / "apples.yaml").write_text("id: apples\n")  # the weights do not take its place
    assert list(served_parts(selection)[0].folders) == ["pears"]


def test_weights_copied_beside_version_zero_are_named_and_replace_nothing(
    selection: Selection,
) -> None:
    (part,) = served_parts(selection)
    folder = save_adapter(selection.runs.adapter("tiny", "apples", "alora"), "apples", seed=1)
    copied = read_card(folder)
    (line,) = unpublished(selection, [part])
    assert copied.version[:12] in line and "make publish RULE=apples" in line
    change = RolloutChange(action="publish", **BY_ANN)
    RegisteredRollouts(selection, [part]).prepare(read_card(part.folders["apples"]), change)
    aliases = Registry(selection.runs).aliases(RegisteredRule.of(copied))
    assert aliases["candidate"] == copied.version


def test_version_zero_follows_the_files_of_a_process_when_they_change_and_no_others(
    selection: Selection, rules: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (part,) = served_parts(selection)
    card, reader = read_card(part.folders["apples"]), tmp_path / "reader"
    source, registry = RegisteredRollouts(selection, [part]), Registry(selection.runs)
    other = card_of_reader(read_card(reader), "apples", "Words of another process.")
    registry.register_zero(other, reader, actor="bob", note="")

    def served() -> Card:
        rollout = source.find("apples", card)
        assert rollout is not None
        return read_card(rollout.folder)

    assert [served(), served()] == [other, other]
    for what in ("it praises apples", "it says apples", "it praises apples"):  # also taken back
        write_rule(rules, "apples", what)
        assert what in served().rule_text
    save_alora(reader, "reader", seed=8)
    assert served().files == read_card(reader).files != card.files
    before = served()
    for text in ("id: apples\n", "id: pears\n"):
        (rules / "apples.yaml").write_text(text)
        assert [served(), served()] == [before, before]
    assert caplog.text.count("the rule apples is served as before") == 2


def test_weights_without_another_version_are_stepped_back_from_to_version_zero(
    selection: Selection,
) -> None:
    only = train(selection, "apples", 1)
    parts = served_parts(selection)
    card = read_card(parts[0].folders["apples"])
    prepared = RegisteredRollouts(selection, parts).prepare(
        card, RolloutChange(action="rollback", **BY_ANN)
    )
    assert Registry(selection.runs).aliases(RegisteredRule.of(card)) == {"champion": only}
    prepared.carry_out()
    rollout = Registry(selection.runs).rollout(RegisteredRule.of(card))
    assert rollout is not None and load_card(rollout.folder).by == "reader"


def test_without_a_reader_the_bare_base_judges_what_is_named(
    selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, recipe())
    with pytest.raises(GuardError, match="no rule is trained"):
        served_parts(selection)
    served_parts(Selection(rules="apples", method="lora", runs=selection.runs))
    with pytest.raises(GuardError, match="version 0, without weights"):
        mergeable_adapter(recipe(), selection.runs, "apples")
    named = Selection(rules="apples", runs=selection.runs)
    (part,) = served_parts(named)
    with started(part) as engine:
        check = engine.check(CONVERSATION, policies=[POLICY])
        (verdict, _) = check.verdicts
        assert (verdict.by, verdict.confident) == ("base", False)
        assert check.versions["apples"].startswith(ZERO)
        prompt = engine.backend.submitted[0]  # type: ignore[attr-defined]
        assert prompt.suffix == prompts().suffix_ids("Never mention apples.")
        assert prompt.adapter is None
    train(selection, "pears", 1)
    (part,) = served_parts(selection)
    assert list(part.folders) == ["pears"]
    with pytest.raises(GuardError, match=r"not trained by method 'alora' \(got plums\)"):
        served_parts(Selection(rules="plums", runs=selection.runs))


def test_a_reader_is_one_adapter_whatever_rules_come_and_go(selection: Selection) -> None:
    (part,) = served_parts(selection)
    with started(part) as engine:
        backend = engine.backend
        assert isinstance(backend, ToyBackend)
        assert list(engine.rules) == ["apples", "pears"] and engine.counters.adapters == 1
        engine.serve("apples", part.folders["apples"])
        engine.serve("plums", save_adapter(selection.runs.root / "plums", "plums", seed=1))
        engine.remove("pears")
        assert len(backend.loaded) == 2 and engine.is_usable
        with pytest.raises(GuardError, match="not served"):
            engine.remove("pears")
        engine.serve("apples", save_adapter(selection.runs.root / "apples", "apples", seed=2))
        assert engine.check(CONVERSATION, ["apples"], policies=[POLICY]).verdicts[1].by == "reader"
        engine.remove("plums")
        assert len(backend.loaded) == 2
        engine.serve("pears", part.folders["pears"])
        assert engine.counters.adapters == len(backend.loaded) == 2


def test_policies_are_judged_by_the_engine_with_the_reader(selection: Selection) -> None:
    (part,) = served_parts(selection)
    bare = ServedPart(recipe(), "alora", {})
    with GuardEngines(lambda _: [started(bare), started(part)]) as engines:
        opened = engines.open_check(CONVERSATION, ["pears"], policies=[POLICY, POLICY])
        while not opened.done:
            engines.step()
        verdicts = opened.result().verdicts
        assert [verdict.rule for verdict in verdicts] == ["pears", policy_name(0), policy_name(1)]
        assert {verdict.by for verdict in verdicts} == {"reader"}
    with pytest.raises(GuardError, match="no rule to check"), started(part) as engine:
        engine.check(CONVERSATION, [], policies=[])


def test_a_line_of_a_terminal_is_a_conversation(selection: Selection) -> None:
    (part,) = served_parts(selection)
    with GuardEngines(lambda _: [started(part)]) as engine:
        said: list[tuple[Message, ...]] = []

        def check(messages: tuple[Message, ...], names: list[str]) -> Check:
            said.append(messages)
            return engine.check(messages, names)

        spied = SimpleNamespace(check=check)
        for line in ("Hi a / b\n", "User: Hi / assistant: No."):
            assert answer(spied, "apples", line).endswith(", by reader")  # type: ignore[arg-type]
        refused = answer(engine, "apples", "word " * 3000)
        assert refused.startswith("unjudged: the prompt does not fit")
    user = Message("user", "Hi a / b")
    assert said == [(user,), (Message("user", "Hi"), Message("assistant", "No."))]


@pytest.mark.slow
def test_a_new_rules_file_is_served_and_a_removed_rule_stays_removed(
    selection: Selection, rules: Path
) -> None:
    (rules / "grapes.yaml").write_text("id: grapes\n")  # it is corrected later
    parts = served_parts(selection)

    async def run() -> list[str]:
        with started(parts[0]) as engine:
            source = RegisteredRollouts(selection, parts)
            service = EngineService(engine, source=source)
            service.start()
            watching = asyncio.create_task(watch(service, interval_s=0.01))
            await asyncio.sleep(0.1)
            await service.remove("pears")
            write_rule(rules, "grapes")
            (rules / "cherries.yaml").write_text("id: cherries\n")  # and it is no rule
            write_rule(rules, "plums")
            for _ in range(500):
                await asyncio.sleep(0.02)
                if {"plums", "grapes"} <= service.cards.keys():
                    break
            served = sorted(service.cards)
            watching.cancel()
            service.close()
            return served

    assert asyncio.run(run()) == ["apples", "grapes", "plums"]


@pytest.fixture
def judging(selection: Selection) -> Iterator[GuardEngine]:
    (part,) = served_parts(selection)
    settings: dict[str, Any] = dict(ENGINE)
    with GuardEngine(part.recipe, part.folders, reader=part.reader, **settings) as engine:
        yield engine


@pytest.mark.slow
def test_rules_of_one_reader_in_one_batch_are_as_in_plain_peft(judging: GuardEngine) -> None:
    check = judging.check(CONVERSATION, policies=[POLICY])
    assert len(check.verdicts) == 3 and judging.counters.adapters == 1
    folder = judging.folder("apples")
    texts = [judging.rules[name].rule_text for name in ("apples", "pears")] + [POLICY]
    expected = [reference_logit(CONVERSATION, text, folder) for text in texts]
    assert [verdict.logit for verdict in check.verdicts] == pytest.approx(expected, abs=NATS)
    assert min(np.diff(sorted(expected))) > 4 * NATS
