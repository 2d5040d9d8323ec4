"""A head: what a rule's logit is, from the states that a frozen base has of a conversation and from
its words. Knows nothing of how either comes about.

    logit = highest of weight · state over the spans + last_weight · state of the last turn
            + ngram_weights · TF-IDF of the n-grams + bias

A decoder has one state, at the prompt's end, and no last turn. The words are what a bag of words
has (`prompt/ngrams.py`): on real text it is as good as many an adapter, and next to nothing on
phrasings that training has not shown, where the states are good.

A head's file is `head.safetensors`: one tensor for each field below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from guard.errors import GuardError
from guard.prompt.ngrams import Ngrams, Vocabulary

State = npt.NDArray[np.float32]


class HeadStates(NamedTuple):
    """What a base has of a conversation, float64, in which a head sums: `spans` [spans, hidden
    size], and `last` [hidden size], the mean over those of the last turn; of a decoder one state,
    and zeros.
    """

    spans: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]

    @classmethod
    def of_prompt(cls, state: State) -> HeadStates:
        """Of a decoder's state, [hidden size]."""
        return cls(state[None].astype(np.float64), np.zeros(len(state)))

    @classmethod
    def of_turns(cls, spans: State, last: Sequence[int]) -> HeadStates:
        """Of an encoder's, [spans, hidden size], those of the last turn by their indices."""
        exact = spans.astype(np.float64)
        return cls(exact, exact[last].mean(axis=0))


@dataclass(frozen=True, eq=False)
class Head:
    """`weight` and `last_weight` [hidden size], `ngram_weights` [n-grams of the vocabulary],
    float32; the logit is in nats.
    """

    weight: State
    last_weight: State
    bias: float
    vocabulary: Vocabulary
    ngram_weights: npt.NDArray[np.float32]

    @classmethod
    def on_spans(cls, weight: State, bias: float) -> Head:
        """One that reads no words and no last turn."""
        nothing = np.empty(0, np.float32)
        vocabulary = Vocabulary(np.empty(0, np.uint64), nothing)
        return cls(weight, np.zeros_like(weight), bias, vocabulary, nothing)

    @property
    def knows_words(self) -> bool:
        """Whether its logit depends on words."""
        return len(self.vocabulary.keys) > 0

    def logit(self, states: HeadStates, words: Ngrams) -> float:
        """Of the states, finite ones, and words that count."""
        highest = (states.spans @ self.weight).max()
        indices, tfidf = self.vocabulary.tfidf(words)
        of_words = tfidf @ self.ngram_weights[indices]
        return float(highest + states.last @ self.last_weight + of_words) + self.bias

    def tensors(self) -> dict[str, np.ndarray]:
        """What its file holds."""
        return {
            "weight": self.weight,
            "last_weight": self.last_weight,
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
        vocabulary = Vocabulary(tensors["ngrams"], tensors["ngram_idf"])
        return cls(
            tensors["weight"],
            tensors["last_weight"],
            float(tensors["bias"][0]),
            vocabulary,
            tensors["ngram_weights"],
        )


def _problem(tensors: Mapping[str, np.ndarray]) -> str:
    """What is wrong with them; empty where nothing is."""
    width = tensors["weight"].size if "weight" in tensors else 0
    ngrams = tensors["ngrams"].size if "ngrams" in tensors else 0
    expected = {
        "weight": ("float32", (width,)),
        "last_weight": ("float32", (width,)),
        "bias": ("float32", (1,)),
        "ngrams": ("uint64", (ngrams,)),
        "ngram_idf": ("float32", (ngrams,)),
        "ngram_weights": ("float32", (ngrams,)),
    }
    got = {key: (tensor.dtype.name, tensor.shape) for key, tensor in tensors.items()}
    if got != expected or not width:
        shapes = "weight and last_weight [hidden size], bias [1], ngrams [n-grams] in uint64, "
        return f"a head has {shapes}ngram_idf and ngram_weights, else in float32; this one: {got}"
    if (tensors["ngrams"][1:] <= tensors["ngrams"][:-1]).any():
        return "the n-grams of a head are not in ascending order"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "a weight with NaN or infinite values"
    return ""
