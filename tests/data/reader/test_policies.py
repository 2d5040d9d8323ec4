"""The label of a conversation under a policy follows from both, and from neither alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from data.reader.policies import Composer, Unit, split_of
from data.reader.topics import SMALL_TALK, Family, Labelled, LabelledTurn
from guard.conversation.example import SPLITS

TOPICS = [f"topic{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
ASKS = [["ask about", "asks about"]]
FAMILY = Family("toys", ASKS, {name: [name] for name in TOPICS}, is_complete=True)
SMALL_TALK_IS_FINE = ("Greetings", "Small talk")
ONLY = ("may only", "alone", "handles these", "anything but", "is not about")
ALLOWS = (" is no violation", " are no violation", "It is allowed to", "This does not cover")


def conversation(*names: str) -> Labelled:
    turns = [LabelledTurn("user", f"say {name}", frozenset({name})) for name in names]
    return Labelled(tuple(turns), frozenset(TOPICS), "/".join(names))


ROWS = [conversation(name) for name in TOPICS]
ROWS += [conversation(first, second) for first, second in zip(TOPICS, TOPICS[3:], strict=False)]
ROWS += [conversation(name, SMALL_TALK) for name in TOPICS[::4]]


def units(split: str, seed: int = 0) -> list[Unit]:
    composer = Composer(FAMILY, random.Random(seed))
    written = [composer.unit(ROWS, split) for _ in range(400)]
    return [unit for unit in written if unit is not None]


def violates(said: Sequence[str], policy: str) -> bool:
    """What a careful person decides, who knows the wordings of `words.yaml`."""
    counted = said[-1:] if "last message" in policy or "latest message" in policy else said
    topics = [name for name in counted if name != SMALL_TALK]
    rule = policy
    for mark in (*ALLOWS, *SMALL_TALK_IS_FINE):
        sentences = rule.split(". ")
        rule = ". ".join(sentence for sentence in sentences if mark.strip() not in sentence)
    named = [name for name in topics if name in rule]
    is_demand = any(word in policy for word in ("must ask", "does not ask", "has to", "only a "))
    is_only = any(
        word in policy
        for word in ("may only", "alone", "handles these", "anything but", "is not about")
    )
    if is_demand:
        return not named
    if is_only:
        return len(named) < len(topics)
    return bool(named)


def test_every_label_is_what_a_reader_of_both_decides() -> None:
    checked = 0
    for unit in units("train"):
        for turns, labels in zip(unit.conversations, unit.labels, strict=True):
            said = [next(iter(turn.topics)) for turn in turns if turn.role == "user"]
            for policy, label in zip(unit.policies, labels, strict=True):
                assert violates(said, policy) == bool(label), (said, policy, label)
                checked += 1
    assert checked > 1000


def test_neither_a_conversation_nor_a_policy_tells_the_label_alone() -> None:
    for unit in units("train"):
        assert all(
            sum(row[place] for row in unit.labels) == 1 for place in range(len(unit.policies))
        )
        if len(unit.policies) == 2:
            assert [sum(labels) for labels in unit.labels] == [1, 1]


def test_what_a_split_s_policies_name_is_named_in_no_other_split() -> None:
    named: dict[str, set[str]] = {}
    for split in SPLITS:
        texts = " ".join(policy for unit in units(split) for policy in unit.policies)
        named[split] = {name for name in TOPICS if name in texts}
        assert named[split] <= {name for name in TOPICS if split_of(FAMILY, name) == split}
        assert named[split]


def test_the_same_seed_writes_the_same() -> None:
    assert units("train") == units("train") != units("train", seed=1)
