"""The text that the bag of words reads of a conversation, and TF-IDF of the n-grams in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

from guard.conversation.example import Example
from guard.prompt.text import visible
from guard.rule import SPEAKERS, Reads

WORD = r"(?u)\w+"


class NgramCounter(Protocol):
    """What `Block` needs of a vectoriser: counts of n-grams, [texts, n-grams]."""

    def fit_transform(self, texts: Sequence[str]) -> csr_matrix:
        """Learn the n-grams of the training texts and count them."""
        ...

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """Count the learnt n-grams."""
        ...


class CharacterCounts:
    """Counts of character 2- to 5-grams within words, padded with a space at a word's edges.

    The counts are those of CountVectorizer(analyzer="char_wb"), but each distinct word is split
    only once.
    """

    def __init__(self) -> None:
        self._grams = CountVectorizer(analyzer="char_wb", ngram_range=(2, 5))

    def fit_transform(self, texts: Sequence[str]) -> csr_matrix:
        """Learn the n-grams of the training texts and count them, [texts, n-grams]."""
        counts, words = _counted_words(texts)
        return counts @ self._grams.fit_transform(words)

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """Count the learnt n-grams, [texts, n-grams], also in words that training does not have."""
        if not any(text.split() for text in texts):
            return csr_matrix((len(texts), len(self._grams.vocabulary_)))
        counts, words = _counted_words(texts)
        return counts @ self._grams.transform(words)


def _counted_words(texts: Sequence[str]) -> tuple[csr_matrix, np.ndarray]:
    """The counts of each word in each text, [texts, words], and the words."""
    words = CountVectorizer(token_pattern=r"\S+")
    return words.fit_transform(texts), words.get_feature_names_out()


def _word_counts(longest: int) -> CountVectorizer:
    return CountVectorizer(token_pattern=WORD, ngram_range=(1, longest))


def _judged_turns(example: Example, reads: Reads) -> list[str]:
    """The turns of the speakers that a rule judges; all turns for the whole conversation."""
    return [turn.content for turn in example.messages if turn.role in SPEAKERS[reads]]


# The parts of a conversation that can be read.
VIEWS: dict[str, Callable[[Example, Reads], list[str]]] = {
    "whole conversation": lambda example, reads: [turn.content for turn in example.messages],
    "judged speaker": _judged_turns,
    "last turn": lambda example, reads: _judged_turns(example, reads)[-1:],
}
BLOCKS: dict[str, Callable[[], NgramCounter]] = {
    "words 1-2": lambda: _word_counts(2),
    "words 1-3": lambda: _word_counts(3),
    "characters 2-5": CharacterCounts,
}
NGRAMS: dict[str, tuple[str, ...]] = {  # by name: the blocks that stand side by side
    "words 1-2": ("words 1-2",),
    "words 1-3": ("words 1-3",),
    "words 1-2 and characters 2-5": ("words 1-2", "characters 2-5"),
}


class Block:
    """TF-IDF of one kind of n-gram, rows of length 1.

    N-grams that only one training text has are dropped, unless that would drop all.
    """

    def __init__(self, name: str, training: Sequence[str]) -> None:
        self._counts = BLOCKS[name]()
        counts = csr_matrix(self._counts.fit_transform(training))
        texts_with = np.bincount(counts.indices, minlength=counts.shape[1])
        self._kept = np.flatnonzero(texts_with >= min(2, texts_with.max()))
        self._weights = TfidfTransformer(sublinear_tf=True)
        self.training = self._weights.fit_transform(counts[:, self._kept])

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """The TF-IDF of the texts, [texts, n-grams], as sparse float64."""
        return self._weights.transform(csr_matrix(self._counts.transform(texts))[:, self._kept])


def text_of(example: Example, view: str, reads: Reads) -> str:
    """The text that the baseline reads of an example, as a reader sees it."""
    return "\n".join(visible(content) for content in VIEWS[view](example, reads))
