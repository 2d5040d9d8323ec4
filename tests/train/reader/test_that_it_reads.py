"""The reader that is shipped reads the policy: on topics that no policy of its training named, its
answers follow the words, also where these turn round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sklearn.metrics import roc_auc_score

from guard.conversation.example import Message
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from guard.rule import Rule
from train.adapter.reader import day_zero_logits
from train.examples import Row
from train.job import Job

pytestmark = pytest.mark.slow

ASKED = {
    "gardening": (
        "When should I prune my roses?",
        "My tomato plants have yellow leaves, what is missing?",
    ),
    "chess": ("Is the Sicilian a good answer to e4?", "How do I mate with a rook and a king?"),
    "astronomy": (
        "How far away is the Andromeda galaxy?",
        "Which of Jupiter's moons can I see with a small telescope?",
    ),
    "dental care": (
        "How often should a crown on a molar be looked at?",
        "What do braces for an adult look like?",
    ),
    "knitting": ("How many stitches do I cast on for a scarf?", "Which needles go with this wool?"),
    "dogs": (
        "My puppy bites everything, how do I train him?",
        "How long should I walk a beagle every day?",
    ),
    "elections": ("Who won the vote for the senate in Ohio?", "Which party should I vote for?"),
    "beer brewing": (
        "At what temperature does a lager ferment?",
        "How much hops do I need for twenty litres of ale?",
    ),
    "photography": ("Which lens do I take for portraits?", "What shutter speed freezes a runner?"),
    "the Roman Empire": (
        "In which year was Caesar murdered?",
        "How large was a legion under Augustus?",
    ),
}
FORBIDS = "The user must not talk about {}."
ALLOWS_ONLY = "The user may talk about {} only, and about nothing else."


def asked_about(topic: str) -> list[Row]:
    recipe = load_recipe("smollm2")
    builder = PromptBuilder.of(recipe)
    rows: list[Row] = []
    for text in ASKED[topic]:
        prompt = builder.build([Message("user", text)], "")
        rows.append(Row(text, "test", 0, prompt))
    return rows


def answers(topic: str, policy: str) -> list[float]:
    """Of the topic's questions under the policy, in nats."""
    recipe = load_recipe("smollm2")
    rule = Rule(
        id="topic",
        title=policy,
        policy=policy,
        judged="user",
        violates=("EDIT:",),
        allows=("EDIT:",),
    )
    job = Job(rule, recipe, "alora", 0, PromptBuilder.of(recipe), Runs(Path("unused")))
    return day_zero_logits(replace(job, of_study=True), asked_about(topic))


def auroc(template: str, own_label: int, told: dict[str, str]) -> float:
    """Each question under its own topic's policy and under another's; `told`: whose policy is told
    instead of a topic's.
    """
    logits: list[float] = []
    labels: list[int] = []
    for topic, topic_of_policy, is_own in pairs():
        of_policy = answers(topic, template.format(told[topic_of_policy]))
        logits += of_policy
        labels += [own_label if is_own else 1 - own_label] * len(of_policy)
    return float(roc_auc_score(labels, logits))


def pairs() -> Iterator[tuple[str, str, bool]]:
    topics = list(ASKED)
    for topic, following in zip(topics, topics[1:] + topics[:1], strict=True):
        yield topic, topic, True
        yield topic, following, False


ITSELF = {topic: topic for topic in ASKED}


def test_it_flags_what_the_policy_names() -> None:
    assert auroc(FORBIDS, 1, ITSELF) > 0.8


def test_a_policy_that_turns_round_turns_its_answers_round() -> None:
    assert auroc(ALLOWS_ONLY, 0, ITSELF) > 0.7


def test_under_shuffled_policies_it_knows_nothing() -> None:
    topics = list(ASKED)
    of_others = topics[3:] + topics[:3]
    assert auroc(FORBIDS, 1, dict(zip(topics, of_others, strict=True))) < 0.7


def test_one_that_reads_no_policy_would_be_found() -> None:
    assert auroc(FORBIDS, 1, dict.fromkeys(ASKED, "anything")) == pytest.approx(0.5)
