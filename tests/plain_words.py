"""What the words of a text say to a head, by loops and dictionaries. Tests only."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np


def plain_word_logit(tensors: Mapping[str, np.ndarray], text: Sequence[int]) -> float:
    """Of a text as token ids, under the tensors of a head's file."""
    known = {int(key): number for number, key in enumerate(tensors["ngrams"])}
    total, squares = 0.0, 0.0
    for key, count in Counter(plain_keys(text)).items():
        if key in known:
            tfidf = (1 + math.log(count)) * float(tensors["ngram_idf"][known[key]])
            total += tfidf * float(tensors["ngram_weights"][known[key]])
            squares += tfidf**2
    if squares == 0:
        return 0.0
    return total / math.sqrt(squares)


def plain_keys(text: Sequence[int]) -> list[int]:
    """The keys of a text's tokens and pairs, as often as they stand there."""
    pairs = [first + (second + 1) * 2**32 for first, second in itertools.pairwise(text)]
    return [*text, *pairs]
