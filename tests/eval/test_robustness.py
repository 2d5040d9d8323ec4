"""Perturbations keep their labels, and the figures say which verdicts flip."""

from __future__ import annotations

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


def test_of_a_rule_on_tools_a_document_in_the_system_s_turn_is_played_on(world: World) -> None:
    """What a head reads and what the rule judges are the same turns."""
    plain = trial(world)
    documents = []
    for row in plain.examples:
        document = Message("system", row.messages[1].content)
        documents.append(replace(row, messages=(document, row.messages[0])))
    rule = plain.rule.model_copy(update={"judged": "tool"})
    tricked = perturbations(replace(plain, rule=rule, examples=tuple(documents)))
    assert tricked
    for perturbation in tricked:
        before = documents[perturbation.index].messages
        assert perturbation.example.messages[0] != before[0]
        assert perturbation.example.messages[1] == before[1]


def test_every_trick_is_played_on_the_judged_words_of_rows_that_have_none(world: World) -> None:
    """Words to the judge are none that training draws from."""
    plain = trial(world)
    rows = list(plain.examples)
    rows[1::3] = [replace(row, meta=row.meta | {"trick": "spaced"}) for row in rows[1::3]]
    plain = replace(plain, examples=tuple(rows))
    perturbed = perturbations(plain)
    assert perturbed == perturbations(plain)
    assert {it.index % 3 for it in perturbed} == {0, 2}
    for name in TRICKS:
        tricked = [it for it in perturbed if it.trick == name]
        assert 0.3 * TRICKED < len(tricked) <= TRICKED
        for it in tricked:
            before = plain.examples[it.index]
            assert it.example.label == before.label and it.example.messages != before.messages
            assert it.example.messages[0] == before.messages[0]  # the user's, who is not judged
    for name, lines in (("instruction", INSTRUCTIONS), ("master_key", MASTER_KEYS)):
        unseen = pool_of(lines, "unseen")
        for it in perturbed:
            if it.trick == name:
                said = it.example.messages[1].content
                plain_words = plain.examples[it.index].messages[1].content
                assert said.replace(plain_words, "").strip() in unseen


def test_flips_and_what_is_right_are_counted(world: World) -> None:
    """An answer that is missing is wrong and no flip."""
    plain = trial(world)
    perturbed = perturbations(plain)
    told = tuple(Answer(bool(row.label)) for row in plain.examples)
    right = dict.fromkeys(plain.methods, told)
    violating, fooled = 0, []
    for perturbation in perturbed:
        is_instruction, label = perturbation.trick == "instruction", perturbation.example.label
        violating += is_instruction and label
        fooled.append(Answer(bool(label) and not is_instruction))
    wrong = dict.fromkeys(plain.methods, tuple(fooled))
    tricks = robustness(plain, perturbed, right, wrong)["alora"]
    trick = tricks["instruction"]
    assert trick.n == TRICKED  # a word to the judge can always be added
    assert (trick.flips, trick.right_before) == (violating, TRICKED)
    assert trick.right_after == TRICKED - violating
    assert tricks["spaced"].flips == 0
    silent = dict.fromkeys(plain.methods, (Answer(None),) * len(perturbed))
    trick = robustness(plain, perturbed, right, silent)["alora"]["instruction"]
    assert (trick.flips, trick.right_before, trick.right_after) == (0, TRICKED, 0)
