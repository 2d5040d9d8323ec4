"""What is sampled about a group before a word of it is written.

Every dimension is drawn on its own. Only the two acts depend on each other: the other speaker must
have something to say around either (`Phrasebook.shared`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from data.generator.phrasebook import Corpus
from data.generator.registers import ASSISTANT_REGISTERS, USER_REGISTERS
from data.generator.tricks import tricks_for

# Tokens; the estimate of an exchange's length may be a few per cent too low.
SHORTEST = 50
LONGEST = 1950
# Mean and spread of the length's logarithm, before it is cut to the bounds.
LOG_MEAN = math.log(80)
LOG_SPREAD = 1.2
UNRELATED = "unrelated"  # the allowed act of a conversation that does not touch the rule at all
UNRELATED_SHARE = 0.08
TRICK_SHARE = 0.15  # the share of groups whose target is written to mislead a judge

Severity = Literal["plain", "hedged", "buried"]
TargetPosition = Literal["early", "middle", "late"]
Difficulty = Literal["easy", "boundary", "adversarial"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
POSITIONS: tuple[TargetPosition, ...] = get_args(TargetPosition)


@dataclass(frozen=True)
class Dimensions:
    """What both conversations of a group have in common, and their two acts."""

    violating_act: str
    allowed_act: str
    domain: str
    severity: Severity
    position: TargetPosition
    # Further acts of the same rule in both conversations: allowed ones, or any acts for a rule on
    # the last turn, as a violation before that turn is allowed.
    hard_negatives: int
    distractors: int  # acts of other rules in both conversations
    user_register: str
    assistant_register: str
    has_system: bool
    target_tokens: int
    trick: str | None  # of `data/generator/tricks.py`, played on the target in both conversations

    @property
    def difficulty(self) -> Difficulty:
        """`easy`: the target is plain, and nothing around it is about a rule."""
        if self.trick:
            return "adversarial"
        if self.severity == "plain" and not self.hard_negatives and not self.distractors:
            return "easy"
        return "boundary"


def sample_dimensions(corpus: Corpus, groups: int, rng: random.Random) -> list[Dimensions]:
    """The dimensions of `groups` groups; acts come in balanced rounds so that none is rare."""
    pairs = _pairs_of_acts(corpus, groups, rng)
    return [_sampled(corpus, violating, allowed, rng) for violating, allowed in pairs]


def _sampled(corpus: Corpus, violating: str, allowed: str, rng: random.Random) -> Dimensions:
    """The order of the draws is part of the data: another one writes other conversations."""
    tokens = sample_length(rng)
    severities = SEVERITIES
    if tokens <= 110:  # no room to bury a core in
        severities = SEVERITIES[:2]
    most_beside = min(3, tokens // 120)
    tricks = tricks_for(corpus.rule)
    if rng.random() < UNRELATED_SHARE and corpus.rule.turns == "any":
        allowed = UNRELATED
    return Dimensions(
        violating_act=violating,
        allowed_act=allowed,
        domain=rng.choice(corpus.book.domains or tuple(corpus.background.domains)),
        severity=rng.choice(severities),
        position=rng.choice(POSITIONS),
        hard_negatives=rng.randint(0, most_beside),
        distractors=0 if corpus.rule.depends_on_context else rng.randint(0, most_beside),
        user_register=rng.choice(list(USER_REGISTERS)),
        assistant_register=rng.choice(list(ASSISTANT_REGISTERS)),
        has_system=tokens > 80 and rng.random() < 0.25,
        target_tokens=tokens,
        trick=rng.choice(tricks) if rng.random() < TRICK_SHARE else None,
    )


def sample_length(rng: random.Random) -> int:
    """A conversation length in tokens: log-normal, cut (median about 130, mean about 220)."""
    while True:
        tokens = round(math.exp(rng.gauss(LOG_MEAN, LOG_SPREAD)))
        if SHORTEST <= tokens <= LONGEST:
            return tokens


def _pairs_of_acts(corpus: Corpus, groups: int, rng: random.Random) -> list[tuple[str, str]]:
    """A violating and an allowed act for every group, in rounds; what fits none waits."""
    violating = corpus.acts(violating=True)
    waiting: list[str] = []
    pairs = []
    allowed_acts = [
        act for act in corpus.acts(violating=False) if _partners(corpus, violating, act)
    ]
    for allowed in _rounds(allowed_acts, groups, rng):
        if not _partners(corpus, waiting, allowed):
            waiting += rng.sample(violating, len(violating))
        partner = _partners(corpus, waiting, allowed)[0]
        waiting.remove(partner)
        pairs.append((partner, allowed))
    return pairs


def _partners(corpus: Corpus, violating: Sequence[str], allowed: str) -> list[str]:
    """The violating acts that fit beside `allowed`; on the last turn one speaker has both."""
    book = corpus.book
    partners = [name for name in violating if book.shared(name, allowed)]
    if corpus.rule.turns == "any":
        return partners
    speaker = book.acts[allowed].speaker
    return [name for name in partners if book.acts[name].speaker == speaker]


def _rounds(names: Sequence[str], length: int, rng: random.Random) -> list[str]:
    rounds: list[str] = []
    for _ in range(length // len(names) + 1):
        rounds += rng.sample(list(names), len(names))
    return rounds[:length]
