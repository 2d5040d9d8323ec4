"""A base and one aLoRA a rule, trained together. Knows nothing of files of examples or model cards.

An aLoRA reads the keys and values of a conversation and changes none of them: what they do not
hold, it cannot find. Here the loss of the verdict goes through the adapter of the row's rule into
the base.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from guard.errors import GuardError
from guard.layout import fingerprint
from guard.method import PEFT_WEIGHTS
from guard.prompt.decoder import PromptBuilder
from train.batch import by_length, left_padded
from train.examples import Row, Rows
from train.tiny import loop
from train.tiny.student import digest_of

ROWS_A_RULE = 2  # per step
PASS_TOKENS = 4096  # padded tokens that go through the model at once
ADAPTERS_LR = 5e-4
CLIP_BASE = 1.0
CLIP_ADAPTERS = 0.3
SCALING_OF_ITS_OWN = ("use_rslora", "alpha_pattern", "rank_pattern")
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"


@dataclass
class PassRows:
    """The rows of the next pass, which all layers read: the adapter of each row, and how many
    tokens its suffix has.
    """

    adapters: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    suffixes: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))


class OnSuffix(nn.Module):
    """A linear layer of the base plus the low-rank update of each row's adapter, on the row's
    suffix alone.

    `a` `[adapters, rank, in]`, `b` `[adapters, out, rank]`. Rows are padded on the left.
    """

    def __init__(
        self, base: nn.Linear, a: Tensor, b: Tensor, scaling: Tensor, rows: PassRows
    ) -> None:
        super().__init__()
        self.base = base
        self.rows = rows
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scaling = scaling[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, length, in]` -> `[rows, length, out]`."""
        out: Tensor = self.base(x)
        adapters, suffixes = self.rows.adapters, self.rows.suffixes
        longest = int(suffixes.max())
        is_suffix = torch.arange(longest, 0, -1) <= suffixes[:, None]
        a = self.a[adapters].transpose(1, 2)
        low = torch.bmm(x[:, -longest:], a) * self.scaling[adapters]
        b = self.b[adapters].transpose(1, 2)
        update = torch.bmm(low, b) * is_suffix[..., None]
        return torch.cat((out[:, :-longest], out[:, -longest:] + update), dim=1)


class JointModel:
    """A base whose weights are trained, all but the embedding's, with the aLoRAs in `folders` on
    the layers that they act on.

    Raises GuardError naming an adapter of another shape than the first, or one whose layers are
    not all scaled by lora_alpha / r.
    """

    def __init__(self, base: Path, folders: Sequence[Path]) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model = cast(PreTrainedModel, loaded)
        self.model.get_input_embeddings().weight.requires_grad_(False)
        factors = _factors_of(folders)
        scaling = torch.tensor([_scaling_of(folder) for folder in folders])
        self._rows = PassRows()
        self._layers: dict[str, OnSuffix] = {}
        for key in factors[0]:
            if not key.endswith(LORA_A):
                continue
            name = key.removeprefix("base_model.model.").removesuffix(LORA_A)
            linear = cast(nn.Linear, self.model.get_submodule(name))
            a = _stacked(factors, key)
            b = _stacked(factors, key.removesuffix(LORA_A) + LORA_B)
            self._layers[name] = OnSuffix(linear, a, b, scaling, self._rows)
            self.model.set_submodule(name, self._layers[name])

    @property
    def adapters(self) -> list[nn.Parameter]:
        """The factors of all adapters."""
        factors = []
        for layer in self._layers.values():
            factors += [layer.a, layer.b]
        return factors

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of the base that are trained."""
        adapters = set(map(id, self.adapters))
        trained = (weight for weight in self.model.parameters() if weight.requires_grad)
        return [weight for weight in trained if id(weight) not in adapters]

    def logits(self, rows: Sequence[Row], adapters: Sequence[int]) -> Tensor:
        """The vocabulary's logits `[rows, vocabulary]` at the verdict token of each row under its
        adapter.
        """
        suffixes = [len(row.prompt.token_ids) - row.prompt.invocation_start for row in rows]
        self._rows.adapters = torch.tensor(adapters)
        self._rows.suffixes = torch.tensor(suffixes)
        batch = left_padded([row.prompt.token_ids for row in rows])
        return cast(Tensor, self.model(**batch, logits_to_keep=1, use_cache=False).logits[:, -1])

    def take_out(self) -> PreTrainedModel:
        """Take the adapters out and return the base alone."""
        for name, layer in self._layers.items():
            self.model.set_submodule(name, layer.base)
        return self.model


def _factors_of(folders: Sequence[Path]) -> list[dict[str, Tensor]]:
    """The low-rank factors of each adapter by name. Raises GuardError naming one of another shape
    than the first.
    """
    adapters = [load_file(folder / PEFT_WEIGHTS) for folder in folders]
    for folder, factors in zip(folders, adapters, strict=True):
        if _shapes_of(factors) != _shapes_of(adapters[0]):
            raise GuardError(
                "an adapter of another shape than the first",
                where=folder,
                remedy="Train them by one recipe",
            )
    return adapters


def _shapes_of(factors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: factor.shape for name, factor in factors.items()}


def _scaling_of(folder: Path) -> float:
    config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    for key in SCALING_OF_ITS_OWN:
        value = getattr(config, key)
        if value:
            problem = f"'{key}' would not be read: every layer is scaled by lora_alpha / r"
            raise GuardError(problem, where=folder, got=value, remedy="Remove it, and train again")
    return config.lora_alpha / config.r


def _stacked(adapters: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    return torch.stack([factors[key].float() for factors in adapters])


@dataclass(frozen=True)
class Course:
    """What is taught: each rule's adapter and rows, how long, and how fast. `lr` is the base's at
    its peak; `phrasings` are those of the rules' phrase books, see `phrasings_of`.
    """

    base: Path
    folders: Sequence[Path]
    rows: Sequence[Rows]
    builder: PromptBuilder
    steps: int
    lr: float
    phrasings: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def made_from(self) -> str:
        """Fingerprint of all this, but for the number of steps."""
        rows_of_rules = []
        for rows in self.rows:
            rows_of_rules.append([(row.id, row.label, row.prompt.token_ids) for row in rows.train])
        adapters = [folder / PEFT_WEIGHTS for folder in self.folders]
        return fingerprint(
            digest_of(self.base),
            *adapters,
            rows_of_rules,
            dict(self.phrasings),
            self.lr,
            self.seed,
        )

    def verdict_ids(self, rows: Sequence[Row]) -> Tensor:
        """The token id of each row's verdict."""
        token_of = (self.builder.no_id, self.builder.yes_id)
        return torch.tensor([token_of[row.label] for row in rows])


