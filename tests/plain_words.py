"""What the words of a conversation say to a head, by loops and dictionaries. Tests only."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


def plain_word_logit(tensors: Mapping[str, np.ndarray], turns: Sequence[Sequence[int]]) -> float:
    """Of the turns that count, as token ids, under the tensors of a head's file."""
    counts: Counter[int] = Counter()
    for turn in turns:
        counts.update(_plain_keys(turn))
    for turn in turns[-1:]:
        counts.update(2**63 + key for key in _plain_keys(turn))
    known = {int(key): number for number, key in enumerate(tensors["ngrams"])}
    total, squares = 0.0, 0.0
    for key, count in counts.items():
        if key in known:
            tfidf = (1 + math.log(count)) * float(tensors["ngram_idf"][known[key]])
            total += tfidf * float(tensors["ngram_weights"][known[key]])
            squares += tfidf**2
    if squares == 0:
        return 0.0
    return total / math.sqrt(squares)


def _plain_keys(turn: Sequence[int]) -> list[int]:
    pairs = [first + (second + 1) * 2**31 for first, second in itertools.pairwise(turn)]
    return [*turn, *pairs]
