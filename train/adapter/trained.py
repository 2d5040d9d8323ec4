"""A trained adapter: its verdict logits, and how it is written. Knows nothing of training."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.method import HEAD
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.recipe import Recipe
from guard.weights.head import Head
from train.base import by_onednn
from train.batch import LAST_POSITION, by_length, left_padded, pass_tokens
from train.examples import Row, Rows
from train.head.fit import decoder_spans, fitted_to_own_rows, own_rows_suffice
from train.head.regression import RowSpans, head_logits, read_rows
from train.job import Job


@dataclass(frozen=True)
class TrainedAdapter:
    """A job's adapter in PEFT's layers on the base that serves it, and the head that answers by its
    states, if one does. `validation_logits` are those of the job's validation rows on that base, in
    a study the test rows' after them, in nats, where training computed them; else empty.
    """

    model: PeftModel
    job: Job
    validation_logits: Sequence[float] = ()
    head: Head | None = None

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """The logits of `prompts` in nats, uncalibrated, through plain PEFT: log P(yes) - log
        P(no), or the head's. Raises RuntimeError once the next adapter was asked for, as `save`
        does.
        """
        self._check_present()
        if self.head is None:
            return verdict_logits(self.model, prompts, self.job.builder)
        return head_logits(self.head, self.spans(prompts))

    def spans(self, prompts: Sequence[Prompt]) -> list[RowSpans]:
        """What a head reads of `prompts`: the adapter's states, and the words."""
        self._check_present()
        return decoder_spans(self.job, adapted_states(self.model, prompts), prompts)

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, which load in plain PEFT, and the head's."""
        self._check_present()
        save_adapter(self.model, self.job.recipe, folder)
        if self.head is not None:
            save_file(self.head.tensors(), folder / HEAD)

    def _check_present(self) -> None:
        """Neighbours stand on one base in turn: without its layers the base would answer alone."""
        if not any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            raise RuntimeError(
                f"{self.job.name}: the adapter is gone, because the next one was asked for "
                "(`(trained,) = fit(...)` asks for it too)"
            )


def prompts_about(job: Job, rule_text: str, rows: Sequence[Row]) -> list[Prompt]:
    """The rows' conversations, with another text in the rule's turn."""
    suffix = job.builder.suffix_ids(rule_text)
    prompts: list[Prompt] = []
    for row in rows:
        prefix = row.prompt.token_ids[: row.prompt.invocation_start]
        prompts.append(Prompt((*prefix, *suffix), len(prefix)))
    return prompts


def with_head_of_own_rows(trained: TrainedAdapter, rows: Rows) -> TrainedAdapter:
    """The adapter with its head fitted again to the own rows beside generated ones, as an encoder's
    is (`train/encoder/trained.py`); as it is without a head or with too few own rows.
    """
    job = trained.job
    if trained.head is None or not own_rows_suffice(job, rows):
        return trained
    train = read_rows(job, trained.spans, rows.own().train)
    validation = read_rows(job, trained.spans, rows.validation)
    head, before = fitted_to_own_rows(job, trained.head, train, validation.own())
    return replace(trained, head=head, validation_logits=head_logits(before, validation.spans))


def save_adapter(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """Write the adapter as PEFT's two files."""
    # As the recipe names the base: no path of this machine stands in adapter_config.json.
    model.peft_config["default"].base_model_name_or_path = recipe.base
    # By default PEFT would look the base up on the hub to decide about the embedding.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    # PEFT's empty template; card.json is the card.
    (folder / "README.md").unlink(missing_ok=True)


def verdict_logits(
    model: PeftModel, prompts: Sequence[Prompt], builder: PromptBuilder
) -> list[float]:
    """log P(yes) - log P(no) at the verdict token, in nats, uncalibrated, one for each prompt."""
    logits = [float("nan")] * len(prompts)
    with float32_head(model), contextlib.closing(_predicted(model, prompts)) as passes:
        for indices, vocabulary_logits in passes:
            differences = yes_minus_no(vocabulary_logits, builder)
            for index, logit in zip(indices, differences.tolist(), strict=True):
                logits[index] = logit
    return logits


def adapted_states(model: PeftModel, prompts: Sequence[Prompt]) -> np.ndarray:
    """What the output layer reads at each prompt's last token, [prompts, hidden size] float32."""
    states: dict[int, np.ndarray] = {}
    read: list[Tensor] = []

    def keep(state: Tensor) -> Tensor:
        read.append(state[:, -1])
        return state  # instead of a product with the vocabulary, which nobody asks for

    output_layer = cast(nn.Module, model.get_output_embeddings())
    output_layer.forward = keep
    try:
        with contextlib.closing(_predicted(model, prompts)) as passes:
            for indices, _ in passes:
                states |= zip(indices, read.pop().float().cpu().numpy(), strict=True)
    finally:
        del output_layer.forward  # the class's is found again
    return np.array([states[index] for index in range(len(prompts))], np.float32)


def _predicted(
    model: PeftModel, prompts: Sequence[Prompt]
) -> Generator[tuple[Sequence[int], Tensor], None, None]:
    """The indices of the prompts of each pass, and the logits [indices, vocabulary] behind them."""
    was_training = model.training
    model.eval()
    lengths = [len(prompt.token_ids) for prompt in prompts]
    bar = tqdm(total=len(prompts), desc="predict", unit="prompt", leave=False)
    with torch.inference_mode(), by_onednn(model), bar:
        for indices in by_length(lengths, pass_tokens(model.device)):
            tensors = left_padded([prompts[index].token_ids for index in indices])
            on_device = {name: tensor.to(model.device) for name, tensor in tensors.items()}
            output = model(**on_device, logits_to_keep=LAST_POSITION, use_cache=False)
            yield indices, output.logits[:, -1]
            bar.update(len(indices))
    model.train(was_training)


@contextlib.contextmanager
def float32_head(model: PeftModel | PreTrainedModel) -> Iterator[None]:
    """Let the output layer compute in float32, as the engine's does
    (`serve/engine/backends/arguments.py`). The difference of two bfloat16 logits is a multiple of
    as much as an eighth of a nat. A layer that is float32 already, quantised or adapted stays as it
    is.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype == torch.float32:
        yield
        return
    weight = head.weight.detach().float()

    def in_float32(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # training's would narrow it again
            return functional.linear(inputs[0].float(), weight)

    hook = head.register_forward_hook(in_float32)
    try:
        yield
    finally:
        hook.remove()


def yes_minus_no(logits: Tensor, builder: PromptBuilder) -> Tensor:
    """log P(yes) - log P(no) `[rows]` in float64 from logits `[rows, vocabulary]`. The softmax's
    normaliser is the same for both words and cancels.
    """
    return logits[:, builder.yes_id].double() - logits[:, builder.no_id].double()
