"""A rule's head as it is served. Knows nothing of where states and words come from.

Its folder holds the file that `guard/head.py` describes. An encoder's adapter has its head among
its own weights, as PEFT's `classifier` of the labels no and yes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from guard.card import Card
from guard.errors import GuardError
from guard.head import Head, State
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import Turn, counting, last_turn
from guard.prompt.ngrams import NgramCounts, ngram_counts
from guard.rule import Judged

NO_WORDS = ngram_counts([])
CLASSIFIER = "base_model.model.classifier"  # in the file of PEFT's token classifier


class Words:
    """The words of one conversation: counted when a head asks, once for each kind of speaker."""

    def __init__(self, builder: PromptBuilder, prefix: Sequence[int]) -> None:
        self._builder, self._prefix = builder, prefix
        self._counts: dict[Judged, NgramCounts] = {}

    def of(self, judged: Judged) -> NgramCounts:
        """Those that count for a rule that judges `judged`."""
        if judged not in self._counts:
            self._counts[judged] = ngram_counts(self._builder.turns(self._prefix, judged))
        return self._counts[judged]


@dataclass(frozen=True, eq=False)
class ServableHead:
    """A checked head folder under the name it is served by."""

    name: str
    folder: Path
    card: Card
    head: Head

    def logit(self, states: State | None, turns: Sequence[Turn], words: Words) -> float:
        """What it says, in nats, to states [hidden size], or [rows, hidden size] of these turns,
        and to their conversation's words. NaN without states, or if a number is not finite.
        """
        if states is None or not np.isfinite(states).all():
            return math.nan
        spans, last = states[None], np.zeros_like(states)
        if turns:
            counted = counting([turn.speaker for turn in turns], self.card.reads)
            spans = states[counted]
            last = spans[last_turn([turns[index] for index in counted])].mean(axis=0)
        counts = NO_WORDS
        if self.head.knows_words:
            counts = words.of(self.card.reads)
        return self.head.logit(spans, last, counts)


def load_head(name: str, folder: Path, card: Card) -> ServableHead:
    """The head in `folder`.

    Raises GuardError if its file is not a head's, or not that of the card: then weights and
    calibration are from two trainings.
    """
    path = folder / METHODS[card.method].weights
    tensors = _tensors(path, card)
    head = Head.of_tensors(tensors, path, _remedy(card))
    return ServableHead(name, folder, card, head)


def load_classifier(name: str, folder: Path, card: Card) -> ServableHead:
    """The head among the weights of an encoder's adapter: what its label yes has above no.

    Raises GuardError if there is none of two labels, or the weights are not those of the card.
    """
    path = folder / METHODS[card.method].weights
    tensors = _tensors(path, card)
    weight, bias = tensors.get(f"{CLASSIFIER}.weight"), tensors.get(f"{CLASSIFIER}.bias")
    if weight is None or bias is None or weight.ndim != 2 or len(weight) != 2 or bias.shape != (2,):
        problem = "an encoder's adapter has a classifier of the labels no and yes"
        got = [key for key in tensors if key.startswith(CLASSIFIER)]
        raise GuardError(problem, where=path, got=got, remedy=_remedy(card))
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise GuardError("a weight with NaN or infinite values", where=path, remedy=_remedy(card))
    no, yes = weight.astype(np.float32)
    head = Head.on_spans(yes - no, float(bias[1]) - float(bias[0]))
    return ServableHead(name, folder, card, head)


def _tensors(path: Path, card: Card) -> dict[str, np.ndarray]:
    """The tensors of a weights file. Raises GuardError if it is not that of the card: then weights
    and calibration are from two trainings.
    """
    try:
        content = path.read_bytes()
        tensors: dict[str, np.ndarray] = load(content)
    except (OSError, SafetensorError) as error:
        raise GuardError(f"cannot be read: {error}", where=path, remedy=_remedy(card)) from error
    if hashlib.sha256(content).hexdigest() != card.weights_sha256:
        raise GuardError(
            "the weights were replaced while they were read", where=path, remedy="Try again"
        )
    return tensors


def check_size(head: ServableHead, state_size: int) -> None:
    """Raise GuardError unless the head reads states of this length."""
    if head.head.weight.size != state_size:
        problem = f"the head's weight does not fit the base's states of {state_size} numbers"
        got = f"{head.head.weight.size} numbers"
        raise GuardError(problem, where=head.folder, got=got, remedy=_remedy(head.card))


def _remedy(card: Card) -> str:
    return f"Train it again: `{card.retrain}`"
