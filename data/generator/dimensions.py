"""What is sampled about a group before a word of it is written. Knows nothing of phrases beyond the acts' names.

Every dimension is drawn on its own. Only the two acts depend on each other: the phrase book must know something that
the other speaker can say in an exchange with either of them (`Phrasebook.shared`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.generator.phrasebook import Corpus, Phrasebook
from data.generator.registers import ASSISTANT_REGISTERS, USER_REGISTERS
from data.generator.tricks import tricks_for

SHORTEST, LONGEST = (
    50,
    1950,
)  # tokens; the estimate of an exchange's length may be a few per cent too low
LOG_MEAN, LOG_SPREAD = (
    math.log(80),
    1.2,
)  # of the length's normal distribution in log space, before it is cut to the bounds
UNRELATED = "unrelated"  # the allowed act of a conversation that does not touch the rule at all
UNRELATED_SHARE = 0.08
TRICK_SHARE = 0.15  # of the groups, whose target is written so as to mislead a judge

Severity = Literal["plain", "hedged", "buried"]
Position = Literal["early", "middle", "late"]
Difficulty = Literal["easy", "boundary", "adversarial"]
SEVERITIES: tuple[Severity, ...] = ("plain", "hedged", "buried")
POSITIONS: tuple[Position, ...] = ("early", "middle", "late")


@dataclass(frozen=True)
class Dimensions:
    """Everything that is sampled about a group before a word of it is written."""

    violating_act: str
    allowed_act: str
    domain: str
    severity: Severity
    position: Position
    hard_negatives: int  # further allowed acts of the same rule in both conversations
    distractors: int  # acts of other rules in both conversations
    user_register: str
    assistant_register: str
    has_system: bool
    target_tokens: int
    trick: str | None  # of `data/generator/tricks.py`, played on the target in both conversations

    @property
    def difficulty(self) -> Difficulty:
        """`adversarial` with a trick; `easy` where the target is plain and nothing around it is about a rule; else `boundary`."""
        if self.trick:
            return "adversarial"
        return (
            "easy"
            if self.severity == "plain" and not self.hard_negatives and not self.distractors
            else "boundary"
        )


def sample_dimensions(corpus: Corpus, groups: int, rng: random.Random) -> list[Dimensions]:
    """The dimensions of `groups` groups; acts come in balanced rounds so that none is rare."""
    domains = corpus.book.domains or tuple(corpus.background.domains)
    rows = []
    for violating, allowed in _pairs_of_acts(corpus, groups, rng):
        tokens = sample_length(rng)
        room = tokens // 120  # how many exchanges of interest fit besides the target
        rows.append(
            Dimensions(
                violating_act=violating,
                allowed_act=UNRELATED if rng.random() < UNRELATED_SHARE else allowed,
                domain=rng.choice(domains),
                severity=rng.choice(SEVERITIES if tokens > 110 else SEVERITIES[:2]),
                position=rng.choice(POSITIONS),
                hard_negatives=rng.randint(0, min(3, room)),
                distractors=rng.randint(0, min(3, room)) if corpus.book.wanders else 0,
                user_register=rng.choice(list(USER_REGISTERS)),
                assistant_register=rng.choice(list(ASSISTANT_REGISTERS)),
                has_system=tokens > 80 and rng.random() < 0.25,
                target_tokens=tokens,
                trick=rng.choice(tricks_for(corpus.rule)) if rng.random() < TRICK_SHARE else None,
            )
        )
    return rows


def sample_length(rng: random.Random) -> int:
    """A conversation length in tokens: log-normal, cut to SHORTEST..LONGEST (median about 130, mean about 220)."""
    while True:
        tokens = round(math.exp(rng.gauss(LOG_MEAN, LOG_SPREAD)))
        if SHORTEST <= tokens <= LONGEST:
            return tokens


def _pairs_of_acts(corpus: Corpus, groups: int, rng: random.Random) -> list[tuple[str, str]]:
    """A violating and an allowed act for every group, both in rounds; an act without a partner waits for the next one."""
    violating, allowed = corpus.acts(violating=True), corpus.acts(violating=False)
    waiting: list[str] = []
    pairs = []
    for other in _rounds(allowed, groups, rng):
        if not _partners(corpus.book, waiting, other):
            waiting += rng.sample(violating, len(violating))
        one = _partners(corpus.book, waiting, other)[0]
        waiting.remove(one)
        pairs.append((one, other))
    return pairs


def _partners(book: Phrasebook, violating: Sequence[str], allowed: str) -> list[str]:
    return [name for name in violating if book.shared(name, allowed)]


def _rounds(names: Sequence[str], length: int, rng: random.Random) -> list[str]:
    """`length` names, every name as often as every other, in random order."""
    rounds = [
        name
        for _ in range(length // len(names) + 1)
        for name in rng.sample(list(names), len(names))
    ]
    return rounds[:length]
