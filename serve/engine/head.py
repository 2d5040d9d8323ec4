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
from guard.head import Head, HeadStates, State
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import Turn, counting, last_turn
from guard.prompt.ngrams import Ngrams, ngrams_of
from guard.rule import Judged

NO_WORDS = ngrams_of([])
CLASSIFIER = "base_model.model.classifier"  # in the file of PEFT's token classifier


class Reading:
    """What heads read of one conversation: its words, and the states that came back, [hidden size],
    or [rows, hidden size] of these turns. Worked out when a head asks, once for each of whom rules
    judge.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        prefix: Sequence[int],
        states: State | None,
        turns: Sequence[Turn] = (),
    ) -> None:
        self._builder, self._prefix = builder, prefix
        self._states, self._turns = states, turns
        self._is_broken = states is None or not np.isfinite(states).all()
        self._states_of: dict[Judged, HeadStates] = {}
        self._words_of: dict[Judged, Ngrams] = {}

    def states(self, judged: Judged) -> HeadStates | None:
        """Those that count for a rule that judges `judged`; None where one of any is missing or not
        finite.
        """
        if self._is_broken or self._states is None:
            return None
        if judged not in self._states_of:
            self._states_of[judged] = self._counted(self._states, judged)
        return self._states_of[judged]

    def words(self, judged: Judged) -> Ngrams:
        """Those that count for a rule that judges `judged`."""
        if judged not in self._words_of:
            self._words_of[judged] = ngrams_of(self._builder.turns(self._prefix, judged))
        return self._words_of[judged]

    def _counted(self, states: State, judged: Judged) -> HeadStates:
        if not self._turns:
            return HeadStates.of_prompt(states)
        counted = counting([turn.speaker for turn in self._turns], judged)
        last = last_turn([self._turns[index] for index in counted])
        return HeadStates.of_turns(states[counted], last)


@dataclass(frozen=True, eq=False)
class ServableHead:
    """A checked head folder under the name it is served by."""

    name: str
    folder: Path
    card: Card
    head: Head

    def logit(self, reading: Reading) -> float:
        """What it says to a conversation, in nats. NaN without finite states."""
        states = reading.states(self.card.reads)
        if states is None:
            return math.nan
        words = NO_WORDS
        if self.head.knows_words:
            words = reading.words(self.card.reads)
        return self.head.logit(states, words)


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
