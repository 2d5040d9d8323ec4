"""Conversations from the phrase books: seen phrasings only, answers that follow from the acts, no rule's own question."""

import random

import pytest
from train.tiny.rule_talk import OTHER, QUESTIONS, SPEAKERS, RuleTalk

from data.generator.library import load_corpus
from data.generator.phrasebook import cores_of, line_id
from guard.prompt import LABELS
from guard.rule import load_rule

RULES = [load_rule(name) for name in ("medical_advice", "prompt_injection", "jailbreak_attempt")]


@pytest.fixture(scope="module")
def talk() -> RuleTalk:
    return RuleTalk(RULES)


def test_an_answer_follows_from_who_does_what(talk: RuleTalk) -> None:
    rng = random.Random(0)
    role_of = {name: role for role, names in SPEAKERS.items() for name in names}
    labels = []
    for _ in range(60):
        for messages, questions, heard in talk.pair(150, rng):
            done = {
                (message.role, one.act.rpartition("/")[2].replace("_", " "))
                for message, here in zip(messages, heard, strict=True)
                for one in here
                if one.act != OTHER
            }
            assert done, "every conversation has an act"
            assert len(questions) == QUESTIONS
            for asked in questions:
                who = next(
                    name
                    for name in sorted(role_of, key=len, reverse=True)
                    if asked.rule_text.startswith(name + " ")
                )
                said = any(
                    role == role_of[who] and asked.rule_text.endswith(f" {act}.")
                    for role, act in done
                )
                assert asked.label == said, (asked, done)
                labels.append(asked.label)
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_the_two_of_a_pair_differ_in_what_is_done(talk: RuleTalk) -> None:
    rng = random.Random(1)
    for _ in range(20):
        (one, _, acts), (other, _, other_acts) = talk.pair(120, rng)
        assert one != other
        assert [here[0].act for here in acts if here] != [
            here[0].act for here in other_acts if here
        ]


def test_only_phrasings_of_the_training_pool_are_written(talk: RuleTalk) -> None:
    """A held-out core's identity never comes up; the pools are those of the data."""
    rng = random.Random(2)
    corpus = load_corpus(RULES[0], RULES)
    unseen = {
        line_id(core) for act in corpus.book.acts.values() for core in cores_of(act.cores, "unseen")
    }
    seen = {
        line_id(core) for act in corpus.book.acts.values() for core in cores_of(act.cores, "seen")
    }
    assert unseen
    assert not unseen & seen
    for writer in talk._writers:
        assert writer.pool == "seen"
        assert writer.exchanges.pool == "seen"
    for _ in range(20):
        for _, _, heard in talk.pair(400, rng):
            assert {one.act for here in heard for one in here} <= set(talk.acts)


def test_long_conversations_hold_many_acts_and_every_speaker(talk: RuleTalk) -> None:
    rng = random.Random(3)
    acts, roles = [], set()
    for _ in range(15):
        for messages, _, heard in talk.pair(800, rng):
            acts.append(sum(one.act != OTHER for here in heard for one in here))
            roles |= {message.role for message in messages}
    assert sum(acts) / len(acts) > 3
    assert roles == set(LABELS)


def test_no_rules_own_question_is_asked(talk: RuleTalk) -> None:
    rng = random.Random(4)
    asked = {
        one.rule_text
        for _ in range(100)
        for _, questions, _ in talk.pair(80, rng)
        for one in questions
    }
    assert not asked & {rule.title for rule in RULES}
