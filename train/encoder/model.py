"""The mean states and logits of a conversation's spans. Knows nothing of labels or training.

A span is a turn of whom the rule judges, or a part of a long one (`guard/prompt/encoder.py`). Its
state is the mean of its tokens' states, as MiniLM's own sentence embedding is of a sentence. A head
is linear, so the mean of what it says of every token is what it says of the mean: an adapter with
its head is PEFT's for token classification, which plain transformers loads, and what it says of a
span is the mean over its tokens of log P(yes) - log P(no), in nats. What the span's words say comes
on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
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
from train.base import frozen, pinned
from train.batch import by_length, pass_tokens
from train.examples import Rows
from train.head.fit import TrainedHead, fit_on
from train.head.rows import Reader, RowSpans
from train.job import Job
from train.onednn import by_onednn

MOST_KEPT = 256 * 2**20  # bytes of states that are kept
# Tokens and mask of windows, int64 [windows, longest] each -> float [windows, longest, width].
Reading = Callable[[Tensor, Tensor], Tensor]


def fit_heads(work: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Heads on the frozen encoder, which is loaded once for all of them."""
    for job, rows in work:
        yield from fit_on(reader_of(job), [(job, rows)])


class StateReader:
    """Reads the states of prompts on a frozen encoder, and keeps them.

    A rule's adapter begins with a head on the same ones as its `head`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._base = load_encoder(recipe, device())
        self._builder = EncoderPromptBuilder.of(recipe)
        self._kept: dict[tuple[Reads, Prompt], np.ndarray] = {}
        self._kept_bytes = 0

    def read(self, prompts: Sequence[Prompt], reads: Reads) -> list[np.ndarray]:
        """As `mean_states`."""
        if self._kept_bytes > MOST_KEPT:
            self._kept.clear()
            self._kept_bytes = 0
        distinct = dict.fromkeys(prompts)
        missing = [prompt for prompt in distinct if (reads, prompt) not in self._kept]
        states = mean_states(self._base, self._builder, missing, reads)
        for prompt, of_prompt in zip(missing, states, strict=True):
            self._kept[reads, prompt] = of_prompt
            self._kept_bytes += of_prompt.nbytes
        return [self._kept[reads, prompt] for prompt in prompts]


_readers: dict[str, StateReader] = {}  # of the last recipe alone


def state_reader(recipe: Recipe) -> StateReader:
    """The process's reader for this recipe."""
    key = fingerprint(recipe.model_dump(), recipe.base_revision)
    if key not in _readers:
        _readers.clear()
        _readers[key] = StateReader(recipe)
    return _readers[key]


def reader_of(job: Job) -> Reader:
    """What gives the spans of prompts that count for the job's rule."""
    states = state_reader(job.recipe)
    builder = cast(EncoderPromptBuilder, job.builder)

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        rows: list[RowSpans] = []
        for prompt, of_prompt in zip(prompts, states.read(prompts, job.reads), strict=True):
            windows = builder.windows(prompt.token_ids, job.reads)
            rows.append(RowSpans(of_prompt, span_words(builder, windows, job.reads)))
        return rows

    return reader


def span_words(builder: EncoderPromptBuilder, windows: Sequence[Window], reads: Reads) -> NgramRows:
    """Of the spans of a conversation's windows: none of somebody whom the rule does not judge, as
    others use other words.
    """
    texts: list[tuple[int, ...]] = []
    for window in windows:
        for start, end, speaker, _ in builder.spans(window):
            has_words = judged_of([speaker], reads)
            texts.append(window.token_ids[start:end] if has_words else ())
    return ngram_rows(texts)


def device() -> torch.device:
    """Where an encoder is computed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_encoder(recipe: Recipe, where: torch.device) -> PreTrainedModel:
    """The encoder up to what a token classifier reads, in the recipe's dtype, frozen: its logits
    are states.

    Most read the last hidden states, ModernBERT's those behind a dense layer of its own.
    """
    model = token_classifier(recipe)
    model.classifier = nn.Identity()
    return frozen(cast(nn.Module, model).to(where))


def token_classifier(recipe: Recipe, **settings: int) -> PreTrainedModel:
    """transformers' token classifier on the recipe's base, its classifier new.

    Without transformers' list of the weights that are new or not used.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model: PreTrainedModel = AutoModelForTokenClassification.from_pretrained(
            recipe.base_path, dtype=getattr(torch, recipe.dtype), **pinned(recipe), **settings
        )
    finally:
        logging.set_verbosity(verbosity)
    return model


def mean_states(
    base: PreTrainedModel,
    builder: EncoderPromptBuilder,
    prompts: Sequence[Prompt],
    reads: Reads,
) -> list[np.ndarray]:
    """The states of each prompt's spans that count for a rule that reads `reads`, [spans of all
    windows, hidden size] float32.
    """

    def reading(ids: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, base(input_ids=ids, attention_mask=mask).logits)

    windows = [builder.windows(prompt.token_ids, reads) for prompt in prompts]
    return read(base, reading, builder, windows)


def token_logits(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """log P(yes) - log P(no) of each token in nats, [windows, longest, 1]."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    return cast(Tensor, logits[..., 1:] - logits[..., :1])


def span_means(of_tokens: Tensor, spans: Sequence[Span]) -> Tensor:
    """The means over a window's spans, [spans, width] float32, of [tokens, width]."""
    return torch.stack([of_tokens[start:end].float().mean(0) for start, end, *_ in spans])


def read(
    model: PreTrainedModel | nn.Module,
    reading: Reading,
    builder: EncoderPromptBuilder,
    windows: Sequence[Sequence[Window]],
) -> list[np.ndarray]:
    """What `reading` gives for the spans of each prompt's windows, [spans, width] float32.

    Without gradients. Windows of like length go through the model together. Leaves it in evaluation
    mode.
    """
    flat: list[Window] = []
    for of_prompt in windows:
        flat += of_prompt
    lengths = [len(window.token_ids) for window in flat]
    where = next(model.parameters()).device
    means: list[np.ndarray] = [np.empty(0)] * len(flat)
    bar = tqdm(total=len(flat), desc="encode", unit="window", leave=False, delay=1)
    model.eval()
    with torch.inference_mode(), by_onednn(model), bar:
        for batch in by_length(lengths, pass_tokens(where)):
            ids, mask = right_padded([flat[index] for index in batch], where)
            of_tokens = reading(ids, mask).cpu()
            for row, index in enumerate(batch):
                means[index] = span_means(of_tokens[row], builder.spans(flat[index])).numpy()
            bar.update(len(batch))
    ends = np.cumsum([len(of_prompt) for of_prompt in windows])
    of_prompts = zip(windows, ends, strict=True)
    return [np.concatenate(means[end - len(of_prompt) : end]) for of_prompt, end in of_prompts]


def right_padded(windows: Sequence[Window], where: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [windows, longest]; what is masked is never read."""
    longest = max(len(window.token_ids) for window in windows)
    ids = torch.zeros(len(windows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        length = len(window.token_ids)
        ids[row, :length] = torch.tensor(window.token_ids)
        mask[row, :length] = 1
    return ids.to(where), mask.to(where)
