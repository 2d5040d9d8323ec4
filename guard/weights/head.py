"""A head computes a rule's logit from a base's states of a conversation and from its words.

    logit = highest over the spans of (weight · state + word weights · TF-IDF of its words) + bias

An encoder has several spans (`prompt/windows.py`), so that no words elsewhere outweigh those of a
violation. A decoder has one: its state at the prompt's end, and the words of the conversation, or
of its last judged turn where only that counts. Word weights alone are a bag of words; states
recognise phrasings that training has not shown.

On a frozen base, and beside a decoder's aLoRA, the file is `head.safetensors`. An encoder's adapter
holds weight and bias as PEFT's classifier, and the word weights in a file beside it,
`words.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from guard.conversation.example import LONG_TURN, Message
from guard.coverage import ConversationForm, Coverage, packed_words, unpacked_words, word_hash
from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt.ngrams import MOST_NGRAMS, NgramRows, NgramVocabulary, ngram_rows
from guard.verdict import Calibration

State = npt.NDArray[np.float32]
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class WordWeights:
    """`weights` [n-grams of the vocabulary] float32: nats for each unit of an n-gram's TF-IDF."""

    vocabulary: NgramVocabulary
    weights: npt.NDArray[np.float32]

    def __bool__(self) -> bool:
        return len(self.weights) > 0

    def logits(self, texts: NgramRows) -> npt.NDArray[np.float64]:
        """The words' part of each text's logit, [texts] in nats."""
        if not self:
            return np.zeros(texts.texts)
        rows, ngrams, values = self.vocabulary.tfidf(texts)
        logits = np.bincount(rows, values * self.weights[ngrams], minlength=texts.texts)
        return logits.astype(np.float64)  # without n-grams bincount gives integers

    def tensors(self) -> dict[str, np.ndarray]:
        return {
            "ngrams": self.vocabulary.keys,
            "ngram_idf": self.vocabulary.idf,
            "ngram_weights": self.weights,
        }

    @classmethod
    def of_tensors(cls, tensors: Tensors, where: object, remedy: str) -> WordWeights:
        problem = _problem(tensors, _word_shapes(tensors))
        if problem:
            raise GuardError(problem, where=where, remedy=remedy)
        vocabulary = NgramVocabulary(tensors["ngrams"], tensors["ngram_idf"])
        return cls(vocabulary, tensors["ngram_weights"])


NO_WORDS = WordWeights(NgramVocabulary.of([]), np.empty(0, np.float32))


@dataclass(frozen=True, eq=False)
class Head:
    """A rule's linear classifier: `weight` is [hidden size] float32, the logit is in nats."""

    weight: State
    bias: float
    words: WordWeights = NO_WORDS

    def span_logits(
        self, states: npt.NDArray[np.float64], words: NgramRows
    ) -> npt.NDArray[np.float64]:
        """Each span's logit without the bias, from its state [spans, hidden size] and words."""
        logits: npt.NDArray[np.float64] = states @ self.weight
        if self.words:
            logits += self.words.logits(words)
        return logits

    def logit(self, states: npt.NDArray[np.float64], words: NgramRows) -> float:
        """The highest logit of the spans, in nats."""
        return float(self.span_logits(states, words).max()) + self.bias

    def tensors(self) -> dict[str, np.ndarray]:
        state_tensors = {"weight": self.weight, "bias": np.array([self.bias], np.float32)}
        return state_tensors | self.words.tensors()

    @classmethod
    def of_tensors(cls, tensors: Tensors, where: object, remedy: str) -> Head:
        width = tensors["weight"].size if "weight" in tensors else 0
        state_shapes: Shapes = {"weight": ("float32", (width,)), "bias": ("float32", (1,))}
        problem = _problem(tensors, state_shapes | _word_shapes(tensors))
        if problem or not width:
            problem = problem or "a head has a weight for each number of a state"
            raise GuardError(problem, where=where, remedy=remedy)
        word_tensors = {key: tensor for key, tensor in tensors.items() if key not in state_shapes}
        words = WordWeights.of_tensors(word_tensors, where, remedy)
        return cls(tensors["weight"], float(tensors["bias"][0]), words)


