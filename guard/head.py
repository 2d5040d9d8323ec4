"""A head: what a rule's logit is, from the states that a frozen base has of a conversation and from
its words. Knows nothing of how either comes about.

    logit = highest over the spans of (weight · state + ngram_weights · TF-IDF of its words) + bias

An encoder has several spans, each a turn or a part of one (`prompt/encoder.py`), so that no words
elsewhere outweigh those of a violation. A decoder has one: its state at the prompt's
end, and the words of the whole conversation. Words are what a bag of words has: on real text it is
as good as many an adapter; states know phrasings that training has not shown.

A head's file is `head.safetensors`: one tensor for each field of `Head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt.ngrams import MOST_NGRAMS, NgramRows, NgramVocabulary, ngram_rows

State = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Head:
    """`weight` [hidden size] and `ngram_weights` [n-grams of the vocabulary], float32; the logit is
    in nats.
    """

    weight: State
    bias: float
    vocabulary: NgramVocabulary
    ngram_weights: npt.NDArray[np.float32]

    @classmethod
    def without_words(cls, weight: State, bias: float) -> Head:
        """One that reads states alone."""
        return cls(weight, bias, NgramVocabulary.of([]), np.empty(0, np.float32))

    @property
    def knows_words(self) -> bool:
        """Whether its logit depends on words."""
        return len(self.ngram_weights) > 0

    def span_logits(
        self, states: npt.NDArray[np.float64], words: NgramRows
    ) -> npt.NDArray[np.float64]:
        """Of the states [spans, hidden size] and words of each span, in nats, without the bias."""
        logits: npt.NDArray[np.float64] = states @ self.weight
        if self.knows_words:
            rows, ngrams, values = self.vocabulary.tfidf(words)
            logits += np.bincount(rows, values * self.ngram_weights[ngrams], minlength=len(states))
        return logits

    def logit(self, states: npt.NDArray[np.float64], words: NgramRows) -> float:
        """Of the spans that count, with finite states."""
        return float(self.span_logits(states, words).max()) + self.bias

    def tensors(self) -> dict[str, np.ndarray]:
        """What its file holds."""
        return {
            "weight": self.weight,
            "bias": np.array([self.bias], np.float32),
            "ngrams": self.vocabulary.keys,
            "ngram_idf": self.vocabulary.idf,
            "ngram_weights": self.ngram_weights,
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, np.ndarray], where: object, remedy: str) -> Head:
        """Raises GuardError if they are not a head's, or not finite."""
        problem = _problem(tensors)
        if problem:
            raise GuardError(problem, where=where, remedy=remedy)
        vocabulary = NgramVocabulary(tensors["ngrams"], tensors["ngram_idf"])
        bias = float(tensors["bias"][0])
        return cls(tensors["weight"], bias, vocabulary, tensors["ngram_weights"])


def head_hash() -> str:
    """A fingerprint of what heads read of a fixed text: of another one they are trained again."""
    texts = [ngram_rows([list(range(row, 9)), [7, 7, 8]]) for row in range(4)]
    vocabulary = NgramVocabulary.of(texts)
    tfidf = [values.round(6).tolist() for values in vocabulary.tfidf(texts[0])]
    return fingerprint([vocabulary.keys.tolist(), MOST_NGRAMS, tfidf])


def _problem(tensors: Mapping[str, np.ndarray]) -> str:
    """What is wrong with them; empty where nothing is."""
    width = tensors["weight"].size if "weight" in tensors else 0
    ngrams = tensors["ngrams"].size if "ngrams" in tensors else 0
    expected = {
        "weight": ("float32", (width,)),
        "bias": ("float32", (1,)),
        "ngrams": ("uint64", (ngrams,)),
        "ngram_idf": ("float32", (ngrams,)),
        "ngram_weights": ("float32", (ngrams,)),
    }
    got = {key: (tensor.dtype.name, tensor.shape) for key, tensor in tensors.items()}
    if got != expected or not width:
        shapes = "weight [hidden size], bias [1], ngrams [n-grams] in uint64, "
        return f"a head has {shapes}ngram_idf and ngram_weights, else in float32; this one: {got}"
    if (tensors["ngrams"][1:] <= tensors["ngrams"][:-1]).any():
        return "the n-grams of a head are not in ascending order"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "a weight with NaN or infinite values"
    return ""
