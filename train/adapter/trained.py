"""A trained adapter: its verdict logits, and how it is written. Knows nothing of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.prompt.decoder import Prompt, PromptBuilder
from guard.recipe import Recipe
from train.base import by_onednn
from train.batch import by_length, left_padded, pass_tokens
from train.job import Job


@dataclass(frozen=True)
class TrainedAdapter:
    """A job's adapter in PEFT's layers on the base that serves it. `validation_logits` are log
    P(yes) - log P(no) of the job's validation rows on that base, in nats, where training computed
    them; else empty.
    """

    model: PeftModel
    job: Job
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """log P(yes) - log P(no) of `prompts` in nats, uncalibrated, through plain PEFT. Raises
        RuntimeError once the next adapter was asked for, as `save` does.
        """
        self._check_present()
        return verdict_logits(self.model, prompts, self.job.builder)

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, which load in plain PEFT."""
        self._check_present()
        save_adapter(self.model, self.job.recipe, folder)

    def _check_present(self) -> None:
        """Neighbours stand on one base in turn: without its layers the base would answer alone."""
        if not any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            raise RuntimeError(
                f"{self.job.name}: the adapter is gone, because the next one was asked for "
                "(`(trained,) = fit(...)` asks for it too)"
            )


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
    was_training = model.training
    model.eval()
    logits = [float("nan")] * len(prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    bar = tqdm(total=len(prompts), desc="predict", unit="prompt", leave=False)
    with torch.inference_mode(), by_onednn(model), float32_head(model), bar:
        for indices in by_length(lengths, pass_tokens(model.device)):
            tensors = left_padded([prompts[index].token_ids for index in indices])
            on_device = {name: tensor.to(model.device) for name, tensor in tensors.items()}
            output = model(**on_device, logits_to_keep=1, use_cache=False)
            differences = yes_minus_no(output.logits[:, -1], builder)
            for index, logit in zip(indices, differences.tolist(), strict=True):
                logits[index] = logit
            bar.update(len(indices))
    model.train(was_training)
    return logits


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