def mean_head(heads: Sequence[Head], shares: npt.NDArray[np.float64]) -> Head:
    """The mean of heads of one vocabulary, `shares` [heads] of each, which sum to 1."""
    weight = shares @ np.array([head.weight for head in heads], np.float64)
    word_weights = shares @ np.array([head.words.weights for head in heads], np.float64)
    bias = float(np.float32(shares @ np.array([head.bias for head in heads])))
    words = WordWeights(heads[0].words.vocabulary, word_weights.astype(np.float32))
    return Head(weight.astype(np.float32), bias, words)


def answer_hash() -> str:
    """A fingerprint of what a fixed head, calibration and coverage make of a fixed text: if it
    changes, weights would answer otherwise than they were trained to, and are trained again.
    """
    texts = [ngram_rows([list(range(row, 9)), [7, 7, 8]]) for row in range(4)]
    vocabulary = NgramVocabulary.of(texts)
    tfidf = [values.round(6).tolist() for values in vocabulary.tfidf(texts[0])]
    words = WordWeights(vocabulary, np.linspace(-1, 1, len(vocabulary.keys), dtype=np.float32))
    states = np.array([[2.0, 0.25], [0.5, -1.0]])
    logit = Head(np.array([1.5, -0.5], np.float32), 0.125, words).logit(states, texts[0])
    calibration = Calibration(2.0, threshold=0.6, bias=-0.25, uncertainty_band=(0.3, 0.7))
    verdicts: list[tuple[float, bool, bool]] = []
    for any_logit in (-99.0, -1.5, logit, 1.5, 99.0):
        verdict = calibration.verdict("", any_logit)
        verdicts.append((round(verdict.p_violation, 6), verdict.violates, verdict.confident))
    numbers = [MOST_NGRAMS, round(logit, 6), *_covered()]
    return fingerprint([vocabulary.keys.tolist(), tfidf, verdicts, numbers])


def _covered() -> list[float]:
    words = [f"word{chr(ord('a') + number % 26)}{'x' * (number % 7)}" for number in range(60)]
    texts = (" ".join(words[:30]), " ".join(words[20:50]), "\u0436 w o r d 8", "worda " * 300)
    field = packed_words([word_hash(word) for word in words[:30]])
    coverage = Coverage(
        turns=2,
        characters=3_000,
        longest_turns={"user": LONG_TURN, "tool": 2_000},
        speakers=("user",),
        unknown_share=0.5,
        words=field,
        letters="\u00e9",
        sure_logit=-1.0,
        sure_logit_long=-4.0,
    )
    calibration = Calibration(coverage=coverage)
    answers: list[float] = []
    for text in texts:
        for roles in (("user",), ("tool",), ("user", "tool"), ("user", "tool", "user")):
            form = ConversationForm([Message(role, text) for role in roles])
            answers.append(round(form.unknown_share(unpacked_words(field), frozenset("\u00e9")), 6))
            for logit in (-5.0, -2.0, 2.0):
                answers.append(float(calibration.verdict("", logit, form).confident))
    return answers


Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor by its name


def _word_shapes(tensors: Tensors) -> Shapes:
    shape = (0,)
    if "ngrams" in tensors:
        shape = (tensors["ngrams"].size,)
    floats = dict.fromkeys(("ngram_idf", "ngram_weights"), ("float32", shape))
    return {"ngrams": ("uint64", shape), **floats}


def _problem(tensors: Tensors, expected: Shapes) -> str:
    """What is wrong with the tensors; empty where nothing is."""
    shapes = {key: (tensor.dtype.name, tensor.shape) for key, tensor in tensors.items()}
    if shapes != expected:
        return f"tensors of another name, type or shape: {shapes}, expected {expected}"
    if (tensors["ngrams"][1:] <= tensors["ngrams"][:-1]).any():
        return "the n-grams are not in ascending order"
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        return "a weight with NaN or infinite values"
    return ""
