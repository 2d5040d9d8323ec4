"""The mean states and logits of a conversation's spans. Knows nothing of labels or training.

A span is one of the judged speaker's turns, or a part of a long one (`guard/prompt/windows.py`).
Its state is the mean of its tokens' states, as in MiniLM's own sentence embedding. A head is
linear, so its logit of the mean state is the mean of its logits of the tokens. An adapter with its
head is therefore PEFT's for token classification, which plain transformers loads: a span's logit is
the mean over its tokens of log P(yes) - log P(no), in nats. The logit of the span's words is added.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging

from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.ngrams import NgramRows, ngram_rows
from guard.prompt.windows import Span, Window, judged_of
from guard.recipe import Recipe
from guard.rule import Reads
from train.base import by_onednn, frozen, pinned
from train.batch import by_length, pass_tokens
from train.head.regression import RowSpans, SpansReader
from train.job import Job

MOST_KEPT = 256 * 2**20  # bytes of kept states from which on all spans are dropped
# A model, tokens and mask of windows, int64 [windows, longest] each -> [windows, longest, width].
Reading = Callable[[nn.Module, Tensor, Tensor], Tensor]


class StateReader:
    """Reads the spans of prompts on a frozen encoder, and keeps them. A rule's adapter starts with
    a head on the same states as the method `head`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._base = load_encoder(recipe, device())
        self._builder = EncoderPromptBuilder.of(recipe)
        self._kept: dict[tuple[Reads, Prompt], RowSpans] = {}
        self._kept_bytes = 0

    def read(self, prompts: Sequence[Prompt], reads: Reads) -> list[RowSpans]:
        """The spans of each prompt that count for a rule that reads `reads`."""
        if self._kept_bytes > MOST_KEPT:
            self._kept.clear()
            self._kept_bytes = 0
        missing = [prompt for prompt in dict.fromkeys(prompts) if (reads, prompt) not in self._kept]
        read_now = row_spans(self._base, self._builder, missing, reads)
        for prompt, spans in zip(missing, read_now, strict=True):
            self._kept[reads, prompt] = spans
            self._kept_bytes += spans.states.nbytes + spans.words.keys.nbytes * 3
        return [self._kept[reads, prompt] for prompt in prompts]


_readers: dict[str, StateReader] = {}  # only the last recipe's


def reader_of(job: Job) -> SpansReader:
    """The reader of the spans that count for the job's rule, on an encoder that is loaded once."""
    key = fingerprint(job.recipe.model_dump(), job.recipe.base_revision)
    if key not in _readers:
        _readers.clear()
        _readers[key] = StateReader(job.recipe)
    return functools.partial(_readers[key].read, reads=job.reads)


def row_spans(
    model: PreTrainedModel | nn.Module,
    builder: EncoderPromptBuilder,
    prompts: Sequence[Prompt],
    reads: Reads,
) -> list[RowSpans]:
    """The states and words of each prompt's spans that count for a rule that reads `reads`. The
    model's logits are states.
    """
    windows = [builder.windows(prompt.token_ids, reads) for prompt in prompts]
    states = read(model, plain_logits, builder, windows)
    rows: list[RowSpans] = []
    for row_windows, span_states in zip(windows, states, strict=True):
        rows.append(RowSpans(span_states, span_words(builder, row_windows, reads)))
    return rows


def span_words(builder: EncoderPromptBuilder, windows: Sequence[Window], reads: Reads) -> NgramRows:
    """The words of the spans of a conversation's windows. A speaker whom the rule does not judge
    has none: others use other words.
    """
    texts: list[tuple[int, ...]] = []
    for window in windows:
        for start, end, speaker, _ in builder.spans(window):
            has_words = judged_of([speaker], reads)
            texts.append(window.token_ids[start:end] if has_words else ())
    return ngram_rows(texts)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_encoder(recipe: Recipe, where: torch.device) -> PreTrainedModel:
    """The encoder up to what a token classifier reads, in the recipe's dtype, frozen: its logits
    are the last hidden states.
    """
    model = token_classifier(recipe)
    model.classifier = nn.Identity()
    return frozen(cast(nn.Module, model).to(where))


def token_classifier(recipe: Recipe, **settings: int) -> PreTrainedModel:
    """transformers' token classifier on the recipe's base, with a new classifier. Transformers'
    warning about new and unused weights is silenced. Raises GuardError for a base that lacks others
    than the classifier's, which transformers would draw.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, loading = AutoModelForTokenClassification.from_pretrained(
            recipe.base_path,
            dtype=getattr(torch, recipe.dtype),
            output_loading_info=True,
            **pinned(recipe),
            **settings,
        )
    finally:
        logging.set_verbosity(verbosity)
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("classifier."))
    if missing:
        problem = f"the base lacks weights of a token classifier: {', '.join(missing[:3])}"
        got = recipe.base
        remedy = "Name a base that was saved whole"
        raise GuardError(problem, where=f"recipe {recipe.name}: base", got=got, remedy=remedy)
    return cast(PreTrainedModel, model)


def plain_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return cast(Tensor, model(input_ids=ids, attention_mask=mask).logits)


def token_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """log P(yes) - log P(no) of each token in nats, [windows, longest, 1]."""
    logits = plain_logits(model, ids, mask)
    return logits[..., 1:] - logits[..., :1]


def span_means(values: Tensor, spans: Sequence[Span]) -> Tensor:
    """Means over spans of a window's tokens, [tokens, width] -> [spans, width] float32."""
    return torch.stack([values[start:end].float().mean(0) for start, end, *_ in spans])


def read(
    model: PreTrainedModel | nn.Module,
    reading: Reading,
    builder: EncoderPromptBuilder,
    windows: Sequence[Sequence[Window]],
) -> list[np.ndarray]:
    """What `reading` gives for the spans of each prompt's windows, [spans, width] float32. No
    gradients are computed. Windows of similar length go through the model together. The model is
    left in evaluation mode.
    """
    flat = list(itertools.chain(*windows))
    lengths = [len(window.token_ids) for window in flat]
    where = next(model.parameters()).device
    means: list[np.ndarray] = [np.empty(0)] * len(flat)
    bar = tqdm(total=len(flat), desc="encode", unit="window", leave=False, delay=1)
    model.eval()
    with torch.inference_mode(), by_onednn(model), bar:
        for batch in by_length(lengths, pass_tokens(where)):
            ids, mask = right_padded([flat[index] for index in batch], where)
            token_values = reading(model, ids, mask).cpu()
            for row, index in enumerate(batch):
                means[index] = span_means(token_values[row], builder.spans(flat[index])).numpy()
            bar.update(len(batch))
    window_means = iter(means)
    prompt_means: list[np.ndarray] = []
    for prompt_windows in windows:
        prompt_means.append(np.concatenate([next(window_means) for _ in prompt_windows]))
    return prompt_means


def right_padded(windows: Sequence[Window], where: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [windows, longest]; what is masked is never read."""
    tokens = [torch.tensor(window.token_ids) for window in windows]
    ids = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    return ids.to(where), mask.to(where)
