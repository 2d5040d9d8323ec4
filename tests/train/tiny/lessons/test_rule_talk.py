"""Conversations from the phrase books: seen phrasings only, answers that follow from the acts, no
rule's own question.
"""

import random

import pytest

from data.generator.library import load_corpus
from data.generator.phrasebook import cores_of, line_id
from guard.prompt.decoder import ROLE_LABELS
from guard.rule import load_rule
from train.tiny.lessons.rule_talk import OTHER, QUESTIONS, SPEAKERS, LessonDraft, RuleTalk

RULES = [load_rule(name) for name in ("medical_advice", "prompt_injection", "jailbreak_attempt")]


@pytest.fixture(scope="module")
def talk() -> RuleTalk:
    return RuleTalk(RULES)


def performed_in(draft: LessonDraft) -> set[tuple[str, str]]:
    """Who performs which act, as a rule names it."""
    performed = set()
    for message, labels in zip(draft.messages, draft.act_labels, strict=True):
        for label in labels:
            if label.act != OTHER:
                performed.add((message.role, label.act.rpartition("/")[2].replace("_", " ")))
    return performed


def acts_of(draft: LessonDraft) -> list[str]:
    acts = []
    for labels in draft.act_labels:
        acts += [label.act for label in labels]
    return acts


def test_an_answer_follows_from_who_does_what(talk: RuleTalk) -> None:
    rng = random.Random(0)
    role_of = {name: role for role, names in SPEAKERS.items() for name in names}
    labels = []
    for _ in range(60):
        for draft in talk.pair(150, rng):
            performed = performed_in(draft)
            assert performed, "every conversation has an act"
            assert len(draft.questions) == QUESTIONS
            for question in draft.questions:
                who = next(
                    name
                    for name in sorted(role_of, key=len, reverse=True)
                    if question.rule_text.startswith(name + " ")
                )
                is_performed = any(
                    role == role_of[who] and question.rule_text.endswith(f" {act}.")
                    for role, act in performed
                )
                assert question.label == is_performed, (question, performed)
                labels.append(question.label)
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_the_two_of_a_pair_differ_in_what_is_done(talk: RuleTalk) -> None:
    rng = random.Random(1)
    for _ in range(20):
        violating, allowed = talk.pair(120, rng)
        assert violating.messages != allowed.messages
        assert acts_of(violating) != acts_of(allowed)


def test_only_phrasings_of_the_training_pool_are_written(talk: RuleTalk) -> None:
    """A held-out core's identity never comes up; the pools are those of the data."""
    rng = random.Random(2)
    corpus = load_corpus(RULES[0], RULES)
    unseen: set[str] = set()
    seen: set[str] = set()
    for act in corpus.book.acts.values():
        unseen.update(map(line_id, cores_of(act.cores, "unseen")))
        seen.update(map(line_id, cores_of(act.cores, "seen")))
    assert unseen
    assert not unseen & seen
    for writer in talk._writers:
        assert writer.pool == "seen"
        assert writer.exchanges.pool == "seen"
    for _ in range(20):
        for draft in talk.pair(400, rng):
            assert set(acts_of(draft)) <= set(talk.acts)


def test_long_conversations_hold_many_acts_and_every_speaker(talk: RuleTalk) -> None:
    rng = random.Random(3)
    acts = []
    roles = set()
    for _ in range(15):
        for draft in talk.pair(800, rng):
            acts.append(sum(act != OTHER for act in acts_of(draft)))
            roles |= {message.role for message in draft.messages}
    assert sum(acts) / len(acts) > 3
    assert roles == set(ROLE_LABELS)


def test_no_rules_own_question_is_asked(talk: RuleTalk) -> None:
    rng = random.Random(4)
    titles = {rule.title for rule in RULES}
    for _ in range(100):
        for draft in talk.pair(80, rng):
            assert not titles & {question.rule_text for question in draft.questions}
