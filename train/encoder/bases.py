"""What training an adapter starts from, by kind of encoder: an entry of BASES. Knows nothing of
training loops. A rule's adapter on a plain encoder brings a head of its own, that of a token
classifier. On GLiNER2 it brings none: the base's classifier reads the rule's label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification, PreTrainedConfig
from transformers.utils.hub import cached_file

from guard.base_files import ENCODER_CONFIG
from guard.errors import GuardError
from guard.recipe import Kind, Recipe
from guard.weights.head import NO_WORDS, Head, WordWeights
from train.base import frozen, pinned
from train.encoder.model import reader_of, token_classifier, token_logits
from train.examples import Rows
from train.head.fit import HeldOutWords, fitted_with_held_out_words
from train.job import Job

PARTS = ("encoder.", "classifier.")  # of GLiNER2, which classify
WEIGHTS = "model.safetensors"
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
    bias = float((classifier.bias[1] - classifier.bias[0]).detach())
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


class Gliner2(nn.Module):
    """The parts of GLiNER2 that classify: encoder and classifier, no heads for spans and counts. It
    gives a logit at each token; those at labels' markers are GLiNER2's. Its modules are named as in
    the package gliner2, so that an adapter of either loads in the other.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.encoder = AutoModel.from_config(config)
        self.classifier = nn.Sequential(
            nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, 1)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and mask, int64 [windows, longest] -> [windows, longest, 1]."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return cast(Tensor, self.classifier(states))


def gliner2_config(recipe: Recipe) -> Any:
    folder = str(Path(ENCODER_CONFIG).parent)
    return AutoConfig.from_pretrained(recipe.base_path, subfolder=folder, **pinned(recipe))


def load_gliner2(recipe: Recipe) -> Gliner2:
    """The base in the recipe's dtype, frozen. Raises GuardError where its weights are not those of
    a span extractor of gliner2.
    """
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    config = gliner2_config(recipe)
    config.dtype = dtype
    model = Gliner2(config).to(dtype)
    try:
        tensors = load_file(str(cached_file(recipe.base_path, WEIGHTS, **pinned(recipe))))
        loaded = {name: tensor for name, tensor in tensors.items() if name.startswith(PARTS)}
        missing = model.load_state_dict(loaded, strict=False).missing_keys
        if missing:
            raise RuntimeError(f"no {', '.join(missing[:3])}")
    except (RuntimeError, OSError, SafetensorError) as error:
        raise GuardError(
            f"the weights are not those of a GLiNER2: {' '.join(str(error).split())}",
            where=f"recipe {recipe.name}: base",
            got=recipe.base,
            remedy="Download it, or name a checkpoint of gliner2's span architecture",
        ) from error
    frozen(model)
    return model


BASES: dict[Kind, EncoderBase] = {
    "encoder": EncoderBase(
        _token_classifier_config,
        AutoModelForTokenClassification.from_config,
        _start_token_classifier,
        token_logits,
    ),
    "gliner2": EncoderBase(gliner2_config, Gliner2, _start_gliner2, _label_logits),
}
