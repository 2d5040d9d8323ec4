"""A head: one linear layer on the base's last hidden state. Knows nothing of where the state comes
from.

Its folder holds `head.safetensors`: `weight` [hidden size] and `bias` [1], float32. An encoder's
adapter has its head among its own weights, as PEFT's `classifier` of the labels no and yes.
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
from guard.method import METHODS
from guard.prompt.encoder import counting
from serve.engine.backend import State

CLASSIFIER = "base_model.model.classifier"  # in the file of PEFT's token classifier


@dataclass(frozen=True, eq=False)
class ServableHead:
    """A checked head folder under the name it is served by. `weight`: [hidden size], float32; the
    logit is in nats.
    """

    name: str
    folder: Path
    card: Card
    weight: State
    bias: float

    def logit(self, state: State | None, speakers: Sequence[str] = ()) -> float:
        """weight . state + bias, summed in float64; of several states [rows, hidden size] of these
        speakers the highest of what the rule judges. NaN without a state, or if a number of any is
        not finite.
        """
        if state is None:
            return math.nan
        logits = state.astype(np.float64) @ self.weight.astype(np.float64)
        if not np.isfinite(logits).all():
            return math.nan
        if speakers:
            logits = logits[counting(speakers, self.card.reads)]
        return float(np.max(logits)) + self.bias


def load_head(name: str, folder: Path, card: Card) -> ServableHead:
    """The head in `folder`.

    Raises GuardError if its file is not one finite vector and a bias, or not that of the card: then
    weights and calibration are from two trainings.
    """
    path = folder / METHODS[card.method].weights
    tensors = _tensors(path, card)
    shapes = {key: (tensor.dtype.name, tensor.shape) for key, tensor in tensors.items()}
    size = tensors["weight"].size if "weight" in tensors else 0
    if shapes != {"weight": ("float32", (size,)), "bias": ("float32", (1,))} or not size:
        problem = "a head has a weight [hidden size] and a bias [1] in float32"
        raise GuardError(problem, where=path, got=shapes, remedy=_remedy(card))
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise GuardError("a weight with NaN or infinite values", where=path, remedy=_remedy(card))
    return ServableHead(name, folder, card, tensors["weight"], float(tensors["bias"][0]))


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
    return ServableHead(name, folder, card, yes - no, float(bias[1]) - float(bias[0]))


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
    if head.weight.size != state_size:
        problem = f"the head's weight does not fit the base's states of {state_size} numbers"
        got = f"{head.weight.size} numbers"
        raise GuardError(problem, where=head.folder, got=got, remedy=_remedy(head.card))


def _remedy(card: Card) -> str:
    return f"Train it again: `{card.retrain}`"
