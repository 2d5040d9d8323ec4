from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from eval.served import Served, answering_code, score_missing
from eval.trial import Contestant
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


def test_one_engine_answers_all_rules_with_all_their_adapters(world: World) -> None:
    world.add_rule("medical", examples=4, seeds=(0, 1))
    world.add_rule("legal", examples=6)
    engine = ToyEngine()
    score_missing(
        [Served(world.trial(name), with_base=True) for name in ("medical", "legal")],
        world.recipe,
        engine.open,
    )
    assert len(engine.opened_with) == 1
    assert engine.opened_with[0]["medical/alora/1"] == world.runs.adapter(
        "toy", "medical", "alora", 1
    )
    assert set(engine.opened_with[0]) == {
        *("medical/lora/0", "medical/lora/1", "medical/alora/0", "medical/alora/1"),
        *("legal/lora/0", "legal/alora/0"),
    }
    assert len(engine.requests) == 4 * 5 + 6 * 3


def test_requests_on_one_conversation_stand_together_base_and_alora_first(world: World) -> None:
    world.add_rule(examples=2, seeds=(0, 1))
    engine = asked(world)
    order = [None, "medical/alora/0", "medical/alora/1", "medical/lora/0", "medical/lora/1"]
    assert [request.adapter for request in engine.requests] == order * 2
    assert len({request.messages for request in engine.requests[:5]}) == 1


def test_every_method_that_shares_the_prefill_comes_before_those_that_do_not(world: World) -> None:
    world.recipe = WITH_HEAD
    world.add_rule(examples=1, seeds=(0, 1))
    engine = asked(world)
    sharing = [None, "medical/alora/0", "medical/alora/1", "medical/head/0"]
    assert [request.adapter for request in engine.requests] == [
        *sharing,
        "medical/lora/0",
        "medical/lora/1",
    ]


def test_what_was_answered_is_not_asked_again(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    assert asked(world).opened_with == []
    answers = [row.logit for row in served(world).rows(None)]
    assert answers == [evidence(example.messages) for example in world.trial().examples]


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


def test_new_weights_are_asked_again_and_nothing_else(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    folder = world.runs.adapter("toy", "medical", "alora")
    (folder / PEFT_WEIGHTS).write_bytes(b"trained again")
    sign(folder)
    engine = asked(world)
    assert {request.adapter for request in engine.requests} == {"medical/alora/0"}


def test_weights_that_read_other_turns_are_asked_again(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    evaluated = world.trial()
    contestants: list[Contestant] = []
    for contestant in evaluated.contestants:
        if contestant.method == "alora":
            card = contestant.card.model_copy(update={"reads": "user"})
            contestant = replace(contestant, card=card)
        contestants.append(contestant)
    changed = replace(evaluated, contestants=tuple(contestants))
    missing = Served(changed, with_base=True).missing()
    assert len(missing) == 4
    assert {query.request.adapter for query in missing} == {"medical/alora/0"}


def test_another_vllm_is_asked_again(world: World, monkeypatch: MonkeyPatch) -> None:
    world.add_rule(examples=4)
    asked(world)
    monkeypatch.setattr("eval.served.versions", lambda: {"vllm": "9.9", "torch": "9.9"})
    answering_code.cache_clear()
    assert len(served(world).missing()) == 4 * 3
    monkeypatch.undo()
    answering_code.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        *("engine.py", "arrival.py", "sgmv.py", "decoder.py", "recipe.py", "device.py"),
        *("products.cpp", "attention.cpp"),
    ],
)
def test_other_code_asks(world: World, monkeypatch: MonkeyPatch, tmp_path: Path, name: str) -> None:
    world.add_rule(examples=4)
    asked(world)
    edited = tmp_path / name
    edited.write_text("# another version")
    monkeypatch.setattr(
        "eval.served.CODE", tuple(edited if path.name == name else path for path in CODE)
    )
    answering_code.cache_clear()
    assert len(served(world).missing()) == 4 * 3
    monkeypatch.undo()
    answering_code.cache_clear()


def test_other_engine_settings_or_another_configuration_are_asked_again(world: World) -> None:
    world.add_rule(examples=4)
    asked(world)
    folder = world.runs.adapter("toy", "medical", "lora")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 1}')
    sign(folder)
    assert len(served(world).missing()) == 4
    world.recipe = world.recipe.model_copy(update={"engine": {"block_size": 64}})
    assert len(served(world).missing()) == 4 * 3


@pytest.mark.parametrize("turn", ["title", "none"])
def test_the_bare_base_is_told_the_rule(world: World, turn: RuleTurn) -> None:
    world.recipe = world.recipe.model_copy(update={"rule_turn": turn})
    world.add_rule(examples=2)
    engine = asked(world)
    rule = world.trial().rule
    assert {request.rule_text for request in engine.requests if request.adapter is None} == {
        rule.title
    }
    assert {request.rule_text for request in engine.requests if request.adapter} == {
        rule.text(turn)
    }


def test_a_conversation_kept_under_another_id_is_found_under_its_new_one(world: World) -> None:
    world.add_rule(examples=4)
    asked(world, with_base=False)
    world.write_test(
        "medical", [replace(example, id=f"new-{example.id}") for example in world.trial().examples]
    )
    engine = ToyEngine()
    kept = served(world, with_base=False)
    score_missing([kept], world.recipe, engine.open)
    assert engine.requests == []
    assert [row.id for row in kept.rows(kept.trial.by_seed("lora")[0])] == [
        f"new-medical-{number}" for number in range(4)
    ]


def test_a_refusal_is_no_answer_and_is_asked_again(world: World) -> None:
    world.add_rule(examples=4)
    refusing = ToyEngine(
        lambda request: "too long" if request.messages[-1].content.endswith(" 3") else 2.0
    )
    asked(world, refusing, with_base=False)
    kept = served(world, with_base=False)
    answers = kept.answers(kept.trial.by_seed("alora")[0])
    assert [answer.violates for answer in answers] == [True, True, True, None]
    assert [answer.p_violation is None for answer in answers] == [False, False, False, True]
    assert "too long" in str(kept.rows(kept.trial.by_seed("alora")[0])[3].refusal)
    engine = ToyEngine()
    score_missing([kept], world.recipe, engine.open)
    assert len(engine.requests) == 2
    assert kept.answers(kept.trial.by_seed("alora")[0])[3].violates is True


def test_answers_are_calibrated_by_each_card_and_the_base_is_not(world: World) -> None:
    world.add_rule(examples=2)
    logits = {example.id: 1.0 for example in world.trial().examples}
    world.add_adapter("medical", "alora", 0, logits, temperature=0.5, threshold=0.9)
    world.add_adapter("medical", "lora", 0, logits, temperature=1.0, threshold=0.8)
    kept = served(world)
    score_missing([kept], world.recipe, ToyEngine(lambda request: 1.0).open)
    by_method = {
        method: kept.answers(kept.trial.by_seed(method)[0])[0] for method in ("lora", "alora")
    }
    assert by_method["alora"].p_violation == pytest.approx(0.8808, abs=1e-4)  # sigmoid(2)
    assert by_method["lora"].p_violation == pytest.approx(0.7311, abs=1e-4)  # sigmoid(1)
    assert [answer.violates for answer in by_method.values()] == [False, False]
    assert kept.answers(None)[0].violates is True


def test_rows_that_were_never_asked_are_an_error_not_an_allow(world: World) -> None:
    world.add_rule(examples=2)
    with pytest.raises(KeyError, match="never put to"):
        served(world, with_base=False).rows(None)
