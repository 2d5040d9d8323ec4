"""What training an adapter starts from, and the shape of its base. Knows nothing of
training loops. A rule's adapter brings a head of its own, that of a token classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig

from guard.recipe import Recipe
from guard.weights.head import Head, WordWeights
from train.base import frozen, pinned
from train.encoder.model import reader_of, token_classifier
from train.examples import Rows
from train.head.fit import HeldOutWords, fitted_with_held_out_words
from train.job import Job

LABELS = 2  # a rule's token classifier has the labels no and yes


@dataclass(frozen=True)
class TrainingStart:
    """What a job's training starts from. `base` is frozen. `words` are the word weights for any
    text, `held_out` those for each training row, in the rows' order. `validation_logits` are in
    nats, empty if they are not known.
    """

    base: nn.Module
    words: WordWeights
    held_out: Sequence[HeldOutWords]
    validation_logits: Sequence[float] = ()


def token_classifier_config(recipe: Recipe) -> Any:
    config = AutoConfig.from_pretrained(recipe.base_path, **pinned(recipe))
    config.num_labels = LABELS
    return config


def training_start(job: Job, rows: Rows) -> TrainingStart:
    """The encoder with the rule's fitted head: its weights as the classifier, and its words."""
    trained, held_out = fitted_with_held_out_words(job, rows, reader_of(job))
    head = trained.head
    torch.manual_seed(job.seed)
    base = token_classifier(job.recipe, num_labels=LABELS)
    # In bfloat16 small steps would be lost, so the classifier is float32. PEFT sees to that for the
    # low-rank weights; of the classifier it trains a copy, hook and all.
    classifier = cast(nn.Linear, base.classifier).float()
    # Its dtype may differ from the base's.
    classifier.register_forward_pre_hook(lambda it, states: (states[0].to(it.weight.dtype),))
    set_head(classifier, head)
    return TrainingStart(frozen(base), head.words, held_out, trained.validation_logits)


def set_head(classifier: nn.Linear, head: Head) -> None:
    """Make a token classifier's logits differ by the head's logit of a state, without words."""
    weight = torch.from_numpy(head.weight)
    with torch.no_grad():
        classifier.weight.copy_(torch.stack([-weight / 2, weight / 2]))
        classifier.bias.copy_(torch.tensor([-head.bias / 2, head.bias / 2]))


def head_of(classifier: nn.Linear, words: WordWeights) -> Head:
    """The head that a token classifier is together with the words beside it."""
    weight = (classifier.weight[1] - classifier.weight[0]).detach().cpu()
    bias = float((classifier.bias[1] - classifier.bias[0]).detach())
    return Head(weight.numpy(), bias, words)