def train(course: Course, checkpoint: Path, *, stop_after: int | None = None) -> JointModel:
    """The base and its adapters after the course, or after step `stop_after`; resumes from
    `checkpoint` and saves to it as it goes.

    A step reads ROWS_A_RULE rows of every rule. Raises GuardError if the checkpoint was made from
    something else.
    """
    learner = _JointTraining(course)
    state = loop.Checkpoint(checkpoint, course.made_from)
    loop.train(learner, state, steps=course.steps, stop_after=stop_after)
    return learner.joint


class _JointTraining(loop.Learner):
    name = "joint"
    weights_name = "model"
    newest_share = 0.03

    def __init__(self, course: Course) -> None:
        self.figures = {}
        self._course = course
        self.joint = JointModel(course.base, course.folders)
        self.model = self.joint.model
        groups = loop.parameter_groups(self.joint.weights)
        groups.append({"params": self.joint.adapters, "weight_decay": 0.0})
        for group, peak in zip(groups, (course.lr, course.lr, ADAPTERS_LR), strict=True):
            group["peak"] = peak
        self.optimizer = torch.optim.AdamW(groups, lr=course.lr, betas=loop.BETAS)

    def gradients(self, step: int) -> dict[str, float]:
        rows, adapters = zip(*_read(self._course, step), strict=True)
        loss_of_step = 0.0
        for part in _parts(rows):
            part_rows = [rows[index] for index in part]
            verdicts = self._course.verdict_ids(part_rows)
            logits = self.joint.logits(part_rows, [adapters[index] for index in part])
            summed = functional.cross_entropy(logits, verdicts, reduction="sum")
            loss = summed / len(rows)
            loss.backward()
            loss_of_step += loss.item()
        return {"loss": loss_of_step}

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.joint.weights, CLIP_BASE)
        nn.utils.clip_grad_norm_(self.joint.adapters, CLIP_ADAPTERS)

    def learning_rates(self, step: int) -> Sequence[float]:
        share = loop.share_of_peak(step, self._course.steps)
        return [share * group["peak"] for group in self.optimizer.param_groups]

    def progress(self) -> dict[str, Any]:
        return dict(self.figures)

    def restore_progress(self, state: dict[str, Any]) -> None:
        self.figures = {"loss": state["loss"]}


def _parts(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of rows that go through the model together."""
    return list(by_length([len(row.prompt.token_ids) for row in rows], PASS_TOKENS))


def _read(course: Course, step: int) -> list[tuple[Row, int]]:
    """The rows of a step and their adapters: every rule's rows once, in an order of their own,
    before any comes again.
    """
    drawn = []
    for adapter, rows in enumerate(course.rows):
        for position in range(step * ROWS_A_RULE, (step + 1) * ROWS_A_RULE):
            epoch, index = divmod(position, len(rows.train))
            order = _order(len(rows.train), f"{course.seed}:{adapter}:{epoch}")
            drawn.append((rows.train[order[index]], adapter))
    return drawn


@functools.cache
def _order(rows: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(rows), rows)


@torch.no_grad()
def validate(joint: JointModel, course: Course) -> list[float]:
    """AUROC of each rule's adapter on its validation rows."""
    aurocs = []
    for adapter, rows in enumerate(course.rows):
        labels = [row.label for row in rows.validation]
        logits = _verdict_logits(joint, rows.validation, adapter, course.builder)
        aurocs.append(float(roc_auc_score(labels, logits)))
    return aurocs


def _verdict_logits(
    joint: JointModel, rows: Sequence[Row], adapter: int, builder: PromptBuilder
) -> list[float]:
    """The logit of "violates", in nats, of each row under one adapter."""
    logits = [0.0] * len(rows)
    for part in _parts(rows):
        vocabulary = joint.logits([rows[index] for index in part], [adapter] * len(part))
        differences = vocabulary[:, builder.yes_id] - vocabulary[:, builder.no_id]
        for index, logit in zip(part, differences.tolist(), strict=True):
            logits[index] = logit
    return logits
