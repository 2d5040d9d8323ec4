"""Words as heads count them: n-grams of token ids, TF-IDF. Knows nothing of models or labels.

An n-gram is one token or two that follow one another. Made of token ids, it costs no tokenising of
its own, and training and serving cannot disagree on what a word is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.intp]
# A key has the first token's id in its low bits, above it the second's plus one, or 0 for none.
SECOND_BITS = np.uint64(32)
FEWEST_TEXTS = 2  # an n-gram in fewer is not learnt
MOST_NGRAMS = 2**16  # of a vocabulary: the n-grams in the most texts


class NgramRows(NamedTuple):
    """The n-grams of several texts, an entry for each n-gram of each text. `rows` [entries] is the
    text's index, `frequencies` [entries] is 1 + the logarithm of how often the n-gram occurs in it.
    """

    keys: Keys
    rows: Numbers
    frequencies: npt.NDArray[np.float64]
    texts: int


def ngram_rows(texts: Sequence[Sequence[int]]) -> NgramRows:
    keys, rows, counts = [np.empty(0, np.uint64)], [np.empty(0, np.intp)], [np.empty(0, np.intp)]
    for row, text in enumerate(texts):
        tokens = np.asarray(text, np.uint64)
        pairs = tokens[:-1] | ((tokens[1:] + np.uint64(1)) << SECOND_BITS)
        distinct, times = np.unique(np.concatenate([tokens, pairs]), return_counts=True)
        keys.append(distinct)
        rows.append(np.full(len(distinct), row, np.intp))
        counts.append(times)
    entries = np.concatenate(keys)
    order = np.argsort(entries)  # vocabularies are searched faster in order
    frequencies = 1 + np.log(np.concatenate(counts)[order])
    return NgramRows(entries[order], np.concatenate(rows)[order], frequencies, len(texts))


class TfIdf(NamedTuple):
    """A sparse matrix [texts, n-grams] by its entries, each row of length 1 or 0."""

    rows: Numbers
    ngrams: Numbers
    values: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NgramVocabulary:
    """The n-grams that a head knows, and how informative each is.

    `keys` [n-grams] ascending; `idf` [n-grams] float32, the inverse document frequency.
    """

    keys: Keys
    idf: npt.NDArray[np.float32]

    @classmethod
    def of(cls, documents: Sequence[NgramRows]) -> NgramVocabulary:
        """At most MOST_NGRAMS, of FEWEST_TEXTS documents or more and not of all."""
        document_keys = [np.empty(0, np.uint64)]
        document_keys += [np.unique(document.keys) for document in documents]
        keys, times = np.unique(np.concatenate(document_keys), return_counts=True)
        informative = np.flatnonzero((times >= FEWEST_TEXTS) & (times < len(documents)))
        commonest = informative[np.argsort(-times[informative], kind="stable")[:MOST_NGRAMS]]
        chosen = np.sort(commonest)
        idf = np.log((1 + len(documents)) / (1 + times[chosen])) + 1
        return cls(keys[chosen], idf.astype(np.float32))

    def tfidf(self, texts: NgramRows) -> TfIdf:
        ngrams = np.searchsorted(self.keys, texts.keys)
        is_known = ngrams < len(self.keys)
        is_known[is_known] = self.keys[ngrams[is_known]] == texts.keys[is_known]
        ngrams, rows = ngrams[is_known], texts.rows[is_known]
        values = texts.frequencies[is_known] * self.idf[ngrams]
        lengths = np.sqrt(np.bincount(rows, values**2, minlength=texts.texts))
        return TfIdf(rows, ngrams, values / lengths[rows])
