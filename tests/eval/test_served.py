from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from eval.served import Served, answering_code, score_missing
from eval.trial import Contestant, Trial
from guard.method import PEFT_WEIGHTS
from guard.rule import RuleTurn
from serve.engine import CODE, ScoreRequest
from tests.eval.conftest import WITH_HEAD, ToyEngine, World, evidence
from tests.signed import sign


def served(world: World, with_base: bool = True) -> Served:
    return Served(world.trial(), with_base=with_base)


def asked(world: World, engine: ToyEngine | None = None, with_base: bool = True) -> ToyEngine:
    """The engine, once it has been asked what is missing."""
    engine = engine or ToyEngine()
    score_missing([served(world, with_base)], world.recipe, engine.open)
    return engine


def test_one_engine_is_asked_conversation_by_conversation_those_that_share_first(
    world: World,
) -> None:
    world.recipe = WITH_HEAD
    world.add_rule("medical", examples=2, seeds=(0, 1))
    world.add_rule("legal", examples=6)
    engine = ToyEngine()
    both = [Served(world.trial(name), with_base=True) for name in ("medical", "legal")]
    with pytest.raises(KeyError, match="never put to"):  # not an allow
        both[0].rows(None)
    score_missing(both, world.recipe, engine.open)
    (folders,) = engine.opened_with
    assert folders["medical/alora/1"] == world.runs.adapter("toy", "medical", "alora", 1)
    sharing = [None, "medical/alora/0", "medical/alora/1", "medical/head/0"]
    order = [*sharing, "medical/lora/0", "medical/lora/1"]
    assert [request.adapter for request in engine.requests[:12]] == order * 2
    assert len({request.messages for request in engine.requests[:6]}) == 1
    assert len(engine.requests) == 12 + 6 * 4
    assert set(folders) == {*order[1:], "legal/lora/0", "legal/alora/0", "legal/head/0"}


def test_what_was_answered_is_not_asked_again_under_another_id_either(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    assert asked(world).opened_with == []
    renamed = [replace(row, id=f"new-{row.id}") for row in world.trial().examples]
    world.write_test("medical", renamed)
    assert asked(world).requests == []
    rows = served(world).rows(None)
    assert [row.id for row in rows] == [row.id for row in renamed]
    assert [row.logit for row in rows] == [evidence(row.messages) for row in renamed]


def missing_of(world: World, trial: Trial | None = None) -> dict[str | None, int]:
    """How many answers of each adapter, and of the base, are missing."""
    queries = Served(trial or world.trial(), with_base=True).missing()
    return Counter(query.request.adapter for query in queries)


ALL_MISSING = {None: 4, "medical/lora/0": 4, "medical/alora/0": 4}


def test_other_weights_settings_or_turns_are_asked_again_and_nothing_else(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    contestants: list[Contestant] = []
    for contestant in world.trial().contestants:
        if contestant.method == "alora":
            card = contestant.card.model_copy(update={"reads": "user"})
            contestant = replace(contestant, card=card)
        contestants.append(contestant)
    of_other_turns = replace(world.trial(), contestants=tuple(contestants))
    assert missing_of(world, of_other_turns) == {"medical/alora/0": 4}
    for method, file in (("alora", PEFT_WEIGHTS), ("lora", "adapter_config.json")):
        folder = world.runs.adapter("toy", "medical", method)
        (folder / file).write_text('{"lora_alpha": 1}')
        sign(folder)
        assert missing_of(world) == {f"medical/{method}/0": 4}
        asked(world)
    world.recipe = world.recipe.model_copy(update={"engine": {"block_size": 64}})
    assert missing_of(world) == ALL_MISSING


@pytest.mark.parametrize("name", [None, "engine.py", "sgmv.py", "recipe.py", "attention.cpp"])
def test_other_code_asks(
    world: World, monkeypatch: MonkeyPatch, tmp_path: Path, name: str | None
) -> None:
    """Another version of vLLM, or of a file of our own."""
    world.add_rule(examples=4)
    asked(world)
    if name is None:
        monkeypatch.setattr("eval.served.versions", lambda: {"vllm": "9.9", "torch": "9.9"})
    else:
        edited = tmp_path / name
        edited.write_text("# another version")
        code = tuple(edited if path.name == name else path for path in CODE)
        monkeypatch.setattr("eval.served.CODE", code)
    answering_code.cache_clear()
    assert missing_of(world) == ALL_MISSING
    monkeypatch.undo()
    answering_code.cache_clear()


def test_a_run_cut_short_goes_on_where_it_was(world: World, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("eval.served.CHUNK", 5)
    world.add_rule(examples=8)

    def stumble(request: ScoreRequest) -> float:
        if len(engine.requests) > 10:
            raise KeyboardInterrupt
        return 1.0

    engine = ToyEngine(stumble)
    with pytest.raises(KeyboardInterrupt):
        asked(world, engine, with_base=False)
    assert len(asked(world, with_base=False).requests) == 16 - 10


@pytest.mark.parametrize("turn", ["title", "none"])
def test_the_bare_base_is_told_the_rule(world: World, turn: RuleTurn) -> None:
    """An adapter reads what it was trained with."""
    world.recipe = world.recipe.model_copy(update={"rule_turn": turn})
    world.add_rule(examples=2)
    told = {(bool(request.adapter), request.rule_text) for request in asked(world).requests}
    rule = world.trial().rule
    assert told == {(False, rule.title), (True, rule.text(turn))}


def test_a_refusal_is_no_answer_and_is_asked_again(world: World) -> None:
    def refuses_3(request: ScoreRequest) -> float | str:
        return "too long" if request.messages[-1].content.endswith(" 3") else 2.0

    world.add_rule(examples=4)
    asked(world, ToyEngine(refuses_3), with_base=False)
    kept = served(world, with_base=False)
    alora = kept.trial.by_seed("alora")[0]
    said = [(answer.violates, answer.p_violation is None) for answer in kept.answers(alora)]
    assert said == [(True, False)] * 3 + [(None, True)]
    assert "too long" in str(kept.rows(alora)[3].refusal)
    engine = ToyEngine()
    score_missing([kept], world.recipe, engine.open)
    assert len(engine.requests) == 2 and kept.answers(alora)[3].violates is True


def test_answers_are_calibrated_by_each_card_and_the_base_is_not(world: World) -> None:
    world.add_rule(examples=2)
    logits = {example.id: 1.0 for example in world.trial().examples}
    world.add_adapter("medical", "alora", 0, logits, temperature=0.5, threshold=0.9)
    world.add_adapter("medical", "lora", 0, logits, temperature=1.0, threshold=0.8)
    asked(world, ToyEngine(lambda request: 1.0))
    kept = served(world)
    for method, p_violation in (("alora", 0.8808), ("lora", 0.7311)):  # sigmoid(2), sigmoid(1)
        answer = kept.answers(kept.trial.by_seed(method)[0])[0]
        assert answer.p_violation == pytest.approx(p_violation, abs=1e-4)
        assert answer.violates is False
    assert kept.answers(None)[0].violates is True
