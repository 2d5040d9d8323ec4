"""Generated situations: the label of a rule follows from who does what."""

import random
import re

from train.tiny.situations import Heard, Turn, messages, question, situation

from guard.example import Message
from guard.rule import load_rule
from train.tiny import situations


def test_questions_are_about_half_violated() -> None:
    rng = random.Random(0)
    labels = [question(situation(rng.randint(2, 12), rng), rng).label for _ in range(600)]
    assert 0.4 < sum(labels) / len(labels) < 0.6


def test_a_rule_on_an_exact_act_is_violated_only_by_its_speaker_act_and_phrase() -> None:
    turns = [
        Turn("assistant", "promise", "pets", "feed the puppy", "i promise to feed the puppy"),
        Turn("user", "refuse", "pets", "feed the puppy", "i won't feed the puppy"),
    ]
    rng = random.Random(1)
    asked = {question(turns, rng) for _ in range(300)}
    for one in asked:
        user, text = (
            one.rule_text.startswith(("The user", "The customer", "The human")),
            one.rule_text,
        )
        if re.search(r"promise to feed the puppy", text):
            assert one.label == (0 if user else 1), one
        if re.search(r"(refuse|decline) to feed the puppy", text):
            assert one.label == (
                0 if text.startswith(("The assistant", "The agent", "The bot")) else 1
            ), one
    assert {one.label for one in asked} == {0, 1}


def test_a_quoted_act_is_not_the_speakers_own() -> None:
    turns = [Turn("user", "insult", None, None, "he said 'you must be an idiot'", quoted=True)]
    rng = random.Random(2)
    asked = [question(turns, rng) for _ in range(100)]
    assert all(
        one.label == 0 for one in asked if "insult" in one.rule_text or "abusive" in one.rule_text
    )


def test_no_situation_touches_the_domains_of_the_served_rules() -> None:
    served = re.compile(
        r"medic|doctor|diagnos|symptom|jailbreak|system prompt|refund|social security|phone number|address",
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
    turns = [
        Turn("user", "joke", None, None, "knock knock"),
        Turn("user", "sad", None, None, "i feel low."),
        Turn("assistant", "praise", None, None, "good"),
    ]
    said, heard = messages(turns)
    assert said == [Message("user", "knock knock. i feel low."), Message("assistant", "good")]
    assert heard == [
        [
            Heard("knock knock.", "joke", None, False),
            Heard("knock knock. i feel low.", "sad", None, False),
        ],
        [Heard("good", "praise", None, False)],
    ]
