"""A rule's head as it is served, alone or on what an aLoRA makes of a conversation: the file that
`guard/weights/head.py` describes. An encoder's adapter has its head among its own weights, as
PEFT's `classifier` of the labels no and yes, and its words beside them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load

from guard.errors import GuardError
from guard.method import HEAD, METHODS, WORDS
from guard.prompt.ngrams import NgramRows, ngram_rows
from guard.prompt.windows import counting, judged_of
from guard.rule import Reads
from guard.weights.card import Card, check_files
from guard.weights.head import NO_WORDS, Head, WordWeights
from serve.engine.backend import EngineOutput

Tensors: TypeAlias = dict[str, np.ndarray]  # by name
CLASSIFIER = "base_model.model.classifier"  # in the file of PEFT's token classifier
MOST_COUNTED = len(get_args(Reads))  # sets of texts whose counted words are kept


class CountedTexts:
    """The words of the last few conversations. `judged_ids` gives the tokens of a decoder's
    conversation whose words count; by default all do.
    """

    def __init__(
        self, judged_ids: Callable[[Sequence[int], Reads], Sequence[int]] = lambda prefix, _: prefix
    ) -> None:
        self._judged_ids = judged_ids
        self._words: dict[Hashable, NgramRows] = {}

    def of_spans(self, texts: tuple[tuple[int, ...], ...]) -> NgramRows:
        return self._kept(texts, lambda: texts)

    def of_conversation(self, prefix: tuple[int, ...], reads: Reads) -> NgramRows:
        return self._kept((prefix, reads), lambda: [self._judged_ids(prefix, reads)])

    def _kept(self, key: Hashable, texts: Callable[[], Sequence[Sequence[int]]]) -> NgramRows:
        if key not in self._words:
            if len(self._words) == MOST_COUNTED:
                self._words.clear()
            self._words[key] = ngram_rows(texts())
        return self._words[key]


class HeadInput:
    """What heads read of one output, and of the token ids of its conversation, `prefix`: computed
    when a head asks, once for each choice of judged speakers. Words that outputs have in common are
    `counted` once.
    """

    def __init__(
        self, output: EngineOutput, prefix: Sequence[int], counted: CountedTexts | None = None
    ) -> None:
        self._counted = counted or CountedTexts()
        self._states = np.atleast_2d(np.empty(0) if output.state is None else output.state)
        self._spans = output.spans
        self._prefix = prefix
        self._is_finite = output.state is not None and bool(np.isfinite(output.state).all())
        self._states_of: dict[Reads, npt.NDArray[np.float64]] = {}
        self._words_of: dict[Reads, NgramRows] = {}

    def states(self, reads: Reads) -> npt.NDArray[np.float64] | None:
        """Of the spans that count, [spans, hidden size]; None where one is missing or broken."""
        if not self._is_finite:
            return None
        if reads not in self._states_of:
            states = self._states
            if self._spans:
                states = states[self._counting(reads)]
            self._states_of[reads] = states.astype(np.float64)
        return self._states_of[reads]

    def words(self, reads: Reads) -> NgramRows:
        """Of the same spans, where their speaker is judged; of a decoder's conversation where there
        are no spans.
        """
        if reads not in self._words_of:
            if self._spans:
                texts = tuple(self._text(index, reads) for index in self._counting(reads))
                words = self._counted.of_spans(texts)
            else:
                words = self._counted.of_conversation(tuple(self._prefix), reads)
            self._words_of[reads] = words
        return self._words_of[reads]

    def _text(self, index: int, reads: Reads) -> tuple[int, ...]:
        """Of a span; empty if the rule does not judge its speaker, since others use other words."""
        span = self._spans[index]
        if not judged_of([span.speaker], reads):
            return ()
        return span.token_ids

    def _counting(self, reads: Reads) -> list[int]:
        speakers = [span.speaker for span in self._spans]
        return counting(speakers, reads, [span.turn for span in self._spans])


NO_TEXTS = ngram_rows([])


@dataclass(frozen=True, eq=False)
class ServableHead:
    """A checked head folder under the name it is served by."""

    name: str
    folder: Path
    card: Card
    head: Head

    def logit(self, read: HeadInput) -> float:
        """The logit for an output, in nats. NaN without finite states."""
        states = read.states(self.card.reads)
        if states is None:
            return math.nan
        words = NO_TEXTS
        if self.head.words:
            words = read.words(self.card.reads)
        return self.head.logit(states, words)


def load_head(name: str, folder: Path, card: Card) -> ServableHead:
    """The head in `folder`, alone or beside an adapter. Raises GuardError if its file is not a
    head's, or not the card's.
    """
    file = METHODS[card.method].weights
    if METHODS[card.method].is_adapter:
        file = HEAD
    head = Head.of_tensors(_read_tensors(folder, card, [file])[file], folder / file, card.remedy)
    return ServableHead(name, folder, card, head)


def load_classifier(name: str, folder: Path, card: Card) -> ServableHead:
    """The head of an encoder's adapter: what its label yes has above no, and the words beside it.
    Raises GuardError if there is none of two labels, or it is not the card's.
    """
    file = METHODS[card.method].weights
    names = [file]
    if WORDS in card.files:
        names.append(WORDS)
    path, read = folder / file, _read_tensors(folder, card, names)
    tensors = read[file]
    weight, bias = tensors.get(f"{CLASSIFIER}.weight"), tensors.get(f"{CLASSIFIER}.bias")
    if weight is None or bias is None or weight.ndim != 2 or len(weight) != 2 or bias.shape != (2,):
        problem = "an encoder's adapter needs a classifier of the labels no and yes"
        got = [key for key in tensors if key.startswith(CLASSIFIER)]
        raise GuardError(problem, where=path, got=got, remedy=card.remedy)
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise GuardError("a weight with NaN or infinite values", where=path, remedy=card.remedy)
    words = NO_WORDS
    if WORDS in read:
        words = WordWeights.of_tensors(read[WORDS], folder / WORDS, card.remedy)
    no, yes = weight.astype(np.float32)
    head = Head(yes - no, float(bias[1]) - float(bias[0]), words)
    return ServableHead(name, folder, card, head)


def _read_tensors(folder: Path, card: Card, names: Sequence[str]) -> dict[str, Tensors]:
    """The tensors of files of a folder, by name. Raises GuardError if they are not the card's: then
    weights and calibration are from two trainings.
    """
    read: dict[str, Tensors] = {}
    digests = dict(card.files)
    try:
        for name in names:
            content = (folder / name).read_bytes()
            digests[name] = hashlib.sha256(content).hexdigest()
            read[name] = _as_numpy(content)
    except (OSError, SafetensorError) as error:
        raise GuardError(f"cannot be read: {error}", where=folder, remedy=card.remedy) from error
    check_files(card, digests, folder)
    return read


def _as_numpy(content: bytes) -> Tensors:
    """The tensors of a file; bfloat16, which numpy does not have, as float32."""
    try:
        return load(content)
    except KeyError:
        from safetensors.torch import load as load_tensors  # imports torch, for seconds

        return {name: tensor.float().numpy() for name, tensor in load_tensors(content).items()}


def check_size(head: ServableHead, state_size: int) -> None:
    """Raise GuardError unless the head reads states of this length."""
    size = head.head.weight.size
    if size != state_size:
        problem = f"the head's weight does not fit the base's states of {state_size} numbers"
        got = f"{size} numbers"
        raise GuardError(problem, where=head.folder, got=got, remedy=head.card.remedy)
