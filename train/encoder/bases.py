"""What training an adapter starts from, by kind of encoder: an entry of BASES. Knows nothing of
training loops. A rule's adapter on a plain encoder brings a head of its own, that of a token
classifier. On GLiNER2 it brings none: the base's classifier reads the rule's label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedConfig

from guard.recipe import Kind, Recipe
from guard.weights.head import NO_WORDS, Head, WordWeights
from train.base import frozen, pinned
from train.encoder.gliner2 import Gliner2, gliner2_config, load_gliner2
from train.encoder.model import reader_of, token_classifier, token_logits
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


@dataclass(frozen=True)
class EncoderBase:
    """A kind of encoder as adapters see it. `config` gives its shape; `empty` makes a model of that
    shape on torch's current device. `start` gives what a job's training starts from, and seeds
    torch. `token_logits` maps the model with its adapter, token ids and mask, int64 [windows,
    longest], to a rule's logit at each token in nats, [windows, longest, 1].
    """

    config: Callable[[Recipe], PreTrainedConfig]
    empty: Callable[[PreTrainedConfig], nn.Module]
    start: Callable[[Job, Rows], TrainingStart]
    token_logits: Callable[[nn.Module, Tensor, Tensor], Tensor]


def _token_classifier_config(recipe: Recipe) -> Any:
    config = AutoConfig.from_pretrained(recipe.base_path, **pinned(recipe))
    config.num_labels = LABELS
    return config


def _start_token_classifier(job: Job, rows: Rows) -> TrainingStart:
    """The encoder with the rule's fitted head: its weights as the classifier, and its words."""
    trained, held_out = fitted_with_held_out_words(job, rows, reader_of(job))
    head = trained.head
    torch.manual_seed(job.seed)
    base = token_classifier(job.recipe, num_labels=LABELS)
    # In bfloat16 small steps would be lost, so the classifier is float32. PEFT sees to that for the
    # low-rank weights; of the classifier it trains a copy, hook and all.
    classifier = cast(nn.Linear, base.classifier).float()
    classifier.register_forward_pre_hook(_as_its_weight)
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
    bias = float(classifier.bias[1] - classifier.bias[0])
    return Head(weight.numpy(), bias, words)


def _as_its_weight(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The states in the dtype of the layer's weight, which may differ from the base's."""
    return tuple(states.to(cast(nn.Linear, layer).weight.dtype) for states in inputs)


def _start_gliner2(job: Job, rows: Rows) -> TrainingStart:
    """The base as it is: what it says of the label without training."""
    model = load_gliner2(job.recipe)
    torch.manual_seed(job.seed)
    return TrainingStart(model, NO_WORDS, [HeldOutWords()] * len(rows.train))


def _label_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return cast(Tensor, model(input_ids=ids, attention_mask=mask))


BASES: dict[Kind, EncoderBase] = {
    "encoder": EncoderBase(
        _token_classifier_config,
        AutoModelForTokenClassification.from_config,
        _start_token_classifier,
        token_logits,
    ),
    "gliner2": EncoderBase(gliner2_config, Gliner2, _start_gliner2, _label_logits),
}
