"""What a rule's validation rows cover: see `guard/coverage.py`. Knows nothing of models."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.stats import nct, norm

from data.long_turns import SHORTEST, LongTurns, long_length
from guard.conversation.example import Example
from guard.coverage import (
    WORD_BITS,
    ConversationForm,
    Coverage,
    SureAllow,
    packed_words,
    word_hash,
    words_of,
)
from guard.rule import Rule

USUAL_SHARE = 0.99  # of the validation rows have no more unknown words than are covered
MISSED_SHARE, CERTAINTY = 0.01, 0.95  # of violating rows below the logit of a sure "allow"
FEWEST_VIOLATING = 5  # rows from which that logit is computed
LONG_ROWS = 100  # violating validation rows that are written with a long turn
REACHING = 10  # of them reach the length that is covered


def long_rows(rule: Rule, validation: Sequence[Example]) -> list[Example]:
    """Violating validation rows with a long turn: LONG_ROWS, or as many as there are."""
    rng = random.Random(f"{rule.id}/long validation rows")
    violating = [example for example in validation if example.label]
    writer = LongTurns(rule, validation)
    rows: list[Example] = []
    for number, example in enumerate(rng.sample(violating, min(LONG_ROWS, len(violating)))):
        place = writer.places[number % len(writer.places)]
        row = writer.written(example, place, long_length(rng), rng)
        if row is not None:
            rows.append(row)
    return rows


def coverage(
    training: Sequence[Example],
    validation: Sequence[Example],
    logits: Sequence[float],
    long: Sequence[Example],
    long_logits: Sequence[float],
) -> Coverage:
    """What validation rows and violating rows with a long turn cover, from their logits in nats."""
    known = known_words(message.content for row in training for message in row.messages)
    forms = [ConversationForm(row.messages) for row in validation]
    shares = [form.unknown_share(known) for form in forms]
    long_forms = [ConversationForm(row.messages) for row in long]
    violating = [logit for row, logit in zip(validation, logits, strict=True) if row.label]
    lengths: list[SureAllow] = []
    for characters, class_logits in (
        (SHORTEST, violating),
        (_reached([form.longest_turn for form in long_forms]), long_logits),
    ):
        logit = sure_logit(class_logits)
        if logit is not None:
            lengths.append(SureAllow(turn_characters=characters, logit=logit))
    return Coverage(
        characters=_reached([form.characters for form in (*forms, *long_forms)]),
        unknown_share=float(np.quantile(shares, USUAL_SHARE)),
        words=packed_words(known),
        lengths=tuple(lengths),
    )


def known_words(texts: Iterable[str]) -> np.ndarray:
    """Which hashes are of words of the texts, [2^WORD_BITS] bool."""
    known = np.zeros(1 << WORD_BITS, bool)
    for text in texts:
        known[[word_hash(word) for word in words_of(text)]] = True
    return known


def sure_logit(violating: Sequence[float]) -> float | None:
    """The logit below which an "allow" is sure, from those of violating rows; None where these are
    too few.

    It is the lowest of them, or, where that is lower, the one-sided normal tolerance bound: with
    CERTAINTY at most MISSED_SHARE of such rows are below (Hahn and Meeker, 1991). The fewer rows,
    the lower it is.
    """
    rows = len(violating)
    if rows < FEWEST_VIOLATING:
        return None
    logits = np.asarray(violating, np.float64)
    root = rows**0.5
    factor = nct.ppf(CERTAINTY, rows - 1, norm.ppf(1 - MISSED_SHARE) * root) / root
    return float(min(logits.min(), logits.mean() - factor * logits.std(ddof=1)))


def _reached(lengths: Sequence[int]) -> int:
    """The length that REACHING of the rows reach, or the longest of fewer."""
    longest = sorted(lengths, reverse=True)[:REACHING]
    return min(longest, default=0)
