"""The words of a conversation: frequencies of its tokens and of pairs of them, for heads. Knows
nothing of models or of whose turns they are.

A key is an n-gram: of one token id or of two that follow one another in a turn. Those of the last
turn are counted a second time under keys of their own, as what is said last often decides. Made of
token ids, they cost no tokenising of their own, and training and serving cannot disagree on what a
word is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
# A key: the first token's id, behind it that of the second plus one or 0, then whether it is the
# last turn's.
SECOND_BITS = np.uint64(31)
LAST_TURN = np.uint64(1) << np.uint64(63)
FEWEST_ROWS = 2  # that an n-gram is found in, or it is not learnt


class Ngrams(NamedTuple):
    """What n-grams a conversation has: distinct ascending keys, and of each 1 + the logarithm of
    how often it stands there, float64 [keys].
    """

    keys: Keys
    frequencies: npt.NDArray[np.float64]


def ngrams_of(turns: Sequence[Sequence[int]]) -> Ngrams:
    """Of a conversation's turns, as token ids below 2^31."""
    keys = [_keys(turn) for turn in turns]
    if turns:
        keys.append(keys[-1] | LAST_TURN)
    else:
        keys.append(np.empty(0, np.uint64))
    distinct, counts = np.unique(np.concatenate(keys), return_counts=True)
    return Ngrams(distinct, 1 + np.log(counts))


def _keys(turn: Sequence[int]) -> Keys:
    """One token alone, and pairs of neighbours: [2 tokens - 1]."""
    tokens = np.asarray(turn, np.uint64)
    pairs = tokens[:-1] | ((tokens[1:] + np.uint64(1)) << SECOND_BITS)
    return np.concatenate([tokens, pairs])


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The n-grams that a head knows, and how telling each is.

    `keys` [n-grams] ascending; `idf` [n-grams] float32, the inverse document frequency.
    """

    keys: Keys
    idf: npt.NDArray[np.float32]

    @classmethod
    def of(cls, rows: Sequence[Ngrams]) -> Vocabulary:
        """The n-grams of FEWEST_ROWS rows and more that are not in all, with the smooth idf of
        scikit-learn's TfidfTransformer.
        """
        keys, rows_with = np.unique(np.concatenate([row.keys for row in rows]), return_counts=True)
        tells = (rows_with >= FEWEST_ROWS) & (rows_with < len(rows))
        idf = np.log((1 + len(rows)) / (1 + rows_with[tells])) + 1
        return cls(keys[tells], idf.astype(np.float32))

    def tfidf(self, row: Ngrams) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Which of the n-grams a row has, and their TF-IDF, of length 1."""
        indices = np.searchsorted(self.keys, row.keys)
        found = indices < len(self.keys)
        found[found] = self.keys[indices[found]] == row.keys[found]
        indices = indices[found]
        values = row.frequencies[found] * self.idf[indices]
        length = math.sqrt(values @ values)
        if length > 0:
            values /= length
        return indices, values
