"""A base and one aLoRA a rule, trained together. Knows nothing of files of examples or model cards.

An aLoRA reads the keys and values of a conversation and changes none of them: what they do not hold, it cannot find. Here the loss of
the verdict goes through the adapter of the row's rule into the base.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.layout import fingerprint
from guard.method import PEFT_WEIGHTS
from guard.prompt import PromptBuilder
from train.adapter.batch import by_length, left_padded
from train.examples import Row, Rows
from train.tiny.distil import digest_of

ROWS_A_RULE = 2  # of a step
PASS_TOKENS = 4096  # padded
ADAPTERS_LR = 5e-4
CLIP_BASE, CLIP_ADAPTERS = 1.0, 0.3
SAVE_EVERY = 50  # steps


class OnSuffix(nn.Module):
    """A linear layer of the base plus the low-rank update of each row's adapter, on the row's suffix alone.

    `a` `[adapters, rank, in]`, `b` `[adapters, out, rank]`. `adapters` and `suffixes`: the adapter of each row of the next pass and how
    many tokens its suffix has; rows are padded on the left.
    """

    adapters: Tensor
    suffixes: Tensor

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scaling: Tensor) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a), nn.Parameter(b)
        self.scaling = scaling[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, length, in]` -> `[rows, length, out]`."""
        out: Tensor = self.base(x)
        longest = int(self.suffixes.max())
        acts = torch.arange(longest, 0, -1) <= self.suffixes[:, None]
        low = (
            torch.bmm(x[:, -longest:], self.a[self.adapters].transpose(1, 2))
            * self.scaling[self.adapters]
        )
        update = torch.bmm(low, self.b[self.adapters].transpose(1, 2)) * acts[..., None]
        return torch.cat((out[:, :-longest], out[:, -longest:] + update), dim=1)


class JointModel:
    """A base whose weights are trained, all but the embedding's, with the aLoRAs in `folders` on the layers that they act on."""

    def __init__(self, base: Path, folders: Sequence[Path]) -> None:
        self.model = cast(
            PreTrainedModel, AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        )
        self.model.get_input_embeddings().weight.requires_grad_(False)
        configs = [cast(LoraConfig, LoraConfig.from_pretrained(str(folder))) for folder in folders]
        weights = [load_file(folder / PEFT_WEIGHTS) for folder in folders]
        shapes = [{name: factor.shape for name, factor in each.items()} for each in weights]
        for folder, each in zip(folders, shapes, strict=True):
            if each != shapes[0]:
                raise GuardError(
                    "an adapter of another shape than the first",
                    where=folder,
                    remedy="Train them by one recipe",
                )
        scaling = torch.tensor([config.lora_alpha / config.r for config in configs])
        suffix = ".lora_A.weight"
        self._layers: dict[str, OnSuffix] = {}
        for key in [key for key in weights[0] if key.endswith(suffix)]:
            name = key.removeprefix("base_model.model.").removesuffix(suffix)
            a, b = (
                torch.stack([each[factor].float() for each in weights])
                for factor in (key, key.replace("lora_A", "lora_B"))
            )
            self._layers[name] = OnSuffix(
                cast(nn.Linear, self.model.get_submodule(name)), a, b, scaling
            )
            self.model.set_submodule(name, self._layers[name])

    @property
    def adapters(self) -> list[nn.Parameter]:
        """The factors of all adapters."""
        return [factor for layer in self._layers.values() for factor in (layer.a, layer.b)]

    @property
    def weights(self) -> list[nn.Parameter]:
        """What is trained of the base."""
        adapters = set(map(id, self.adapters))
        return [
            weight
            for weight in self.model.parameters()
            if weight.requires_grad and id(weight) not in adapters
        ]

    def logits(self, rows: Sequence[Row], adapters: Sequence[int]) -> Tensor:
        """The vocabulary's logits `[rows, vocabulary]` at the verdict token of each row under its adapter."""
        OnSuffix.adapters = torch.tensor(adapters)
        OnSuffix.suffixes = torch.tensor(
            [len(row.prompt.token_ids) - row.prompt.invocation_start for row in rows]
        )
        batch = left_padded([row.prompt.token_ids for row in rows])
        return cast(Tensor, self.model(**batch, logits_to_keep=1, use_cache=False).logits[:, -1])

    def take_out(self) -> PreTrainedModel:
        """The base alone."""
        for name, layer in self._layers.items():
            self.model.set_submodule(name, layer.base)
        return self.model


