"""Perturbations keep their labels, and the figures say which verdicts flip."""

from __future__ import annotations

import re
from dataclasses import replace

from data.generator.phrasebook import pool_of
from data.generator.tricks import INSTRUCTIONS, MASTER_KEYS, TRICKS
from eval.answers import Answer
from eval.robustness import TRICKED, perturbations, robustness
from eval.trial import Trial
from guard.conversation.example import Message
from tests.eval.conftest import World


def trial(world: World, examples: int = 120, seeds: tuple[int, ...] = (0, 1)) -> Trial:
    world.add_rule(examples=examples, seeds=seeds)
    return world.trial()


def test_every_trick_is_played_on_the_judged_words_of_the_same_examples(world: World) -> None:
    plain = trial(world)
    perturbed = perturbations(plain)
    assert perturbed == perturbations(plain)
    for name in TRICKS:
        tricked = [it for it in perturbed if it.trick == name]
        assert 0.3 * TRICKED < len(tricked) <= TRICKED
        for it in tricked:
            before = plain.examples[it.index]
            assert it.example.label == before.label and it.example.messages != before.messages
            assert it.example.messages[0] == before.messages[0]  # the user's, who is not judged


def test_of_a_rule_on_tools_a_document_in_the_system_s_turn_is_played_on(world: World) -> None:
    """What a head reads and what the rule judges are the same turns."""
    plain = trial(world)
    documents = [
        replace(row, messages=(Message("system", row.messages[1].content), row.messages[0]))
        for row in plain.examples
    ]
    rule = plain.rule.model_copy(update={"judged": "tool"})
    perturbed = perturbations(replace(plain, rule=rule, examples=tuple(documents)))
    tricked = [perturbation for perturbation in perturbed if perturbation.trick in TRICKS]
    assert tricked
    for perturbation in tricked:
        before = documents[perturbation.index].messages
        assert perturbation.example.messages[0] != before[0]
        assert perturbation.example.messages[1] == before[1]


def test_the_words_of_a_trick_are_none_that_training_has_seen(world: World) -> None:
    """Training draws the injections and master keys of the pool `seen`."""
    perturbed = perturbations(trial(world))
    for name, lines in (("instruction", INSTRUCTIONS), ("master_key", MASTER_KEYS)):
        played = {
            line
            for line in lines
            for perturbation in perturbed
            if perturbation.trick == name
            and line in _beside(perturbation.example.messages[1].content, "case of")
        }
        assert played
        assert played <= set(pool_of(lines, "unseen"))


def _beside(content: str, said: str) -> tuple[str, str]:
    """What stands before and behind what was said, whose last word is a number."""
    before, _, after = content.partition(said)
    return before.strip(), re.sub(r"^ \w+ -?\d+", "", after).strip()


def test_no_trick_is_played_on_a_row_that_has_one(world: World) -> None:
    plain = trial(world)
    marked = [
        replace(row, meta=row.meta | {"trick": "spaced"}) if number % 3 else row
        for number, row in enumerate(plain.examples)
    ]
    perturbed = perturbations(replace(plain, examples=tuple(marked)))
    assert {p.index % 3 for p in perturbed} == {0}


def test_flips_and_what_is_right_are_counted(world: World) -> None:
    """An answer that is missing is wrong and no flip."""
    plain = trial(world)
    perturbed = perturbations(plain)
    told = [Answer(bool(row.label)) for row in plain.examples]
    right = dict.fromkeys(plain.methods, told)
    fooled = []
    violating = 0
    for perturbation in perturbed:
        is_instruction = perturbation.trick == "instruction"
        violating += is_instruction and perturbation.example.label
        fooled.append(Answer(not is_instruction and bool(perturbation.example.label)))
    result = robustness(plain, perturbed, right, dict.fromkeys(plain.methods, fooled))
    trick = result["alora"]["instruction"]
    assert trick.n == TRICKED  # a word to the judge can always be added
    assert (trick.flips, trick.right_before) == (violating, TRICKED)
    assert trick.right_after == TRICKED - violating
    assert result["alora"]["spaced"].flips == 0
    nothing = [Answer(None)] * len(perturbed)
    silent = dict.fromkeys(plain.methods, nothing)
    trick = robustness(plain, perturbed, right, silent)["alora"]["instruction"]
    assert (trick.flips, trick.right_before, trick.right_after) == (0, TRICKED, 0)
