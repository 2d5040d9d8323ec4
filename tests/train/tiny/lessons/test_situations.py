"""Generated situations: the label of a rule follows from who does what."""

import random
import re

from guard.conversation.example import Message
from guard.rule import load_rule
from train.tiny.lessons import situations
from train.tiny.lessons.situations import ActLabel, Utterance, messages, question, situation


def test_questions_are_about_half_violated() -> None:
    rng = random.Random(0)
    labels = [question(situation(rng.randint(2, 12), rng), rng).label for _ in range(600)]
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_a_rule_on_an_exact_act_is_violated_only_by_its_speaker_act_and_phrase() -> None:
    utterances = [
        Utterance("assistant", "promise", "pets", "feed the puppy", "i promise to feed the puppy"),
        Utterance("user", "refuse", "pets", "feed the puppy", "i won't feed the puppy"),
    ]
    rng = random.Random(1)
    questions = {question(utterances, rng) for _ in range(300)}
    for drawn in questions:
        text = drawn.rule_text
        if re.search(r"promise to feed the puppy", text):
            assert drawn.label == (not text.startswith(situations.WHO["user"])), drawn
        if re.search(r"(refuse|decline) to feed the puppy", text):
            assert drawn.label == (not text.startswith(situations.WHO["assistant"])), drawn
    assert {drawn.label for drawn in questions} == {0, 1}


def test_a_quoted_act_is_not_the_speakers_own() -> None:
    utterances = [
        Utterance("user", "insult", None, None, "he said 'you must be an idiot'", quoted=True)
    ]
    rng = random.Random(2)
    for _ in range(100):
        drawn = question(utterances, rng)
        if "insult" in drawn.rule_text or "abusive" in drawn.rule_text:
            assert drawn.label == 0


def test_no_situation_touches_the_domains_of_the_served_rules() -> None:
    served = re.compile(
        r"medic|doctor|diagnos|symptom|jailbreak|system prompt|refund|"
        r"social security|phone number|address",
        re.I,
    )
    for rule in ("medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"):
        assert served.search(load_rule(rule).policy), rule
    lines = (
        situations.TOPICS,
        situations.ACTS,
        situations.OPENINGS,
        situations.CLOSINGS,
        situations.QUOTES,
        situations.SALAD,
    )
    assert not served.search(repr(lines))


def test_what_one_speaker_says_in_a_row_is_one_message() -> None:
    utterances = [
        Utterance("user", "joke", None, None, "knock knock"),
        Utterance("user", "sad", None, None, "i feel low."),
        Utterance("assistant", "praise", None, None, "good"),
    ]
    conversation, act_labels = messages(utterances)
    assert conversation == [
        Message("user", "knock knock. i feel low."),
        Message("assistant", "good"),
    ]
    assert act_labels == [
        [
            ActLabel("knock knock.", "joke", None, False),
            ActLabel("knock knock. i feel low.", "sad", None, False),
        ],
        [ActLabel("good", "praise", None, False)],
    ]