@dataclass(frozen=True)
class Course:
    """What is taught: each rule's adapter and rows, how long, and how fast. `lr` is the base's at its peak."""

    base: Path
    folders: Sequence[Path]
    rows: Sequence[Rows]
    builder: PromptBuilder
    steps: int
    lr: float
    seed: int = 0

    @property
    def made_from(self) -> str:
        """Fingerprint of all this, but for the number of steps."""
        rows = [
            [(row.id, row.label, row.prompt.token_ids) for row in each.train] for each in self.rows
        ]
        return fingerprint(
            digest_of(self.base),
            *(folder / PEFT_WEIGHTS for folder in self.folders),
            rows,
            self.lr,
            self.seed,
        )


def train(course: Course, checkpoint: Path, *, stop_after: int | None = None) -> JointModel:
    """The base and its adapters after the course, or after step `stop_after`; resumes from `checkpoint` and saves to it as it goes.

    A step reads ROWS_A_RULE rows of every rule. Warm-up, plateau, decay over the last third. Raises GuardError if the checkpoint was
    made from something else.
    """
    joint = JointModel(course.base, course.folders)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [weight for weight in joint.weights if weight.ndim > 1],
                "weight_decay": 0.05,
                "peak": course.lr,
            },
            {
                "params": [weight for weight in joint.weights if weight.ndim == 1],
                "weight_decay": 0.0,
                "peak": course.lr,
            },
            {"params": joint.adapters, "weight_decay": 0.0, "peak": ADAPTERS_LR},
        ],
        lr=course.lr,
        betas=(0.9, 0.95),
    )
    begin, running = 0, 0.0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        if state["made_from"] != course.made_from:
            remedy = "Repeat the command it was made with, delete it to start anew, or choose another folder with --work"
            raise GuardError(
                "the checkpoint of an earlier run was made from something else",
                where=checkpoint,
                remedy=remedy,
            )
        joint.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin, running = state["step"], state["loss"]
    end = max(begin, stop_after or course.steps)
    bar = tqdm(range(begin, end), initial=begin, total=course.steps, desc="joint", unit="step")
    for step in bar:
        share = min((step + 1) / 60, 1.0, 3 * (course.steps - step) / course.steps)
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak"]
        loss = _gradients(joint, course, step)
        nn.utils.clip_grad_norm_(joint.weights, CLIP_BASE)
        nn.utils.clip_grad_norm_(joint.adapters, CLIP_ADAPTERS)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = 0.97 * running + 0.03 * loss if running else loss
        bar.set_postfix(loss=f"{running:.3f}", refresh=False)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == end:
            state = {
                "model": joint.model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "made_from": course.made_from,
            }
            with atomic_write(checkpoint) as part:
                torch.save({**state, "step": step + 1, "loss": running}, part)
    return joint


def _gradients(joint: JointModel, course: Course, step: int) -> float:
    """Leave a step's gradients in the weights; its mean loss in nats."""
    rows, adapters = zip(*_read(course, step), strict=True)
    total = 0.0
    for part in by_length([len(row.prompt.token_ids) for row in rows], PASS_TOKENS):
        verdicts = torch.tensor(
            [course.builder.yes_id if rows[index].label else course.builder.no_id for index in part]
        )
        after = joint.logits([rows[index] for index in part], [adapters[index] for index in part])
        loss = functional.cross_entropy(after, verdicts, reduction="sum") / len(rows)
        loss.backward()
        total += loss.item()
    return total


def _read(course: Course, step: int) -> list[tuple[Row, int]]:
    """The rows of a step and their adapters: every rule's rows once, in an order of their own, before any comes again."""
    found = []
    for adapter, rows in enumerate(course.rows):
        for place in range(step * ROWS_A_RULE, (step + 1) * ROWS_A_RULE):
            epoch, index = divmod(place, len(rows.train))
            found.append(
                (
                    rows.train[_order(len(rows.train), f"{course.seed}:{adapter}:{epoch}")[index]],
                    adapter,
                )
            )
    return found


@functools.cache
def _order(rows: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(rows), rows)


@torch.no_grad()
def validate(joint: JointModel, course: Course) -> list[float]:
    """AUROC of each rule's adapter on its validation rows."""
    scores = []
    for adapter, each in enumerate(course.rows):
        rows = each.validation
        logits = [0.0] * len(rows)
        for part in by_length([len(row.prompt.token_ids) for row in rows], PASS_TOKENS):
            after = joint.logits([rows[index] for index in part], [adapter] * len(part))
            for index, logit in zip(
                part,
                (after[:, course.builder.yes_id] - after[:, course.builder.no_id]).tolist(),
                strict=True,
            ):
                logits[index] = logit
        scores.append(float(roc_auc_score([row.label for row in rows], logits)))
    return scores
