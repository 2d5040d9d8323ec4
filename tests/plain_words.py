"""Random words of a rule, and what words say of a text, by loops and dictionaries. Tests only."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from guard.method import METHODS, WORDS
from guard.prompt.ngrams import NgramVocabulary
from guard.weights.head import WordWeights


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


def file_of_words(folder: Path) -> Path | None:
    """A head's own file, or the one beside an adapter's weights, if there is one."""
    for file in (folder / METHODS["head"].weights, folder / WORDS):
        if file.is_file():
            return file
    return None


def plain_keys(text: Sequence[int]) -> list[int]:
    """The keys of a text's tokens and pairs, as often as they stand there."""
    pairs = [first + (second + 1) * 2**32 for first, second in itertools.pairwise(text)]
    return [*text, *pairs]


def random_words(rng: np.random.Generator, keys: np.ndarray) -> WordWeights:
    """Of these n-grams, ascending."""
    vocabulary = NgramVocabulary(keys, rng.uniform(1, 3, len(keys)).astype(np.float32))
    return WordWeights(vocabulary, rng.standard_normal(len(keys)).astype(np.float32))
